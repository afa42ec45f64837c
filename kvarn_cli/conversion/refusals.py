"""Settings and models that cannot be converted, as the small files of a model tell."""

from transformers import PreTrainedConfig

from kvarn_cli.checkpoint.source import Source
from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.evaluation.rehearsal import rehearse
from kvarn_cli.metadata import KVarNConfig
from kvarn_cli.settings import KVarNSettings

_ADAPTER_NAME = "adapter_config.json"


def refuse_layout(settings: KVarNSettings) -> None:
    """Refuse records that no engine would read.

    Raises:
        UsageError: naming the layout to take.
    """
    if settings.layout != KVarNSettings.layout:
        raise UsageError(
            f"no public engine stores records in the layout {settings.layout}",
            hint=f"convert with {KVarNSettings.layout}; KVarNCache and inspect-errors take "
            f"{settings.layout} without a conversion",
        )


def refuse_converted(config: dict[str, object], source: Source) -> None:
    """Refuse a model that was converted already.

    Args:
        config: its config.json.
        source: it.

    Raises:
        UnsupportedModelError: naming the original.
    """
    block = KVarNConfig.from_config_dict(config)
    if block is not None:
        raise UnsupportedModelError(
            f"{source.name} was converted already, to {block.cache.dtype} with {block.rotated}'s "
            f"rotation {block.rotations.value.where}; converting it twice would rotate twice",
            hint=f"convert the original again: {block.base_model.name}",
        )


def refuse_adapter(source: Source) -> None:
    """Refuse a model of which an adapter beside the weights is a part.

    Raises:
        UnsupportedModelError: naming the adapter.
    """
    if (source.folder / _ADAPTER_NAME).is_file():
        raise UnsupportedModelError(
            f"{source.name} holds {_ADAPTER_NAME}: an adapter, loaded on top of the weights",
            hint="merge it first (peft: merge_and_unload), or remove its files",
        )


def refuse_unmeasurable(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Refuse a model whose conversion cannot be validated; see `rehearse`.

    Raises:
        UnsupportedModelError: naming what stands in the way.
    """
    try:
        rehearse(config, trust_remote_code=trust_remote_code)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"the conversion cannot be validated: {error}",
            hint="convert without validation: --no-validate",
        ) from error

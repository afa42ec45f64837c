"""What a converted model says of its own cache, held against the model itself."""

from transformers import PreTrainedConfig

from kvarn_cli.errors import CheckpointError
from kvarn_cli.metadata import CONFIG_KEY, KVarNConfig
from kvarn_cli.runtime.coverage import covered_layers, rope_key_dim


def described_cache(config: PreTrainedConfig) -> KVarNConfig | None:
    """The `kvarn_config` block of a model's configuration; None when it is not converted.

    The width of its heads is left to the cache, which sees the states.

    Raises:
        CheckpointError: the block is broken, or describes another model than this one.
        UnsupportedModelError: no packed cache can hold what this model caches.
    """
    block = KVarNConfig.from_config_dict(config.to_dict())
    if block is None:
        return None
    rope_dim = rope_key_dim(config)
    if block.cache.rope_dim != rope_dim:
        described, own = (
            "K and V" if width is None else f"a latent beside a RoPE key of {width} channels"
            for width in (block.cache.rope_dim, rope_dim)
        )
        raise CheckpointError(
            f"config.json: {CONFIG_KEY} describes a cache of {described}, the model's is of {own}"
        )
    if others := sorted(set(block.layers.covered) - set(covered_layers(config))):
        raise CheckpointError(
            f"config.json: {CONFIG_KEY} covers layer {others[0]}, which has no full attention "
            "to pack"
        )
    return block

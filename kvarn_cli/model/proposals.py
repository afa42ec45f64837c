"""The layouts that a class may have, for the proof to choose from."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from kvarn_cli.model.cache_trace import TracedLayer
from kvarn_cli.model.latent_layout import UNIT_WEIGHTS, find_latent_layout
from kvarn_cli.model.layout import ModelLayout
from kvarn_cli.model.projections import ARRANGEMENTS, find_layout, has_joined_projections
from kvarn_cli.runtime.coverage import rope_key_dim


def arrangements_of(model: PreTrainedModel, traced: Mapping[int, TracedLayer]) -> tuple[str, ...]:
    """Names of the proposals, the likeliest first.

    They say how a projection of Q, K and V is divided; of an MLA model, what its latent's norm
    multiplies by.

    Args:
        model: on any device.
        traced: from `trace_cache`, of this model.
    """
    if rope_key_dim(model.config) is not None:
        return tuple(UNIT_WEIGHTS)
    arrangements = tuple(ARRANGEMENTS)
    return arrangements if has_joined_projections(model, traced) else arrangements[:1]


def proposed_layout(
    model: PreTrainedModel, traced: Mapping[int, TracedLayer], head_dim: int, arrangement: str
) -> ModelLayout:
    """One of the proposals.

    Args:
        model: on any device; its parameters name the tensors.
        traced: from `trace_cache`, of this model.
        head_dim: channels of a head, or of the latent.
        arrangement: one of `arrangements_of`.

    Raises:
        UnsupportedModelError: it does not fit the model's parts.
    """
    if arrangement in UNIT_WEIGHTS:
        return find_latent_layout(model, traced, arrangement)
    return find_layout(model, traced, head_dim, arrangement)

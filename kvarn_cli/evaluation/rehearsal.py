"""Whether a model can be measured, found out before its weights are downloaded or loaded."""

import warnings

import torch
from transformers import PreTrainedConfig

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.evaluation.pseudo_decode import record_exact
from kvarn_cli.model.loading import quiet_transformers
from kvarn_cli.model.shrunken import MODEL_CODE_ERRORS, build_random_model, shrink_config

_TOKENS = torch.arange(4)[None]


def rehearse(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Run a small random instance of a model the way a measurement runs the model.

    Whatever the code of its attention does that a pseudo-decode cannot reproduce, such as a cap on
    the scores or attention sinks, is refused here. A class of which no small instance can be built
    or run is left to the measurement itself.

    Args:
        config: of the model; a text model nested inside it is found.
        trust_remote_code: whether code from the checkpoint may run.

    Raises:
        UnsupportedModelError: naming what stands in the way.
    """
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            small = shrink_config(config.get_text_config(decoder=True))
            model = build_random_model(small, seed=0, trust_remote_code=trust_remote_code)
        except (UnsupportedModelError, *MODEL_CODE_ERRORS):
            return
        try:
            record_exact(model, _TOKENS)
        except MODEL_CODE_ERRORS:
            return

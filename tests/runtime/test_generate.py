"""`model.generate` with a packed cache, judged by the one-pass logits of what it generated."""

import pytest
import torch
from converted_folder import converted_config
from decoding import largest_difference, method_of, one_pass_logits, random_tokens
from fused_models import fuse
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.errors import UsageError
from kvarn_cli.metadata import CONFIG_KEY, Layers
from kvarn_cli.quantization.methods import Method
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.settings import KVarNSettings

PROMPT = 20
NEW = 100


@pytest.fixture(scope="module")
def converted(llama: PreTrainedModel) -> PreTrainedModel:
    """`llama` with V fused and a `kvarn_config` at 2 bits, groups of 32 and a sink of 16."""
    settings = KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=16)
    block = converted_config(settings, head_dim=32, layers=Layers(covered=[0, 1]))
    model = fuse(llama)
    setattr(model.config, CONFIG_KEY, block.model_dump(mode="json"))
    return model


def _generate(model: PreTrainedModel, cache: KVarNCache, **options: object) -> object:
    model.generation_config.eos_token_id = None
    return model.generate(
        random_tokens(PROMPT),
        cache=cache,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def _predictions(model: PreTrainedModel, sequence: Tensor, method: Method) -> Tensor:
    """Logits of the generated tokens, [NEW, vocabulary], when all steps but the prompt are tokens.

    The prompt ends before the first tile does, so that it finds nothing packed either way.
    """
    return one_pass_logits(model, sequence[None], method)[0, PROMPT - 1 : -1]


def test_greedy_text_is_the_one_that_one_pass_predicts(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    generated = _generate(llama, KVarNCache(llama.config, settings))
    sequence = generated.sequences[0]
    logits = _predictions(llama, sequence, method_of(settings))
    assert torch.equal(logits.argmax(-1), sequence[PROMPT:])
    scores = torch.cat(generated.scores)
    assert largest_difference(scores, logits.to(scores.dtype)) < 1e-5


def test_a_fused_model_generates_with_the_settings_of_its_configuration(
    converted: PreTrainedModel, settings: KVarNSettings
) -> None:
    cache = KVarNCache.from_model(converted)
    assert cache.settings == settings
    sequence = _generate(converted, cache).sequences[0]
    as_it_is = method_of(settings, value_rotation="fused")
    logits = _predictions(converted, sequence, as_it_is)
    assert torch.equal(logits.argmax(-1), sequence[PROMPT:])
    rotated_again = _predictions(converted, sequence, method_of(settings))
    assert largest_difference(logits, rotated_again) > 1e-2
    assert cache.memory_bytes().held_bytes < cache.memory_bytes().sixteen_bit_bytes


def test_beam_search_scores_are_those_of_one_pass(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    cache = KVarNCache(llama.config, settings)
    generated = _generate(llama, cache, num_beams=4, num_return_sequences=2)
    for sequence, score in zip(generated.sequences, generated.sequences_scores, strict=True):
        logits = _predictions(llama, sequence, method_of(settings))
        chosen = logits.log_softmax(-1).gather(-1, sequence[PROMPT:, None])
        assert abs(chosen.mean().item() - score.item()) < 1e-5


def test_rejected_drafts_change_nothing(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    crops = []

    class Recorded(KVarNCache):
        def crop(self, tokens_to_remove: int) -> None:
            crops.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    plain = _generate(llama, KVarNCache(llama.config, settings))
    cache = Recorded(llama.config, settings)
    drafted = _generate(llama, cache, prompt_lookup_num_tokens=5, max_matching_ngram_size=1)
    assert min(crops) < -1
    assert torch.equal(drafted.sequences, plain.sequences)


def test_settings_given_in_code_replace_those_of_the_configuration(
    converted: PreTrainedModel,
) -> None:
    settings = KVarNSettings.from_name("k4v4_g64")
    cache = KVarNCache.from_model(converted, settings)
    assert cache.settings == settings
    assert cache.layers[0].plan.fused


def test_a_model_that_is_not_converted_needs_settings(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    with pytest.raises(UsageError, match="no kvarn_config") as refused:
        KVarNCache.from_model(llama)
    assert "from_name" in refused.value.hint
    assert not KVarNCache.from_model(llama, settings).layers[0].plan.fused

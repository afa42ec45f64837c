"""Decoding SmolLM2 with the packed cache, step by step and in one pass."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
from decoding import (
    cached_logits,
    exact_logits,
    largest_difference,
    method_of,
    one_pass_logits,
    tile_lengths,
)
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.logit_errors import compare_logits
from kvarn_cli.model.loading import load_tokenizer
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.settings import KVarNSettings

pytestmark = pytest.mark.real_model

NUM_TOKENS = 700
SETTINGS = KVarNSettings(key_bits=2, value_bits=2)


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> Tensor:
    tokenizer = load_tokenizer(smollm2)
    return tokenizer(topics["class"], return_tensors="pt", verbose=False).input_ids[:, :NUM_TOKENS]


@pytest.fixture(scope="module")
def one_pass(smollm2_model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return one_pass_logits(smollm2_model, tokens, method_of(SETTINGS))


def test_blocks_of_one_tile_give_the_logits_of_one_pass(
    smollm2_model: PreTrainedModel, tokens: Tensor, one_pass: Tensor
) -> None:
    cache = KVarNCache(smollm2_model.config, SETTINGS)
    stepped = cached_logits(smollm2_model, tokens, cache, tile_lengths(NUM_TOKENS, SETTINGS))
    assert largest_difference(stepped, one_pass) <= 1e-5
    assert largest_difference(one_pass, exact_logits(smollm2_model, tokens)) >= 1e-4


def test_token_by_token_is_far_closer_to_one_pass_than_to_the_exact_model(
    smollm2_model: PreTrainedModel, tokens: Tensor, one_pass: Tensor
) -> None:
    """In float32 another grouping flips a few roundings of codes: logits move, KL hardly."""
    stepped = cached_logits(
        smollm2_model, tokens, KVarNCache(smollm2_model.config, SETTINGS), [1] * NUM_TOKENS
    )
    exact = exact_logits(smollm2_model, tokens)
    between = compare_logits(one_pass[0], stepped[0], tokens[0]).kl.mean()
    to_exact = compare_logits(exact[0], one_pass[0], tokens[0]).kl.mean()
    assert to_exact > 0.01
    assert between < to_exact / 20

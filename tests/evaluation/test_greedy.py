import pytest
import torch
from decoding import random_tokens
from transformers import PreTrainedModel

from kvarn_cli.evaluation.greedy import exact_continuation, same_tokens
from kvarn_cli.quantization.methods import parse_method


def test_the_exact_continuation_is_transformers_own(llama: PreTrainedModel) -> None:
    prompt = random_tokens(60)
    expected = llama.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(exact_continuation(llama, prompt, 12), expected[0, 60:])


def test_a_cache_that_packs_nothing_writes_the_same(llama: PreTrainedModel) -> None:
    prompt = random_tokens(60)
    expected = exact_continuation(llama, prompt, 12)
    assert same_tokens(llama, prompt, expected, parse_method("kvarn:k2v2_g128")) == 12


@pytest.mark.parametrize("position", [0, 5])
def test_the_first_other_token_ends_the_count(llama: PreTrainedModel, position: int) -> None:
    prompt = random_tokens(60)
    expected = exact_continuation(llama, prompt, 8).clone()
    expected[position] = (expected[position] + 1) % 300
    assert same_tokens(llama, prompt, expected, parse_method("kvarn:k2v2_g128")) == position


def test_the_prompt_is_read_from_packed_tiles(llama: PreTrainedModel) -> None:
    """Coarse codes and no sink depart on some prompt within a few tokens."""
    method = parse_method("kvarn:k2v2_g32,sink_tokens=0")
    counts = []
    for seed in range(4):
        prompt = random_tokens(200, seed=seed)
        counts.append(same_tokens(llama, prompt, exact_continuation(llama, prompt, 12), method))
    assert min(counts) < 12

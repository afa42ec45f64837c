"""A packed cache of latents does what one of K and V does; see test_cache.

Batches hold two sequences: alone, a tile is normalized by other kernels than in company, and a
code in ten thousand rounds the other way.
"""

import pytest
import torch
from decoding import (
    cached_logits,
    exact_logits,
    largest_difference,
    method_of,
    one_pass_logits,
    random_tokens,
    tile_lengths,
)
from latent_models import LATENT_FAMILIES, latent_config, latent_model
from tiny_models import tiny_config
from transformers import DynamicCache, PreTrainedModel

from kvarn_cli.errors import UnsupportedModelError, UsageError
from kvarn_cli.runtime.cache import KVarNCache, KVarNIndexedLayer, KVarNLayer
from kvarn_cli.settings import KVarNSettings

SETTINGS = KVarNSettings.from_name("mla_k2_g32").with_(sink_tokens=16)


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    """Its sparse attention chooses 48 tokens, by an indexer with keys of its own."""
    return latent_model("deepseek_v32", index_topk=48, index_n_heads=16, index_head_dim=32)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_steps_through_the_cache_give_the_logits_of_one_pass(family: str) -> None:
    model, tokens = latent_model(family), random_tokens(150, batch=2)
    cache = KVarNCache(model.config, SETTINGS)
    stepped = cached_logits(model, tokens, cache, tile_lengths(150, SETTINGS))
    one_pass = one_pass_logits(model, tokens, method_of(SETTINGS))
    exact = exact_logits(model, tokens)
    assert largest_difference(stepped, one_pass) < 1e-4
    assert largest_difference(one_pass, exact) > 0.1
    assert largest_difference(one_pass[:, :48], exact[:, :48]) < 1e-4
    assert len(cache.covered) == (1 if family in ("kimi_linear", "bailing_hybrid") else 2)


def test_sparse_attention_chooses_the_same_tokens_in_both(deepseek: PreTrainedModel) -> None:
    tokens = random_tokens(150, batch=2)
    cache = KVarNCache(deepseek.config, SETTINGS)
    stepped = cached_logits(deepseek, tokens, cache, tile_lengths(150, SETTINGS))
    assert isinstance(cache.layers[0], KVarNIndexedLayer)
    one_pass = one_pass_logits(deepseek, tokens, method_of(SETTINGS))
    assert largest_difference(stepped, one_pass) < 1e-9
    plain = cached_logits(deepseek, tokens, DynamicCache(config=deepseek.config), [150])
    assert largest_difference(exact_logits(deepseek, tokens), plain) < 1e-9


def test_the_cache_holds_records_of_latents(deepseek: PreTrainedModel) -> None:
    cache = KVarNCache(deepseek.config, SETTINGS)
    cached_logits(deepseek, random_tokens(150, batch=3), cache, [150])
    for layer in cache.layers:
        assert isinstance(layer, KVarNLayer)
        assert layer.packed_tokens == 128
        assert layer.keys.shape == (3, 1, 22, 32)
        assert layer.values.shape == (3, 1, 22, 16)
        assert layer.records.shape == (3, 1, 4, SETTINGS.record_bytes(32, 16))
    memory = cache.memory_bytes()
    layers = 3 * 2
    assert memory.held_bytes == layers * SETTINGS.cache_bytes(150, 32, 16, exact_element_bytes=8)
    assert memory.sixteen_bit_bytes == layers * 150 * (32 + 16) * 2


def test_beams_take_their_records_and_indexer_keys_along(deepseek: PreTrainedModel) -> None:
    past, new = random_tokens(100, batch=3), random_tokens(20, batch=3, seed=1)
    lengths = tile_lengths(100, SETTINGS)
    cache = KVarNCache(deepseek.config, SETTINGS)
    cached_logits(deepseek, past, cache, lengths)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    result = cached_logits(deepseek, new, cache, [20])
    tokens = torch.cat((past[[2, 0, 0]], new), dim=1)
    fresh = cached_logits(deepseek, tokens, KVarNCache(deepseek.config, SETTINGS), [*lengths, 20])
    assert largest_difference(result, fresh[:, 100:]) < 1e-9


def test_recorded_drafts_leave_no_trace(deepseek: PreTrainedModel) -> None:
    tokens = random_tokens(120, batch=2)
    cache = KVarNCache(deepseek.config, SETTINGS)
    cached_logits(deepseek, tokens[:, :70], cache, tile_lengths(70, SETTINGS))
    cache.activate_past_recording()
    cached_logits(deepseek, random_tokens(20, batch=2, seed=5), cache, [20])
    cache.crop(-20)
    rest = cached_logits(deepseek, tokens[:, 70:], cache, [50])
    cache.crop(0)
    assert cache.layers[0].packed_tokens == 96
    lengths = [*tile_lengths(70, SETTINGS), 50]
    fresh = cached_logits(deepseek, tokens, KVarNCache(deepseek.config, SETTINGS), lengths)
    assert largest_difference(rest, fresh[:, 70:]) < 1e-9


def test_a_reset_cache_is_a_new_one(deepseek: PreTrainedModel) -> None:
    cache = KVarNCache(deepseek.config, SETTINGS)
    cached_logits(deepseek, random_tokens(100, batch=2), cache, [100])
    cache.reset()
    assert (cache.get_seq_length(), cache.memory_bytes().held_bytes) == (0, 0)
    tokens = random_tokens(100, batch=2, seed=3)
    again = cached_logits(deepseek, tokens, cache, tile_lengths(100, SETTINGS))
    fresh = KVarNCache(deepseek.config, SETTINGS)
    assert torch.equal(again, cached_logits(deepseek, tokens, fresh, tile_lengths(100, SETTINGS)))


def test_generate_takes_it() -> None:
    model = latent_model("minicpm3", torch.float32)
    tokens = random_tokens(60)
    cache = KVarNCache.from_model(model, SETTINGS)
    written = model.generate(tokens, cache=cache, max_new_tokens=8, do_sample=False)
    assert written.shape == (1, 68)
    assert cache.get_seq_length() == 67
    assert cache.layers[0].packed_tokens == 32


@pytest.mark.parametrize(
    ("config", "preset", "named"),
    [
        (latent_config("deepseek_v3"), "k4v2_g128", "caches a latent"),
        (tiny_config("llama"), "mla_k4_g128", "caches K and V, no latent"),
    ],
)
def test_settings_of_the_other_kind_of_cache_are_refused(config, preset, named) -> None:
    with pytest.raises(UsageError, match=f"{preset} does not fit .* which {named}") as refused:
        KVarNCache(config, KVarNSettings.from_name(preset))
    assert "g128" in refused.value.hint


def test_a_latent_that_no_record_holds_is_refused() -> None:
    cache = KVarNCache(latent_config("deepseek_v3", kv_lora_rank=48), SETTINGS)
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is 48 in layer 0 of deepseek_v3"):
        cache.update(torch.zeros(1, 1, 3, 48), torch.zeros(1, 1, 3, 16), 0)

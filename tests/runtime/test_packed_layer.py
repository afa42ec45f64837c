"""Layers of hybrids, and layers that differ: what is packed beside what stays."""

from collections.abc import Callable

import pytest
import torch
from architectures import build_random_model, tiny_architecture
from decoding import cached_logits, calm_model, largest_difference
from transformers import Gemma4TextConfig, PreTrainedModel

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.rehearsal import check_agreement
from kvarn_cli.model.shrunken import shrink_config
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.runtime.packed_layer import KVarNHybridLayer, KVarNLayer
from kvarn_cli.settings import KVarNSettings

SETTINGS = KVarNSettings(group_size=32, sink_tokens=0)


def tokens_of(batch: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, 120, (batch, num_tokens), generator=generator)


@pytest.fixture(scope="module")
def falcon_h1() -> PreTrainedModel:
    config = tiny_architecture("falcon_h1")
    return build_random_model(config, seed=0, trust_remote_code=False)


def test_a_state_stays_beside_packed_keys_and_values(falcon_h1: PreTrainedModel) -> None:
    cache = KVarNCache(falcon_h1.config, SETTINGS)
    cached_logits(falcon_h1, tokens_of(1, 40), cache, [40])
    layer = cache.layers[0]
    assert isinstance(layer, KVarNHybridLayer)
    assert layer.packed_tokens == 32
    assert layer.keys.shape[-2] == 8
    assert layer.recurrent_states[0].abs().max() > 0


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.reorder_cache(torch.tensor([0, 0])), [0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ],
    ids=["swapped", "doubled", "chosen", "repeated"],
)
def test_states_follow_their_beams(
    falcon_h1: PreTrainedModel, change: Callable[[KVarNCache], None], order: list[int]
) -> None:
    past, new = tokens_of(2, 40), tokens_of(len(order), 1, seed=1)
    cache = KVarNCache(falcon_h1.config, SETTINGS)
    cached_logits(falcon_h1, past, cache, [40])
    change(cache)
    continued = cached_logits(falcon_h1, new, cache, [1])
    fresh = KVarNCache(falcon_h1.config, SETTINGS)
    cached_logits(falcon_h1, past[order], fresh, [40])
    assert largest_difference(continued, cached_logits(falcon_h1, new, fresh, [1])) < 1e-5


def test_a_refused_crop_leaves_the_state_as_it_was(falcon_h1: PreTrainedModel) -> None:
    cache = KVarNCache(falcon_h1.config, SETTINGS)
    cached_logits(falcon_h1, tokens_of(1, 40), cache, [40])
    layer = cache.layers[0]
    with pytest.raises(UsageError, match="layer 0 keeps a window or a state") as refused:
        cache.crop(-2)
    assert "activate_past_recording" in refused.value.hint
    cache.activate_past_recording()
    cached_logits(falcon_h1, tokens_of(1, 4, seed=1), cache, [4])
    recorded = layer.conv_states[0]
    for cropped in (cache, layer):
        with pytest.raises(UsageError, match="only the newest 12 are still exact"):
            cropped.crop(-13)
    assert (cache.get_seq_length(), layer.conv_states[0] is recorded) == (44, True)
    cache.crop(-2)
    assert cache.get_seq_length() == 42
    assert layer.conv_states[0].shape[-1] < recorded.shape[-1]


@pytest.mark.parametrize(
    "kinds",
    [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]],
    ids=["window first", "window last"],
)
def test_a_refused_crop_changes_no_layer(kinds: list[str]) -> None:
    model = calm_model("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=48)
    cache = KVarNCache(model.config, SETTINGS)
    cached_logits(model, tokens_of(1, 60), cache, [60])
    with pytest.raises(UsageError, match="keeps a window or a state"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [60, 60]
    cache.activate_past_recording()
    cached_logits(model, tokens_of(1, 5, seed=1), cache, [5])
    with pytest.raises(UsageError, match="only the newest 33 are still exact"):
        cache.crop(-34)
    assert [layer.get_seq_length() for layer in cache.layers] == [65, 65]
    cache.crop(-5)
    assert [layer.get_seq_length() for layer in cache.layers] == [60, 60]


def test_a_reset_forgets_the_state_too(falcon_h1: PreTrainedModel) -> None:
    cache = KVarNCache(falcon_h1.config, SETTINGS)
    cached_logits(falcon_h1, tokens_of(1, 40, seed=2), cache, [40])
    with torch.inference_mode():
        cache.reset()
    again = cached_logits(falcon_h1, tokens_of(1, 40), cache, [40])
    fresh = KVarNCache(falcon_h1.config, SETTINGS)
    assert largest_difference(again, cached_logits(falcon_h1, tokens_of(1, 40), fresh, [40])) < 1e-9


def test_only_attention_of_a_hybrid_is_packed() -> None:
    config = tiny_architecture("qwen3_next")
    cache = KVarNCache(config, SETTINGS)
    assert [isinstance(layer, KVarNLayer) for layer in cache.layers] == [False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_shared_layers": 2, "num_hidden_layers": 4},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_hidden_layers": 2},
    ],
    ids=["layers that read another layer's cache", "V taken from K"],
)
def test_layers_without_a_v_of_their_own_see_what_the_cache_gives_back(
    changes: dict[str, int],
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    layers = changes["num_hidden_layers"] // 2
    widths = {"hidden_size": 256, "head_dim": 32, "global_head_dim": 64}
    config = shrink_config(Gemma4TextConfig(layer_types=kinds * layers, **widths, **changes))
    model = build_random_model(config, seed=0, trust_remote_code=False)
    check_agreement(model, 100)
    cache = KVarNCache(config, SETTINGS)
    assert cache.covered == (1,)
    cached_logits(model, tokens_of(1, 40), cache, [40])
    assert cache.layers[1].codec.widths == (64, 64)

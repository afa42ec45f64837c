"""What the cache holds, gives back and refuses; logits are judged by the one-pass result."""

import pytest
import torch
from decoding import (
    cached_logits,
    calm_model,
    exact_logits,
    largest_difference,
    method_of,
    one_pass_logits,
    random_tokens,
    tile_lengths,
)
from transformers import DynamicCache, PreTrainedModel

from kvarn_cli.errors import CheckpointError, UnsupportedModelError, UsageError
from kvarn_cli.runtime.cache import KVarNCache
from kvarn_cli.runtime.packed_layer import KVarNLayer
from kvarn_cli.settings import KVarNSettings

LENGTHS = [1, 127, 128, 129, 255, 256, 257, 300, 700]
SETTINGS = [
    KVarNSettings(key_bits=2, value_bits=2),
    KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=0),
]


def _sees_a_packed_tile(num_tokens: int, settings: KVarNSettings) -> bool:
    return num_tokens > settings.sink_tokens + settings.group_size


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["sink128-g128", "sink0-g32"])
@pytest.mark.parametrize(
    ("dtype", "token_by_token", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.float64, True, 1e-6)],
    ids=["tile-by-tile", "token-by-token"],
)
def test_steps_through_the_cache_give_the_logits_of_one_pass(
    family: str,
    settings: KVarNSettings,
    dtype: torch.dtype,
    token_by_token: bool,
    tolerance: float,
) -> None:
    model = calm_model(family, dtype)
    for num_tokens in LENGTHS:
        tokens = random_tokens(num_tokens, seed=num_tokens)
        lengths = [1] * num_tokens if token_by_token else tile_lengths(num_tokens, settings)
        stepped = cached_logits(model, tokens, KVarNCache(model.config, settings), lengths)
        one_pass = one_pass_logits(model, tokens, method_of(settings))
        exact = exact_logits(model, tokens)
        assert largest_difference(stepped, one_pass) <= tolerance, num_tokens
        if _sees_a_packed_tile(num_tokens, settings):
            assert largest_difference(one_pass, exact) >= 10 * tolerance, num_tokens
        else:
            assert largest_difference(stepped, exact) <= tolerance, num_tokens


def test_the_refined_encoder_packs_in_the_cache_as_in_one_pass(llama: PreTrainedModel) -> None:
    settings = SETTINGS[1].with_(encoder="refined")
    tokens = random_tokens(200)
    cache = KVarNCache(llama.config, settings)
    stepped = cached_logits(llama, tokens, cache, tile_lengths(200, settings))
    one_pass = one_pass_logits(llama, tokens, method_of(settings))
    reference = one_pass_logits(llama, tokens, method_of(SETTINGS[1]))
    exact = exact_logits(llama, tokens)
    assert largest_difference(stepped, one_pass) <= 1e-4
    assert (one_pass - exact).norm() < 0.95 * (reference - exact).norm()


def test_the_papers_layout_takes_fewer_bytes_and_steps_give_the_one_pass(
    llama: PreTrainedModel,
) -> None:
    settings = SETTINGS[1].with_(layout="paper-fp8")
    tokens = random_tokens(200)
    cache, larger = (KVarNCache(llama.config, each) for each in (settings, SETTINGS[1]))
    stepped = cached_logits(llama, tokens, cache, tile_lengths(200, settings))
    cached_logits(llama, tokens, larger, tile_lengths(200, settings))
    one_pass = one_pass_logits(llama, tokens, method_of(settings))
    assert largest_difference(stepped, one_pass) <= 1e-4
    assert cache.memory_bytes().held_bytes < larger.memory_bytes().held_bytes
    assert cache.saturated_scales() == {}


def test_scales_that_do_not_fit_are_counted_by_layer(llama: PreTrainedModel) -> None:
    cache = KVarNCache(llama.config, SETTINGS[1])
    states = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    cache.update(states, states, 0)
    cache.update(states, 1e15 * states, 1)
    assert cache.saturated_scales().keys() == {1}
    cache.reset()
    assert cache.saturated_scales() == {}


@pytest.mark.parametrize("step_tokens", [50, 64, 200])
def test_prompt_chunks_attend_exactly_to_their_own_tokens(
    llama: PreTrainedModel, settings: KVarNSettings, step_tokens: int
) -> None:
    tokens = random_tokens(400)
    lengths = [min(step_tokens, 400 - start) for start in range(0, 400, step_tokens)]
    stepped = cached_logits(llama, tokens, KVarNCache(llama.config, settings), lengths)
    same_chunks = one_pass_logits(llama, tokens, method_of(settings), step_tokens=step_tokens)
    tile_steps = one_pass_logits(llama, tokens, method_of(settings))
    assert largest_difference(stepped, same_chunks) < 1e-9
    assert largest_difference(stepped, tile_steps) > 1e-2


def test_a_prompt_in_one_step_is_exact_and_packed_afterwards(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    tokens = random_tokens(200)
    cache = KVarNCache(llama.config, settings)
    logits = cached_logits(llama, tokens, cache, [200])
    assert largest_difference(logits, exact_logits(llama, tokens)) < 1e-9
    assert cache.get_seq_length() == 200
    for layer in cache.layers:
        assert layer.packed_tokens == 160
        assert layer.keys.shape == layer.values.shape == (1, 2, 40, 32)
        assert layer.records.shape == (1, 2, 5, settings.record_bytes(32))


def test_the_cache_returns_the_models_own_dtype() -> None:
    model = calm_model("llama", torch.bfloat16)
    settings = KVarNSettings(group_size=32, sink_tokens=0)
    cache = KVarNCache(model.config, settings)
    logits = cached_logits(model, random_tokens(100), cache, [64, 36])
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    keys, values = cache.update(*2 * [torch.zeros(1, 2, 1, 32, dtype=torch.bfloat16)], 0)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert keys.shape == values.shape == (1, 2, 101, 32)


def test_memory_counts_every_byte(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    cache = KVarNCache(llama.config, settings)
    assert cache.memory_bytes().held_bytes == 0
    cached_logits(llama, random_tokens(700, batch=3), cache, [700])
    memory = cache.memory_bytes()
    heads = 3 * 2 * 2  # sequences, layers, KV heads
    assert memory.held_bytes == heads * settings.cache_bytes(700, 32, exact_element_bytes=8)
    assert memory.sixteen_bit_bytes == heads * 700 * 2 * 32 * 2


def test_left_padding_stays_unseen(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    tokens = random_tokens(300, batch=3)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 5, 150)):
        mask[row, :padding] = 0
        tokens[row, :padding] = llama.config.pad_token_id
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KVarNCache(llama.config, settings)
    lengths = tile_lengths(300, settings)
    stepped = cached_logits(llama, tokens, cache, lengths, attention_mask=mask)
    inputs = {"attention_mask": mask, "position_ids": positions}
    one_pass = one_pass_logits(llama, tokens, method_of(settings), **inputs)
    exact = exact_logits(llama, tokens, **inputs)
    real = mask.bool()
    assert largest_difference(stepped[real], one_pass[real]) < 1e-9
    assert largest_difference(one_pass[real], exact[real]) > 1e-2
    alone = exact_logits(llama, tokens[2:, 150:])
    assert largest_difference(exact[2:, 150:], alone) < 1e-9


def test_beams_and_batches_are_reordered_with_their_records(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    past, new = random_tokens(100, batch=3), random_tokens(20, batch=3, seed=1)
    lengths = tile_lengths(100, settings)

    def continued(order: list[int], change: str, argument: object) -> torch.Tensor:
        cache = KVarNCache(llama.config, settings)
        cached_logits(llama, past, cache, lengths)
        getattr(cache, change)(argument)
        return cached_logits(llama, new[: len(order)], cache, [20])

    def expected(order: list[int]) -> torch.Tensor:
        tokens = torch.cat((past[order], new[: len(order)]), dim=1)
        cache = KVarNCache(llama.config, settings)
        return cached_logits(llama, tokens, cache, [*lengths, 20])[:, 100:]

    for order, change in (([2, 0, 0], "reorder_cache"), ([2, 1], "batch_select_indices")):
        result = continued(order, change, torch.tensor(order))
        assert largest_difference(result, expected(order)) < 1e-9
        assert largest_difference(result, expected(list(range(len(order))))) > 1e-2
    past = past[:1]
    new = new[:1].expand(3, -1)
    result = continued([0, 0, 0], "batch_repeat_interleave", 3)
    assert largest_difference(result, expected([0, 0, 0])) < 1e-9


def test_cropping_the_exact_tail_leaves_no_trace(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    tokens = random_tokens(200)
    lengths = tile_lengths(200, settings)
    cache = KVarNCache(llama.config, settings)
    cached_logits(llama, tokens[:, :185], cache, tile_lengths(185, settings))
    cached_logits(llama, random_tokens(7, seed=9), cache, [7])
    cache.crop(-9)
    assert cache.get_seq_length() == 183
    rest = cached_logits(llama, tokens[:, 183:], cache, [17])
    fresh = cached_logits(llama, tokens, KVarNCache(llama.config, settings), lengths)
    assert largest_difference(rest, fresh[:, 183:]) < 1e-9


def test_a_crop_into_a_packed_tile_is_refused(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    cache = KVarNCache(llama.config, settings)
    cached_logits(llama, random_tokens(60), cache, [60])
    with pytest.raises(UsageError, match="only the newest 12 are still exact") as refused:
        cache.crop(-13)
    assert "activate_past_recording" in refused.value.hint
    cache.crop(-12)
    assert cache.get_seq_length() == 48


def test_before_the_first_tile_any_crop_is_right(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    tokens = random_tokens(30)
    cache = KVarNCache(llama.config, settings)
    cache.crop(-1)  # nothing there yet
    cached_logits(llama, tokens, cache, [30])
    cache.crop(-25)
    rest = cached_logits(llama, tokens[:, 5:], cache, [25])
    assert largest_difference(rest, exact_logits(llama, tokens)[:, 5:]) < 1e-9


def test_recorded_drafts_never_enter_a_tile(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    """A rejected draft reaches beyond the end of a tile; afterwards it never happened."""
    tokens = random_tokens(120)
    cache = KVarNCache(llama.config, settings)
    cached_logits(llama, tokens[:, :70], cache, tile_lengths(70, settings))
    cache.activate_past_recording()
    cached_logits(llama, random_tokens(20, seed=5), cache, [20])
    cache.crop(-20)
    assert cache.layers[0].packed_tokens == 32
    for start in range(70, 120, 10):
        step = cached_logits(llama, tokens[:, start : start + 10], cache, [10])
        cache.crop(0)
    assert cache.layers[0].packed_tokens == 96
    lengths = [*tile_lengths(70, settings), *[10] * 5]
    fresh = cached_logits(llama, tokens, KVarNCache(llama.config, settings), lengths)
    assert largest_difference(step, fresh[:, 110:]) < 1e-9


def test_a_reset_cache_is_a_new_one(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    cache = KVarNCache(llama.config, settings)
    cached_logits(llama, random_tokens(100, batch=2), cache, [100])
    cache.reset()
    assert (cache.get_seq_length(), cache.memory_bytes().held_bytes) == (0, 0)
    tokens = random_tokens(150, seed=3)
    lengths = tile_lengths(150, settings)
    again = cached_logits(llama, tokens, cache, lengths)
    fresh = cached_logits(llama, tokens, KVarNCache(llama.config, settings), lengths)
    assert torch.equal(again, fresh)


def test_conversations_do_not_meet(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    conversations = [random_tokens(100, seed=seed) for seed in (1, 2)]
    caches = [KVarNCache(llama.config, settings) for _ in conversations]
    turns = [
        [
            cached_logits(llama, tokens[:, start : start + 25], cache, [25])
            for tokens, cache in zip(conversations, caches, strict=True)
        ]
        for start in range(0, 100, 25)
    ]
    for number, tokens in enumerate(conversations):
        alone = cached_logits(llama, tokens, KVarNCache(llama.config, settings), [25] * 4)
        assert torch.equal(torch.cat([turn[number] for turn in turns], dim=1), alone)


def test_layers_with_a_sliding_window_stay_exact() -> None:
    model = calm_model("mistral-sliding", torch.float64)
    settings = KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=0)
    tokens = random_tokens(300)
    cache = KVarNCache(model.config, settings)
    assert cache.covered == ()
    logits = cached_logits(model, tokens, cache, tile_lengths(300, settings))
    assert largest_difference(logits, exact_logits(model, tokens)) < 1e-9
    held = cache.memory_bytes().held_bytes
    plain = DynamicCache(config=model.config)
    cached_logits(model, tokens, plain, [300])
    assert held == sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)


def test_only_full_attention_layers_of_a_mixed_model_are_packed() -> None:
    model = calm_model(
        "qwen3",
        torch.float64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=48,
    )
    settings = KVarNSettings(key_bits=2, value_bits=2, group_size=32, sink_tokens=0)
    tokens = random_tokens(200)
    cache = KVarNCache(model.config, settings)
    stepped = cached_logits(model, tokens, cache, tile_lengths(200, settings))
    assert [isinstance(layer, KVarNLayer) for layer in cache.layers] == [False, True, False]
    one_pass = one_pass_logits(model, tokens, method_of(settings))
    assert largest_difference(stepped, one_pass) < 1e-9
    assert largest_difference(one_pass, exact_logits(model, tokens)) > 1e-2


def test_layers_can_be_left_out(llama: PreTrainedModel, settings: KVarNSettings) -> None:
    cache = KVarNCache(llama.config, settings, covered=[1])
    cached_logits(llama, random_tokens(100), cache, [100])
    assert [isinstance(layer, KVarNLayer) for layer in cache.layers] == [False, True]


def test_a_layer_without_full_attention_cannot_be_packed(settings: KVarNSettings) -> None:
    model = calm_model("mistral-sliding")
    with pytest.raises(UnsupportedModelError, match="layer 1 of mistral has no full attention"):
        KVarNCache(model.config, settings, covered=[1])


def test_a_head_width_that_no_record_holds_is_refused(settings: KVarNSettings) -> None:
    model = calm_model("llama", head_dim=48)
    with pytest.raises(UnsupportedModelError, match="head_dim is 48 in layer 0 of llama"):
        cached_logits(model, random_tokens(5), KVarNCache(model.config, settings), [5])


def test_keys_and_values_of_different_widths_are_refused(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    cache = KVarNCache(llama.config, settings)
    with pytest.raises(UnsupportedModelError, match="layer 0 of llama caches keys 512 and values"):
        cache.update(torch.zeros(1, 1, 3, 512), torch.zeros(1, 1, 3, 64), 0)


def test_states_of_another_width_than_promised_are_refused(
    llama: PreTrainedModel, settings: KVarNSettings
) -> None:
    cache = KVarNCache(llama.config, settings, head_dim=64)
    with pytest.raises(CheckpointError, match="describes heads 64 wide, and layer 0 caches"):
        cached_logits(llama, random_tokens(5), cache, [5])

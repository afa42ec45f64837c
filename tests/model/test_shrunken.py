import pytest
import torch
from tiny_models import tiny_config
from transformers import GPT2Config, LlamaConfig

from kvarn_cli.model.shrunken import build_random_model, shrink_config
from kvarn_cli.model.shrunken_config import VOCAB_SIZE

LLAMA = LlamaConfig(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32
)


def test_keeps_what_decides_the_arithmetic():
    small = shrink_config(LLAMA)
    assert type(small) is LlamaConfig
    assert small.head_dim == 128
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert small.hidden_size == 4 * 128
    assert small.num_hidden_layers == 2
    assert small.vocab_size == VOCAB_SIZE
    assert LLAMA.num_hidden_layers == 32


def test_heads_of_their_own_width_stay_so():
    small = shrink_config(tiny_config("qwen3", head_dim=64, hidden_size=128))
    assert small.head_dim == 64
    assert small.hidden_size != small.num_attention_heads * small.head_dim


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_keeps_the_grouping_of_queries(num_kv_heads):
    small = shrink_config(tiny_config("llama", num_key_value_heads=num_kv_heads))
    assert small.num_attention_heads // small.num_key_value_heads == 4 // num_kv_heads


def test_keeps_one_layer_of_each_kind():
    config = tiny_config(
        "qwen2",
        num_hidden_layers=5,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=3,
    )
    assert shrink_config(config).layer_types == ["full_attention", "sliding_attention"]


def test_token_ids_fit_the_vocabulary():
    small = shrink_config(tiny_config("llama", eos_token_id=[2, 299], pad_token_id=299))
    assert small.eos_token_id == [2, VOCAB_SIZE - 1]
    assert small.pad_token_id == VOCAB_SIZE - 1


@pytest.mark.parametrize("odd", ["a word", {"a": 1}, [None, 299, "b"], 2.5, None])
def test_token_ids_that_are_no_numbers_are_left_alone(odd):
    small = shrink_config(tiny_config("llama", image_token_id=odd))
    expected = [None, VOCAB_SIZE - 1, "b"] if isinstance(odd, list) else odd
    assert small.image_token_id == expected


def test_everything_is_drawn_in_float64(family):
    model = build_random_model(shrink_config(tiny_config(family)), seed=0, trust_remote_code=False)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype == torch.float64, name
        assert ((tensor != 0) & (tensor != 1)).all(), name
        assert tensor.unique().numel() > 1, name


def test_the_seed_decides():
    config = shrink_config(tiny_config("llama"))
    models = [build_random_model(config, seed=s, trust_remote_code=False) for s in (0, 0, 1)]
    first, same, other = (model.lm_head.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_scores_in_float32_are_switched_off_where_all_is_float64():
    config = GPT2Config(n_layer=1, n_head=2, n_embd=64, reorder_and_upcast_attn=True)
    model = build_random_model(config, seed=0, trust_remote_code=False)
    assert model(torch.zeros(1, 5, dtype=torch.int64)).logits.dtype == torch.float64
    assert config.reorder_and_upcast_attn

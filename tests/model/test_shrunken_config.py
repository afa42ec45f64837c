"""What is cut from configurations of many kinds, and what stays."""

import pytest
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    ExaoneConfig,
    FalconH1Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPT2Config,
    JambaConfig,
    LagunaConfig,
    Llama4TextConfig,
    Mamba2Config,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from kvarn_cli.model.shrunken_config import VOCAB_SIZE, cut_config


def test_names_of_another_family_are_translated() -> None:
    small = cut_config(GPT2Config(n_embd=768, n_head=12, n_layer=12))
    assert (small.n_embd, small.n_head, small.n_layer) == (256, 4, 2)
    assert cut_config(ExaoneConfig(num_layers=32)).num_hidden_layers == 2


def test_experts_are_few_and_still_chosen_in_groups() -> None:
    small = cut_config(DeepseekV3Config())
    assert (small.n_routed_experts, small.num_experts_per_tok) == (4, 2)
    assert (small.n_group, small.topk_group) == (2, 2)
    assert cut_config(MixtralConfig()).num_local_experts == 4


def test_the_latent_and_its_rope_key_keep_their_widths() -> None:
    small = cut_config(DeepseekV3Config())
    assert (small.kv_lora_rank, small.qk_rope_head_dim) == (512, 64)
    assert (small.v_head_dim, small.qk_nope_head_dim) == (128, 128)
    assert small.q_lora_rank == 32


def test_dense_and_sparse_layers_both_stay() -> None:
    small = cut_config(DeepseekV3Config(first_k_dense_replace=3))
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 2)
    listed = cut_config(Qwen2MoeConfig(mlp_only_layers=[0, 1]))
    assert listed.mlp_only_layers == [0]


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Qwen3NextConfig(), ["linear_attention", "full_attention"]),
        (Llama4TextConfig(), ["chunked_attention", "full_attention"]),
        (Zamba2Config(), ["linear_attention", "hybrid"]),
        (
            JambaConfig(attn_layer_period=4, attn_layer_offset=1),
            ["linear_attention", "full_attention"],
        ),
        (BambaConfig(attn_layer_indices=[1, 7]), ["linear_attention", "full_attention"]),
    ],
    ids=["listed", "chunked", "aliased", "computed", "by index"],
)
def test_one_layer_of_each_kind_stays(config: PreTrainedConfig, kinds: list[str]) -> None:
    assert cut_config(config).layer_types == kinds


def test_layers_that_read_a_cache_keep_the_layer_that_fills_it() -> None:
    small = cut_config(Gemma3nTextConfig())
    assert small.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert small.num_hidden_layers - small.num_kv_shared_layers >= 2
    assert set(small.layer_types[-small.num_kv_shared_layers :]) == {
        "sliding_attention",
        "full_attention",
    }


def test_layers_keep_their_own_widths_and_heads() -> None:
    small = cut_config(Gemma4TextConfig())
    assert [layer.head_dim for layer in small.per_layer_config] == [256, 512]
    config = LagunaConfig(num_hidden_layers=3, num_attention_heads_per_layer=[48, 64, 8])
    assert cut_config(config).num_attention_heads_per_layer == [4, 4, 2]


def test_recurrent_states_still_fill_the_hidden_size() -> None:
    for config in (FalconH1Config(), BambaConfig(), Mamba2Config()):
        small = cut_config(config)
        heads = getattr(small, "mamba_n_heads", None) or small.num_heads
        width = getattr(small, "mamba_d_head", None) or small.head_dim
        inner = getattr(small, "mamba_d_ssm", None)
        assert heads * width == (inner or 2 * small.hidden_size)


def test_towers_shrink_as_well() -> None:
    small = cut_config(Gemma3Config())
    assert small.text_config.num_hidden_layers == 2
    assert small.vision_config.num_hidden_layers <= 2
    assert small.vision_config.hidden_size < 300
    assert small.text_config.vocab_size == VOCAB_SIZE


def test_a_projection_of_embeddings_appears_only_where_there_was_one() -> None:
    small = cut_config(OPTConfig())
    assert small.word_embed_proj_dim == small.hidden_size
    small = cut_config(OPTConfig(word_embed_proj_dim=384))
    assert small.word_embed_proj_dim * 2 == small.hidden_size


def test_the_original_is_left_as_it_is() -> None:
    config = Gemma4TextConfig()
    before = config.to_dict()
    cut_config(config)
    assert config.to_dict() == before

"""Each known way of laying V and O out, converted by the real pipeline and run by transformers.

None of these names a layout: the class is found by its configuration, and what it computes is
compared before and after.
"""

import json
import re
from collections.abc import Callable

import pytest
import torch
from round_trip import round_trip, tensors_of
from safetensors.torch import save_file
from transformers import (
    AfmoeConfig,
    BambaConfig,
    BertConfig,
    BitNetConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SarvamMoEConfig,
    StableLmConfig,
)

from kvarn_cli.errors import UnsupportedModelError

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
PLAIN = TOKENS | HEADS | {"intermediate_size": 64}
GROUPED = PLAIN | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 32, "hidden_size": 96}
OLD = {"vocab_size": 64, "n_embd": 128, "n_head": 4, "n_layer": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16}
SHARED = PER_LAYER | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen2, biases of grouped heads": lambda: Qwen2Config(**GROUPED),
    "Phi-3, qkv_proj": lambda: Phi3Config(**GROUPED),
    "GPT-NeoX, interleaved": lambda: GPTNeoXConfig(**PLAIN),
    "Falcon, old": lambda: FalconConfig(
        **TOKENS,
        **HEADS,
        multi_query=False,
        new_decoder_architecture=False,
        bias=True,
        alibi=True,
    ),
    "Falcon, multi-query": lambda: FalconConfig(
        **TOKENS, **HEADS, multi_query=True, new_decoder_architecture=False
    ),
    "Falcon, new": lambda: FalconConfig(
        **TOKENS, **HEADS, num_kv_heads=2, new_decoder_architecture=True, bias=True
    ),
    "Bloom, interleaved": lambda: BloomConfig(vocab_size=64, hidden_size=128, n_head=4, n_layer=2),
    "Persimmon, interleaved": lambda: PersimmonConfig(**PLAIN),
    "MPT, Wqkv": lambda: MptConfig(vocab_size=64, d_model=128, n_heads=4, n_layers=2),
    "GPT-2, transposed": lambda: GPT2Config(**OLD),
    "GPT-BigCode, many KV heads": lambda: GPTBigCodeConfig(**OLD, multi_query=False),
    "GPT-BigCode, multi-query": lambda: GPTBigCodeConfig(**OLD, multi_query=True),
    "CodeGen, in quarters": lambda: CodeGenConfig(**OLD, rotary_dim=16),
    "GPT-J, partial rotary": lambda: GPTJConfig(**OLD, rotary_dim=16),
    "Phi, partial rotary": lambda: PhiConfig(**PLAIN, partial_rotary_factor=0.5),
    "GLM-4, partial rotary": lambda: Glm4Config(**WIDE),
    "StableLM, partial rotary": lambda: StableLmConfig(**GROUPED, use_qkv_bias=True),
    "GPT-Neo, out_proj": lambda: GPTNeoConfig(
        vocab_size=64,
        hidden_size=128,
        num_heads=4,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
    ),
    "OPT, out_proj": lambda: OPTConfig(
        **TOKENS, **HEADS, ffn_dim=64, word_embed_proj_dim=128, max_position_embeddings=64
    ),
    "BERT, output beside attention": lambda: BertConfig(**PLAIN, is_decoder=True),
    "Gemma 2, capped scores": lambda: Gemma2Config(**WIDE),
    "Gemma 3, window and full": lambda: Gemma3TextConfig(**WIDE, **MIXED),
    "Gemma 3n, shared K and V": lambda: Gemma3nTextConfig(**WIDE | SHARED, laurel_rank=8),
    "Gemma 4, widths per layer": lambda: Gemma4TextConfig(
        **WIDE, **MIXED, **PER_LAYER, global_head_dim=64
    ),
    "Gemma 4, shared K and V": lambda: Gemma4TextConfig(**WIDE | SHARED, global_head_dim=64),
    "Cohere 2, window and full": lambda: Cohere2Config(**GROUPED, **MIXED, sliding_window=16),
    "Granite, multipliers": lambda: GraniteConfig(**GROUPED, attention_multiplier=0.1),
    "OLMo 2, norms of Q and K": lambda: Olmo2Config(**GROUPED),
    "gpt-oss, sinks and biases": lambda: GptOssConfig(
        **WIDE, num_local_experts=2, num_experts_per_tok=1
    ),
    "Mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=2),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(**WIDE, **EXPERTS),
    "Llama 4, chunked and full": lambda: Llama4TextConfig(
        **(WIDE | {"num_hidden_layers": 4}), intermediate_size_mlp=64, num_local_experts=2
    ),
    "Bamba, hybrid": lambda: BambaConfig(
        **GROUPED,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
    ),
    "Jamba, hybrid": lambda: JambaConfig(
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "LFM2, hybrid": lambda: Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("case", FUSED)
def test_where_only_attention_stands_between_v_and_o_the_rotation_is_fused(case, tmp_path):
    metadata = round_trip(FUSED[case](), tmp_path).conversion.metadata
    assert metadata.fused
    assert metadata.rotations.value.not_fused is None


ONLINE: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "Qwen3-Next, gate": (
        lambda: Qwen3NextConfig(
            **(WIDE | {"num_hidden_layers": 4}),
            **EXPERTS,
            shared_expert_intermediate_size=32,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        "Qwen3NextAttention.q_proj makes twice the channels of the queries, as for a gate",
    ),
    "AFMoE, gate": (
        lambda: AfmoeConfig(**WIDE, **EXPERTS, **MIXED, num_dense_layers=1),
        "in AfmoeAttention stands gate_proj",
    ),
    "Gemma 4, V from K": (
        lambda: Gemma4TextConfig(
            **WIDE, **MIXED, **PER_LAYER, global_head_dim=32, attention_k_eq_v=True
        ),
        "model.layers.1.self_attn (Gemma4TextAttention) has no projection to V",
    ),
    "Sarvam, cut while loading": (
        lambda: SarvamMoEConfig(**WIDE, **EXPERTS, n_group=1, topk_group=1),
        "the checkpoint has no tensor that",
    ),
    "BitNet, norm": (lambda: BitNetConfig(**GROUPED), "in BitNetAttention stands attn_sub_norm"),
}


@pytest.mark.parametrize("case", ONLINE)
def test_where_more_stands_between_them_it_is_left_to_the_engine(case, tmp_path):
    make, named = ONLINE[case]
    metadata = round_trip(make(), tmp_path).conversion.metadata
    assert not metadata.fused
    assert named in metadata.rotations.value.not_fused
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        round_trip(make(), tmp_path / "again", rotation="fused")


def test_q_and_k_of_a_joined_projection_keep_every_bit(tmp_path):
    converted = round_trip(Phi3Config(**GROUPED), tmp_path, rotation="fused")
    before, after = tensors_of(converted.source), tensors_of(converted.output)
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        assert torch.equal(before[name][: 6 * 32], after[name][: 6 * 32])
        assert (before[name][6 * 32 :] != after[name][6 * 32 :]).float().mean() > 0.99


def test_what_a_gemma_checkpoint_keeps_for_layers_that_share_is_no_obstacle(tmp_path):
    """K, V and their norms of layers that read another's; the class says that it leaves them."""

    def add_unused(folder):
        tensors = tensors_of(folder)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            shape = (64, 96) if "proj" in part else (32,)
            tensors[f"model.layers.3.self_attn.{part}.weight"] = torch.ones(shape)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    config = Gemma3nTextConfig(**WIDE | SHARED, laurel_rank=8)
    converted = round_trip(config, tmp_path, rotation="fused", edit=add_unused)
    changed = converted.conversion.metadata.rotations.value.tensors
    assert "model.layers.3.self_attn.o_proj.weight" in changed
    assert "model.layers.3.self_attn.v_proj.weight" not in changed


def test_online_the_readers_of_a_layers_cache_are_named_with_it(tmp_path):
    config = Gemma3nTextConfig(**WIDE | SHARED, laurel_rank=8)
    metadata = round_trip(config, tmp_path, rotation="online").conversion.metadata
    assert metadata.layers.covered == [1]
    places = {it.location: it.targets for it in metadata.rotations.value.apply}
    assert places["input"] == [
        "model.layers.1.self_attn.o_proj",
        "model.layers.3.self_attn.o_proj",
    ]


def test_hybrids_list_the_layers_without_a_cache(tmp_path):
    config = Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"])
    layers = round_trip(config, tmp_path).conversion.metadata.layers
    assert layers.covered == [1]
    assert [(layer.layer, layer.reason) for layer in layers.left_out] == [
        (0, "its state has a fixed size; it has no KV cache")
    ]


@pytest.mark.parametrize(
    ("width", "nearest"), [(80, "64"), (96, "64 or 128"), (112, "128"), (120, "128")]
)
@pytest.mark.parametrize("rotation", ["auto", "fused", "online"])
def test_head_widths_that_no_cache_takes_are_refused(width, nearest, rotation, tmp_path):
    config = Qwen2Config(**GROUPED | {"hidden_size": 4 * width})
    with pytest.raises(UnsupportedModelError, match=f"head_dim is {width} in layer 0 of") as no:
        round_trip(config, tmp_path, rotation=rotation)
    assert no.value.exit_code == 3
    assert f"nearest is a model with head_dim {nearest}" in no.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def without(*keys, **changes):
    def edit(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: config[key] for key in config if key not in keys}))

    return edit


@pytest.mark.parametrize("make", [LlamaConfig, MixtralConfig])
@pytest.mark.parametrize("edit", [without("head_dim"), without(head_dim=None)])
def test_a_width_that_the_configuration_leaves_open(make, edit, tmp_path):
    config = make(**GROUPED | {"num_local_experts": 2})
    assert round_trip(config, tmp_path, rotation="fused", edit=edit)


def test_a_width_of_null_that_the_class_cannot_read_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="no model of Qwen2Config can be built"):
        round_trip(Qwen2Config(**GROUPED), tmp_path, edit=without(head_dim=None))


def test_a_configuration_without_kv_heads_has_as_many_as_query_heads(tmp_path):
    edit = without("num_key_value_heads")
    config = PhiConfig(**PLAIN | {"num_key_value_heads": 4})
    heads = round_trip(config, tmp_path, rotation="fused", edit=edit).conversion.metadata
    name = "model.layers.0.self_attn.v_proj.weight"
    assert heads.rotations.value.tensors[name].first_channels == [0, 32, 64, 96]


def test_a_default_of_kv_heads_that_does_not_fit_the_weights_is_refused(tmp_path):
    """Mistral's default is 8, whatever the checkpoint's tensors say."""
    with pytest.raises(UnsupportedModelError, match=r"does not run|has shape|cannot be built"):
        round_trip(
            MixtralConfig(**GROUPED, num_local_experts=2),
            tmp_path,
            rotation="fused",
            edit=without("num_key_value_heads"),
        )

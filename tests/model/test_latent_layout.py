"""Where MLA modules make and read their latent, and the proof that its rotation can be fused."""

import pytest
import torch
from latent_models import LATENT_FAMILIES, latent_config, latent_model
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.cache_trace import trace_cache
from kvarn_cli.model.fusion import tensor_rotations
from kvarn_cli.model.layout import FoldedNorm, HeadSlices
from kvarn_cli.model.proof import prove_fusion
from kvarn_cli.model.proposals import arrangements_of, proposed_layout
from kvarn_cli.model.weight_check import check_weights

BLOCK = "model.layers.1.self_attn."


def layout_of(model, arrangement="gain w"):
    return proposed_layout(model, trace_cache(model), 32, arrangement)


def test_the_latent_is_one_head_between_two_projections():
    model = latent_model("minicpm3", attention_bias=True)
    assert arrangements_of(model, trace_cache(model)) == ("gain w", "gain 1 + w")
    layer = layout_of(model).layers[1]
    assert (layer.index, layer.module) == (1, BLOCK.removesuffix("."))
    assert layer.value == tuple(
        HeadSlices(f"{BLOCK}kv_a_proj_with_mqa.{part}", 0, (0,), 32) for part in ("weight", "bias")
    )
    assert layer.output == HeadSlices(f"{BLOCK}kv_b_proj.weight", 1, (0,), 32)
    assert layer.norm == FoldedNorm(f"{BLOCK}kv_a_layernorm.weight", 1)
    assert (layer.num_heads, layer.num_kv_heads, layer.rotated) == (1, 1, "the latent")


def test_only_layers_with_a_latent_are_laid_out():
    layout = layout_of(latent_model("kimi_linear"))
    assert [layer.index for layer in layout.layers] == [1]


def test_a_layout_is_renamed_with_its_norms():
    layout = layout_of(latent_model("deepseek_v3"))
    names = {name: name.removeprefix("model.") for name in layout.tensors}
    renamed = layout.renamed(names)
    assert renamed.tensors == tuple(names.values())
    assert renamed.layers[0].norm.tensor == "layers.0.self_attn.kv_a_layernorm.weight"
    assert renamed.layers[0].module == "layers.0.self_attn"
    assert layout.row_step(f"{BLOCK}kv_a_proj_with_mqa.weight") == 32
    assert layout.row_step(f"{BLOCK}kv_b_proj.weight") == 1
    assert layout.row_step(f"{BLOCK}kv_a_layernorm.weight") == 1


@pytest.mark.parametrize("part", ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"])
def test_modules_with_other_parts_are_refused_by_name(part):
    model = latent_model("deepseek_v3")
    traced = trace_cache(model)
    setattr(model.model.layers[0].self_attn, part, torch.nn.Identity())
    with pytest.raises(UnsupportedModelError, match=f"DeepseekV3Attention.* has no .*{part}"):
        proposed_layout(model, traced, 32, "gain w")


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_every_family_is_proven(family):
    proof = prove_fusion(latent_config(family), 32)
    assert proof.largest_difference < 1e-13
    assert proof.smallest_control > 0.1
    assert proof.arrangement == "gain w"


def test_a_latent_of_full_width_is_proven():
    assert prove_fusion(latent_config("deepseek_v3", kv_lora_rank=512), 512).head_dim == 512


def without(part):
    def rotations(layout, read):
        full = tensor_rotations(layout, read=read)
        return {name: turn for name, turn in full.items() if part not in name}

    return rotations


def not_folded(layout, read):
    """Rotates, but leaves the norm's weight out of what it is folded into."""
    full = tensor_rotations(layout, read=read)
    return full | tensor_rotations(layout, read=lambda name: torch.ones_like(read(name)))


@pytest.mark.parametrize(
    "sabotage",
    [
        without("kv_a_proj_with_mqa.weight"),
        without("kv_a_proj_with_mqa.bias"),
        without("kv_a_layernorm"),
        without("kv_b_proj"),
        not_folded,
    ],
)
def test_the_proof_catches_a_sabotaged_fusion(sabotage):
    config = latent_config("deepseek_v3", attention_bias=True)
    with pytest.raises(UnsupportedModelError, match="fusing the latent would change what Deepseek"):
        prove_fusion(config, 32, rotations=sabotage)


@pytest.fixture
def norm(monkeypatch):
    def replace(forward):
        monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3RMSNorm, "forward", forward)

    return replace


def divided(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def test_a_norm_that_multiplies_by_one_more_than_its_weight_is_found_out(norm):
    norm(lambda self, x: divided(x, self.variance_epsilon) * (1 + self.weight))
    proof = prove_fusion(latent_config("deepseek_v3"), 32)
    assert proof.arrangement == "gain 1 + w"
    assert proof.largest_difference < 1e-13


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: divided(x - x.mean(-1, keepdim=True), self.variance_epsilon) * self.weight,
        lambda self, x: (divided(x, self.variance_epsilon) * self.weight).clamp(-3, 3),
    ],
    ids=["mean", "clamp"],
)
def test_what_does_not_commute_with_the_rotation_is_refused(norm, forward):
    norm(forward)
    with pytest.raises(UnsupportedModelError, match="would change what DeepseekV3ForCausalLM"):
        prove_fusion(latent_config("deepseek_v3"), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_weights_pass_the_check_and_wrong_ones_do_not(dtype):
    model = latent_model("deepseek_v3", dtype, attention_bias=True)
    weights, layout = model.state_dict(), layout_of(model)

    def read(name):
        """In blocks of unequal length."""
        step = layout.row_step(name)
        return weights[name].split([step, len(weights[name]) - step])

    check = check_weights(layout, read)
    assert 0 < check.largest_change < 20 * torch.finfo(dtype).eps
    right = tensor_rotations(layout, read=weights.__getitem__)
    for name in layout.layers[1].tensors:
        with pytest.raises(UnsupportedModelError, match="layer 1: fusing the latent would change"):
            check_weights(layout, read, right | {name: lambda rows, first_row=0: rows})

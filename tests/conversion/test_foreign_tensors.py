"""What a checkpoint holds beside the decoder, or under other names, stays as it is."""

import json

import pytest
import torch
from conversions import convert
from round_trip import round_trip, save, tensors_of
from safetensors.torch import save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from kvarn_cli.errors import UnsupportedModelError

TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3(*, text_changes=None, **changes):
    config = Gemma3Config(
        text_config=TEXT
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
        | (text_changes or {}),
        vision_config=TOWER,
        mm_tokens_per_image=4,
        **changes,
    )
    return Gemma3ForConditionalGeneration(config)


def mistral3():
    config = Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=TOWER | {"model_type": "pixtral"},
        image_token_index=60,
    )
    return Mistral3ForConditionalGeneration(config)


def llama4():
    config = Llama4Config(
        text_config=TEXT
        | {"num_hidden_layers": 4, "intermediate_size_mlp": 64, "num_local_experts": 2},
        vision_config=TOWER
        | {
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    )
    return Llama4ForConditionalGeneration(config)


def qwen_vl():
    config = Qwen2_5_VLConfig(
        text_config={name: TEXT[name] for name in TEXT if name != "head_dim"}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
        },
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def changed(converted):
    before, after = tensors_of(converted.source), tensors_of(converted.output)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape)
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (gemma3, "language_model.model.layers."),
        (mistral3, "language_model.model.layers."),
        (llama4, "language_model.model.layers."),
        (qwen_vl, "model.layers."),
    ],
    ids=["Gemma 3", "Mistral 3", "Llama 4", "Qwen2.5-VL"],
)
def test_towers_stay_and_the_checkpoints_own_names_are_used(make, prefix, tmp_path):
    model = make()
    converted = round_trip(model, tmp_path, rotation="fused")
    names = changed(converted)
    assert len(names) >= 4
    assert all(name.startswith(prefix) for name in names)
    assert any("vision" in name or "visual" in name for name in tensors_of(converted.source))


def renamed(rename):
    def edit(folder):
        tensors = {rename(name): tensor for name, tensor in tensors_of(folder).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


@pytest.mark.parametrize(
    ("make", "rename"),
    [
        (gemma3, lambda name: name),
        (
            gemma3,
            lambda name: name.replace("language_model.model.", "model.language_model.").replace(
                "vision_tower.", "model.vision_tower."
            ),
        ),
        (
            lambda: LlamaConfig(**TEXT, tie_word_embeddings=True),
            lambda name: name.removeprefix("model."),
        ),
        (
            lambda: GPT2Config(vocab_size=64, n_embd=128, n_head=4, n_layer=2),
            lambda name: name.removeprefix("transformer."),
        ),
    ],
    ids=["old Gemma 3", "new Gemma 3", "base Llama", "old GPT-2"],
)
def test_names_that_transformers_changes_while_loading(make, rename, tmp_path):
    converted = round_trip(make(), tmp_path, rotation="fused", edit=renamed(rename))
    names = changed(converted)
    value = converted.conversion.metadata.rotations.value
    assert names == value.tensors.keys()
    modules = {target for application in value.apply for target in application.targets}
    assert modules == {name.rpartition(".")[0] for name in names}


def add(folder, **tensors):
    random = torch.Generator().manual_seed(0)
    added = {
        name.replace("__", "."): torch.randn(shape, generator=random).to(torch.bfloat16)
        for name, shape in tensors.items()
    }
    save_file(tensors_of(folder) | added, folder / "model.safetensors", {"format": "pt"})


def test_layers_that_predict_further_tokens_keep_their_v_and_o(tmp_path):
    config = Qwen3MoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    extra = {
        "mtp__layers__0__self_attn__v_proj__weight": (64, 128),
        "mtp__layers__0__self_attn__o_proj__weight": (128, 128),
        "mtp__fc__weight": (128, 256),
        "model__layers__2__self_attn__v_proj__weight": (64, 128),
        "model__layers__2__self_attn__o_proj__weight": (128, 128),
        "model__layers__2__shared_head__norm__weight": (128,),
        "model__layers__0__self_attn__rotary_emb__inv_freq": (16,),
    }
    converted = round_trip(
        config, tmp_path, rotation="fused", edit=lambda folder: add(folder, **extra)
    )
    assert changed(converted) == {
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in (0, 1)
        for part in ("v_proj", "o_proj")
    }


@pytest.mark.parametrize("whole", [True, False, None])
@pytest.mark.parametrize("text", [True, False, None])
def test_embeddings_are_neither_duplicated_nor_dropped(whole, text, tmp_path):
    """Whichever of the two switches a nested configuration has, and whatever they say."""

    def set_switches(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for part, switch in ((config, whole), (config["text_config"], text)):
            part.pop("tie_word_embeddings", None)
            if switch is not None:
                part["tie_word_embeddings"] = switch
        path.write_text(json.dumps(config))

    switches = {} if whole is None else {"tie_word_embeddings": whole}
    text_switches = {} if text is None else {"tie_word_embeddings": text}
    model = gemma3(text_changes=text_switches, **switches)
    converted = round_trip(model, tmp_path, rotation="fused", edit=set_switches)
    assert len(changed(converted)) == 4


def test_a_tied_matrix_that_is_stored_twice_stays_twice(tmp_path):
    def store_twice(folder):
        tensors = tensors_of(folder)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    config = LlamaConfig(**TEXT, tie_word_embeddings=True)
    converted = round_trip(config, tmp_path, rotation="fused", edit=store_twice)
    assert len(changed(converted)) == 4


def test_mixed_dtypes_stay_mixed(tmp_path):
    def mix(folder):
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        tensors = {
            name: tensor.to(dtypes[index % 3])
            for index, (name, tensor) in enumerate(sorted(tensors_of(folder).items()))
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    source = save(LlamaConfig(**TEXT), tmp_path / "source")
    mix(source)
    converted = convert(source, tmp_path / "converted", rotation="fused")
    assert len(changed(converted)) == 4


def test_an_encoder_is_no_decoder(tmp_path):
    config = T5Config(
        vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0
    )
    with pytest.raises(UnsupportedModelError, match="T5") as refused:
        round_trip(T5ForConditionalGeneration(config), tmp_path)
    assert refused.value.exit_code == 3

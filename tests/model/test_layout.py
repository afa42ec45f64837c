import pytest
from fused_models import layout_of
from tiny_models import tiny_config, tiny_model

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.layout import check_dtypes


def test_renamed_modules_follow_their_tensors(model):
    layout = layout_of(model)
    names = {name: name.removeprefix("model.") for name in layout.tensors}
    renamed = layout.renamed(names)
    assert renamed.tensors == tuple(names.values())
    assert [layer.module for layer in renamed.layers] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert layout.row_step("model.layers.0.self_attn.v_proj.weight") == 32
    assert layout.row_step("model.layers.0.self_attn.o_proj.weight") == 1


def test_dtypes_must_be_plain_floats():
    layout = layout_of(tiny_model(tiny_config("qwen2")))
    dtypes = dict.fromkeys((*layout.tensors, "model.norm.weight"), "BF16")
    check_dtypes(layout, dtypes)
    dtypes["model.norm.weight"] = "F8_E4M3"
    check_dtypes(layout, dtypes)
    dtypes["model.layers.1.self_attn.v_proj.weight"] = "F8_E4M3"
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*v_proj.*F8_E4M3"):
        check_dtypes(layout, dtypes)

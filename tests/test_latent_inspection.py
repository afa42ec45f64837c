"""`inspect-errors` on models that cache a latent."""

import pytest
import torch
from awkward_checkpoint import CALIBRATION_TEXT
from kvarn_process import run_kvarn
from latent_models import build_latent_checkpoint
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import UsageError
from kvarn_cli.evaluation.calibration import CalibrationText
from kvarn_cli.evaluation.html_report import write_html
from kvarn_cli.inspection import Extras, default_methods, inspect_model
from kvarn_cli.settings import KVarNSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def deepseek(folder):
    return build_latent_checkpoint(folder / "deepseek", "deepseek_v3")


@pytest.fixture(scope="module")
def text(folder):
    path = folder / "text.txt"
    path.write_text(CALIBRATION_TEXT)
    return CalibrationText(path, "text", num_samples=2, sequence_length=200, seed=1)


def inspect(model, text, *specs, **options):
    device = torch.device("cpu")
    return inspect_model(str(model), specs, text, device=device, dtype=torch.float32, **options)


def test_the_latent_is_what_is_measured(deepseek, text):
    specs = [f"{name}:mla_k2_g32" for name in ("kvarn", "quarot", "kivi")]
    errors = inspect(
        deepseek, text, "exact", "kvarn:mla_k4_g32", *specs, extras=Extras(greedy_tokens=2)
    )
    assert (errors.num_kv_heads, errors.head_dim, errors.rope_dim) == (1, 32, 16)
    assert errors.covered_layers == (0, 1)
    exact, four_bits, *two_bits = errors.results
    assert exact.attention.accumulated.mae < 1e-6
    assert exact.tokens is None
    for result in two_bits:
        assert result.tokens.values is None
        assert result.tokens.keys.direction > 3 * four_bits.tokens.keys.direction
        assert result.attention.accumulated.mae > 2 * four_bits.attention.accumulated.mae
        assert len(result.attention.accumulated.by_head[0]) == 4
    assert four_bits.greedy is not None
    settings = KVarNSettings.from_name("mla_k4_g32")
    bits = settings.cache_bytes(200, 32, 16) * 8 / (200 * (32 + 16))
    assert four_bits.bits_per_element == pytest.approx(bits)
    assert exact.bits_per_element == exact.packed_bits_per_element == 16


def test_the_default_methods_are_those_that_quantize_a_latent(deepseek, text):
    methods = default_methods(KVarNSettings.from_name("mla_k4_g128"))
    assert [method.label for method in methods] == [
        "kvarn:mla_k4_g128",
        "kvarn:mla_k2_g128",
        "quarot:mla_k2_g128",
        "kivi:mla_k2_g128",
    ]
    with pytest.raises(UsageError, match="windows of 100 tokens"):
        inspect(deepseek, CalibrationText(text.dataset, "text", 1, 100, 0))


@pytest.mark.parametrize("spec", ["fp8", "q8_0", "q4_0", "kvquant", "turboquant", "kvarn:k4v2_g32"])
def test_what_does_not_quantize_latents_is_refused_by_name(deepseek, text, spec):
    with pytest.raises(UsageError, match=spec.rpartition(":")[2]) as refused:
        inspect(deepseek, text, "exact", spec)
    assert "latent" in str(refused.value)
    assert "mla_k4_g128" in refused.value.hint


def test_presets_of_latents_are_refused_for_other_models(folder, text):
    llama = build_tiny_checkpoint(folder / "llama", "llama")
    with pytest.raises(UsageError, match="mla_k2_g32 does not fit LlamaForCausalLM"):
        inspect(llama, text, "kivi:mla_k2_g32")


def test_the_command_says_in_words_what_is_quantized(deepseek, text):
    run = ["--num-samples", "1", "--sequence-length", "200", "--dataset", text.dataset]
    outcome = run_kvarn("inspect-errors", deepseek, "-m", "kvarn:mla_k2_g32", *run)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.startswith("deepseek (the latent not rotated), 1 window of 200 tokens")
    assert "The cache holds latents (MLA): their 32 channels are quantized" in outcome.stdout


def test_the_page_leaves_v_out(deepseek, text, tmp_path):
    page = tmp_path / "page.html"
    write_html(inspect(deepseek, text, "kvarn:mla_k2_g32"), {}, page)
    content = page.read_text()
    assert "the 16 of the RoPE key stay exact" in content
    assert "/keys/magnitude" in content
    assert "/values/" not in content

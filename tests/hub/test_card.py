import json
import re
from pathlib import Path
from typing import Any

import pytest
from converted_folder import BASE_README, calibration, converted_config, rotations
from huggingface_hub import ModelCard
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import UsageError
from kvarn_cli.hub.card import MARKER, write_card
from kvarn_cli.metadata import (
    Application,
    BaseModelReference,
    CacheFormat,
    FoldedNormRecord,
    KVarNConfig,
    Layers,
    RotatedTensor,
    Rotation,
    Rotations,
)
from kvarn_cli.settings import KVarNSettings

LOCAL = BaseModelReference(name="My model", revision=None, index_sha256="1" * 64)


def card_text(config: KVarNConfig | None = None, existing: bytes | None = None) -> str:
    return write_card(config or converted_config(), "alice/tiny", existing).text


def front_matter(text: str) -> dict[str, Any]:
    data: dict[str, Any] = ModelCard(text).data.to_dict()
    return data


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_front_matter_names_the_base_model_and_keeps_its_licence() -> None:
    card = write_card(converted_config(), "alice/tiny", BASE_README)
    assert front_matter(card.text) == {
        "base_model": "org/Tiny-1B",
        "base_model_relation": "quantized",
        "language": ["en", "de"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["kvarn", "kv-cache", "kv-cache-quantization"],
    }
    assert card.origin.endswith("keeps license, language")
    assert "The base model." not in card.text


def test_without_a_readme_no_licence_is_claimed() -> None:
    card = write_card(converted_config(), "alice/tiny", None)
    assert not {"license", "language"} & front_matter(card.text).keys()
    assert card.origin == "written new"


@pytest.mark.parametrize(
    "readme",
    [b"---\nlicense: [\n---\n", b"---\n- a list\n---\n", b"---\nlicense: 7\n---\n", b"\xff\xfe"],
)
def test_a_broken_readme_of_the_base_model_costs_only_its_keys(readme: bytes) -> None:
    assert "license" not in front_matter(card_text(existing=readme))


def test_a_card_of_ours_is_kept_as_it_is() -> None:
    edited = card_text().replace("# tiny", "# My own words").encode()
    card = write_card(converted_config(calibration=None), "bob/other", edited)
    assert card.text.encode() == edited
    assert "as it is" in card.origin


def test_a_broken_card_of_ours_is_refused() -> None:
    broken = f"---\nlicense: [\n---\n{MARKER}\n".encode()
    with pytest.raises(UsageError, match=r"front matter of README\.md"):
        write_card(converted_config(), "alice/tiny", broken)


def test_a_local_base_model_is_not_linked() -> None:
    text = card_text(converted_config(base_model=LOCAL))
    assert "base_model" not in front_matter(text)
    assert "`My model`, prepared" in text


def test_what_was_changed_is_told_with_the_proof() -> None:
    text = card_text()
    assert "`R = H · diag(s)`" in text
    assert "2 x `weight_output`: `model.layers.0.self_attn.v_proj`" in text
    assert "2 x `weight_input`, inverse: `model.layers.0.self_attn.o_proj`" in text
    assert "- 2: sliding window of 512 tokens" in text
    for number in ("3e-13", "1e-09", "0.25", "0.0041"):
        assert number in text


def test_an_online_conversion_claims_no_change_and_no_proof() -> None:
    text = card_text(converted_config(rotations=rotations(64, fused=False), proof=None))
    assert "No weight was changed" in text
    assert "diag(s)" not in text
    assert "Shown before" not in text
    assert "which is what this checkpoint expects" in text


@pytest.mark.parametrize("fused", [True, False])
def test_a_latent_is_called_one(fused: bool) -> None:
    settings = KVarNSettings.from_name("mla_k4_g128")
    cache = CacheFormat.from_settings(settings, 512, 64)
    changes: dict[str, Any] = {} if fused else {"proof": None}
    text = card_text(converted_config(cache=cache, rotations=latent_rotations(fused), **changes))
    assert "latent of 512 channels 4 bits" in text
    assert "51456 bytes for a tile of one layer" in text
    assert f"{settings.bits_per_element(512, 64):.3g} bits per element |" in text
    assert "--kv-cache-dtype kvarn_mla_k4_g128 --block-size 128" in text
    assert ("The weight g of the latent's norm moves" in text) == fused
    assert ("The latent is rotated by the engine as it is cached" in text) != fused
    for of_other_models in ("W_O", "head_dim", "V is", "V here", "KV head,"):
        assert of_other_models not in text


def latent_rotations(fused: bool) -> Rotations:
    makes, norm, reads = (f"model.layers.0.self_attn.{name}" for name in ("a", "n", "b"))
    return Rotations(
        key=None,
        value=Rotation(
            signs="+-" * 256 if fused else None,
            head_dim=512,
            where="fused" if fused else "online",
            apply=[Application(targets=[makes], location="weight_output")],
            tensors={
                f"{makes}.weight": RotatedTensor(axis=0, first_channels=[0]),
                f"{reads}.weight": RotatedTensor(axis=1, first_channels=[0]),
            }
            if fused
            else {},
            folded_norms={f"{norm}.weight": FoldedNormRecord(into=f"{reads}.weight", unit=1)}
            if fused
            else {},
        ),
    )


def test_the_format_is_counted_with_its_exact_tokens() -> None:
    text = card_text()
    settings, tokens = KVarNSettings(), 4096
    bits = settings.cache_bytes(tokens, 64) * 8 / (2 * tokens * 64)
    assert f"{bits:.3g} bits per element at 4,096 tokens" in text
    assert "7296 bytes" in text
    assert "3.56 bits per element" in text


def test_errors_stand_in_a_table_with_a_row_per_kind_of_engine() -> None:
    rows = [line for line in card_text().splitlines() if line.startswith("| rotated")]
    assert len(rows) == 2
    assert "| 0.0104 | 96.1 % | 2.9790 → 2.9860 | 0.019 |" in rows[0]
    assert "rotated again" in rows[1]
    assert "| 0.0115 |" in rows[1]


def test_an_unvalidated_model_says_so() -> None:
    text = card_text(converted_config(calibration=None))
    assert "**Not validated.**" in text
    assert "KL (nats)" not in text


def test_missed_thresholds_are_told() -> None:
    text = card_text(converted_config(calibration=calibration(misses=["KL 0.2 is above 0.1"])))
    assert "missed the thresholds" in text
    assert "- KL 0.2 is above 0.1" in text


@pytest.mark.parametrize(
    ("head_dim", "refused", "magnitude"),
    [(64, True, "1/√64"), (128, False, "√2/√128"), (256, False, "1/√256"), (32, True, "√2/√32")],
)
def test_the_vllm_fork_is_told_with_its_widths(
    head_dim: int, refused: bool, magnitude: str
) -> None:
    text = card_text(converted_config(head_dim=head_dim))
    command = "vllm serve alice/tiny --kv-cache-dtype kvarn_k4v2_g128 --block-size 128"
    assert f"{command} --dtype float16\n" in blocks(text, "bash")
    assert "on vLLM 0.23.0" in text
    assert "not tested with this model" in text
    assert ("By its source it refuses this model" in text) is refused
    assert f"magnitude {magnitude}, so an outlier" in text


def test_settings_the_fork_takes_from_the_environment_are_set_there() -> None:
    text = card_text(converted_config(KVarNSettings(iterations=16, sink_tokens=0)))
    assert any(
        block.startswith("KVARN_SINKHORN_ITERS=16 KVARN_SINK_TOKENS=0 vllm serve")
        for block in blocks(text, "bash")
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (KVarNSettings(key_bits=2), "ytwang13/KVarN-FP"),
        (KVarNSettings(key_bits=2, value_bits=4), "No public engine"),
        (KVarNSettings(group_size=32), "No public engine"),
    ],
)
def test_a_type_the_fork_does_not_take_gets_no_command(settings: KVarNSettings, told: str) -> None:
    text = card_text(converted_config(settings))
    assert "vllm serve" not in text
    assert f"`{settings.cache_dtype}` is not among them" in text
    assert told in text


def test_hostile_names_stay_text() -> None:
    name = "a`b\n---\n<!-- # heading"
    base_model = BaseModelReference(name=name, revision=None, index_sha256="1" * 64)
    text = card_text(converted_config(base_model=base_model, calibration=calibration(dataset=name)))
    assert front_matter(text)["library_name"] == "transformers"
    assert text.count("`a'b --- <!-- # heading`") == 2


def test_the_python_of_the_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_tiny_checkpoint(tmp_path / "tiny", "llama")
    block = converted_config(
        head_dim=32,
        cache=CacheFormat.from_settings(KVarNSettings(group_size=32, sink_tokens=0), 32),
        rotations=rotations(32, fused=False),
        layers=Layers(covered=[0, 1]),
        proof=None,
    )
    config = json.loads((folder / "config.json").read_text())
    config["kvarn_config"] = block.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(config))
    names: dict[str, Any] = {}
    plain, packed = blocks(card_text(block), "python")
    exec(plain.replace("alice/tiny", str(folder)), names)
    assert capsys.readouterr().out.strip()
    exec(packed, names)
    assert names["output"].shape[-1] > names["inputs"]["input_ids"].shape[-1]

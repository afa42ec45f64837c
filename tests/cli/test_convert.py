import json
import shlex
import shutil
import signal
import socket
import subprocess
import time

import pytest
from awkward_checkpoint import edit_config, marker_of
from hub_process import run_python
from kvarn_process import KVARN, assert_refused, environment, error_of, run_kvarn
from safetensors.torch import load, load_file, save, save_file


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_json_tells_what_was_written(conversion, converted):
    document = json.loads(conversion.stdout)
    assert document["warnings"] == []
    assert (
        document["kvarn_config"]
        == json.loads((converted / "config.json").read_text())["kvarn_config"]
    )
    assert document["kvarn_config"]["calibration"]["misses"] == []
    lines = conversion.stderr.splitlines()
    assert lines[0].startswith("Reading ")
    assert {"checking the weights ...", "validating ...", "writing ..."} < set(lines)
    assert lines[-1].startswith("Try it: kvarn generate ")


def test_code_that_comes_along_is_copied_and_not_run(llama, converted, tmp_path):
    assert (converted / "custom.py").read_bytes() == (llama / "custom.py").read_bytes()
    assert not marker_of(llama).exists()
    trusting = ["convert", llama, "--dry-run", "--no-validate", "--rotation", "online"]
    outcome = run_kvarn(*trusting, "--trust-remote-code", "-q", HF_HOME=str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr == ""
    assert marker_of(llama).exists()
    marker_of(llama).unlink()


def test_a_closed_pipe_ends_without_a_traceback(llama, tmp_path):
    command = [*KVARN, "convert", str(llama), "-o", str(tmp_path / "out"), "--no-validate"]
    done = subprocess.run(
        f"{shlex.join(command)} | head -n 1",
        shell=True,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Proof: fusion moves the logits of a random float64 instance by")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert names_in(tmp_path) == ["out"]


def test_a_dry_run_shows_the_plan_and_writes_nothing(llama, short_run, tmp_path):
    before = names_in(llama)
    common = ["convert", llama, "--dry-run", "--preset", "k2v2_g32", *short_run]
    text = run_kvarn(*common)
    assert text.exit_code == 0, text.stderr
    assert "llama (LlamaForCausalLM)" in text.stdout
    assert "kvarn_k2v2_g32, 896 bytes a record" in text.stdout
    assert "reference encoder" in text.stdout
    assert "fused into 4 tensors" in text.stdout
    document = json.loads(run_kvarn(*common, "-o", tmp_path / "out", "--json").stdout)
    assert document["cache_dtype"] == "kvarn_k2v2_g32"
    assert document["proof"]["largest_difference"] < document["proof"]["tolerance"]
    assert (
        document["cache_bytes"]["131072"]["packed"] < document["cache_bytes"]["131072"]["float16"]
    )
    assert names_in(tmp_path) == []
    assert names_in(llama) == before


def test_a_dry_run_says_why_a_rotation_is_left_to_the_engine(llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    edit_config(model, quantization_config={"quant_method": "awq", "bits": 4})
    outcome = run_kvarn("convert", model, "--dry-run", "--no-validate")
    assert outcome.exit_code == 0, outcome.stderr
    reason = "the weights are quantized already: AWQ (quantization_config)"
    assert f"rotation of V  online, not fused: {reason}\n" in outcome.stdout
    assert names_in(tmp_path) == ["model"]


def test_the_encoder_goes_into_the_metadata(llama, short_run, tmp_path):
    options = ["--preset", "k2v2_g32", "--encoder", "refined", "--force", "--json"]
    outcome = run_kvarn("convert", llama, "-o", tmp_path / "out", *short_run, *options)
    assert outcome.exit_code == 0, outcome.stderr
    block = json.loads(outcome.stdout)["kvarn_config"]
    assert block["cache"]["encoder"] == "refined"
    engines = {errors["engine"]: errors for errors in block["calibration"]["engines"]}
    assert engines["honours_marker"]["encoder"] == "refined"
    assert engines["rotates_again"]["encoder"] == "reference"
    generated = run_kvarn("generate", tmp_path / "out", "hello", "-n", "2", "--json")
    assert generated.exit_code == 0, generated.stderr


def test_a_missed_threshold_leaves_nothing_unless_forced(llama, short_run, tmp_path):
    output = tmp_path / "out with é"
    strict = ["convert", llama, "-o", output, "--preset", "k2v2_g32", "--max-kl", "1e-6"]
    outcome = run_kvarn(*strict, *short_run, "--json")
    error = error_of(outcome)
    assert outcome.exit_code == 5
    assert "honours_marker: KL 0." in error["message"]
    assert "--force" in error["hint"]
    assert error["calibration"]["engines"][0]["kl_mean"] > 1e-6
    assert names_in(tmp_path) == []
    shutil.copytree(llama, output)
    (output / "stale").touch()
    forced = run_kvarn(*strict, *short_run, "--force", "--overwrite")
    assert forced.exit_code == 0, forced.stderr
    assert "missed: honours_marker: KL 0." in forced.stdout
    calibration = json.loads((output / "config.json").read_text())["kvarn_config"]["calibration"]
    assert calibration["engines"] == error["calibration"]["engines"]
    assert any("KL" in miss for miss in calibration["misses"])
    assert f"Try it: kvarn generate '{output}'" in forced.stderr
    assert not (output / "stale").exists()
    assert names_in(tmp_path) == [output.name]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "no folder to write"),
        (["--dry-run", "--preset", "k3v2_g7"], "key_bits is 3"),
        (["--dry-run", "--preset", "kv"], "unknown preset 'kv'"),
        (["--dry-run", "--iterations", "-1"], "iterations is -1"),
        (["--dry-run", "--max-kl", "0"], "--max-kl is 0.0"),
        (["--dry-run", "--min-top1", "2"], "--min-top1 is 2.0"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_read(arguments, word):
    outcome = run_kvarn("convert", "./nowhere", *arguments)
    assert_refused(outcome, 2, word)
    assert "Reading" not in outcome.stderr


def test_an_output_in_use_is_refused(llama, tmp_path):
    (tmp_path / "kept").touch()
    outcome = run_kvarn("convert", llama, "-o", tmp_path)
    assert_refused(outcome, 2, "is not empty", "hint: name another folder, or pass --overwrite")
    assert names_in(tmp_path) == ["kept"]


def test_text_that_is_too_short_is_refused(llama, tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    options = ["--dataset", tmp_path / "text.txt", "--json"]
    outcome = run_kvarn("convert", llama, "-o", tmp_path / "out", *options)
    assert outcome.exit_code == 2
    assert "the calibration text has" in error_of(outcome)["message"]
    assert names_in(tmp_path) == ["text.txt"]


def test_a_converted_model_is_not_converted_twice(converted, tmp_path):
    outcome = run_kvarn("convert", converted, "-o", tmp_path / "out", "--json")
    assert outcome.exit_code == 3
    assert "was converted already" in error_of(outcome)["message"]
    assert names_in(tmp_path) == []


def test_a_broken_weight_is_named(llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name][3, 3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    outcome = run_kvarn("convert", model, "-o", tmp_path / "out", "--no-validate")
    assert_refused(outcome, 6, f"{name} holds NaN or infinity")
    assert names_in(tmp_path) == ["model"]


def interrupted(process, *, when):
    """Send Ctrl-C as soon as something is so; the exit code and all of stderr."""
    while process.poll() is None and not when():
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def start(*arguments):
    return subprocess.Popen(
        [*KVARN, *map(str, arguments)], env=environment(), stderr=subprocess.PIPE, text=True
    )


def test_an_interrupt_while_validating_leaves_nothing(llama, tmp_path):
    process = start("convert", llama, "-o", tmp_path / "out", "--num-samples", "100")
    code, stderr = interrupted(
        process, when=lambda: process.stderr.readline() == "validating ...\n"
    )
    assert code == 130
    assert "error: interrupted\nhint: run the same command again" in stderr
    assert "Traceback" not in stderr
    assert names_in(tmp_path) == []


def test_an_interrupt_while_writing_leaves_only_what_can_be_continued(llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    with (model / "large.txt").open("wb") as sidecar:
        sidecar.truncate(300_000_000)
    process = start("convert", model, "-o", tmp_path / "out", "--no-validate")
    code, stderr = interrupted(process, when=(tmp_path / "out.incomplete").exists)
    assert code == 130
    assert "error: interrupted\nhint: run the same command again" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    assert set(names_in(tmp_path)) <= {"model", "out.incomplete"}


@pytest.fixture
def hub_files(llama):
    return {
        path.relative_to(llama).as_posix(): path.read_bytes()
        for path in llama.rglob("*")
        if path.is_file()
    }


def on_hub(hub, tmp_path, *arguments, **environment):
    home = tmp_path / "home"
    return run_python(hub, home, ["-m", "kvarn_cli", *arguments], **environment)


def test_a_revision_from_the_hub_is_converted_and_the_cache_left_alone(hub, hub_files, tmp_path):
    commit = hub.add_repository("alice/tiny", hub_files).branches["main"]
    repository = hub.repositories["alice/tiny"]
    repository.commit("main", {}, "all gone")
    output = tmp_path / "out"
    arguments = ["convert", "alice/tiny", "--revision", commit, "-o", output, "--no-validate"]
    outcome = on_hub(hub, tmp_path, *arguments, "--json")
    assert outcome.data["kvarn_config"]["base_model"]["name"] == "alice/tiny"
    assert outcome.data["kvarn_config"]["base_model"]["revision"] == commit
    assert "Downloading the weights" in outcome.stderr
    snapshot = next((tmp_path / "home").glob("hub/models--*/snapshots/*"))
    for name, content in hub_files.items():
        assert (snapshot / name).is_symlink()
        assert (snapshot / name).read_bytes() == content
        assert not (output / name).is_symlink()
        if name not in ("config.json", "model.safetensors"):
            assert (output / name).read_bytes() == content


@pytest.mark.parametrize(
    ("config_change", "options", "exit_code"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ["--no-validate", "--rotation", "fused"],
            3,
        ),
        ({}, ["--num-samples", "1000000"], 2),
    ],
    ids=["weights quantized", "text too short"],
)
def test_what_cannot_be_converted_is_refused_before_its_weights_come(
    hub, hub_files, tmp_path, config_change, options, exit_code
):
    config = json.dumps(json.loads(hub_files["config.json"]) | config_change)
    hub.add_repository("alice/tiny", hub_files | {"config.json": config.encode()})
    outcome = on_hub(hub, tmp_path, "convert", "alice/tiny", "-o", tmp_path / "out", *options)
    assert_refused(outcome, exit_code, "hint: ")
    assert hub.asked("GET", "config.json")
    assert not any("safetensors" in request.path for request in hub.requests)


def test_two_models_in_one_repository_are_refused_before_any_weights_come(hub, hub_files, tmp_path):
    """As after a sharded upload over an old single file, which transformers would load."""
    shard = "model-00001-of-00001.safetensors"
    tensors = load(hub_files["model.safetensors"])
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    both = {"model.safetensors.index.json": json.dumps(index).encode(), shard: save(tensors)}
    hub.add_repository("alice/both", hub_files | both)
    for options in (["--dry-run"], ["-o", tmp_path / "out"]):
        outcome = on_hub(hub, tmp_path, "convert", "alice/both", *options)
        assert_refused(outcome, 6, "hf download alice/both --exclude model.safetensors")
    fetched = {request.path for request in hub.requests if request.method == "GET"}
    assert not any(path.endswith(".safetensors") for path in fetched)


def test_without_a_network_the_hub_cannot_be_asked(hub, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        arguments = ["convert", "alice/tiny", "-o", tmp_path / "out", "--json"]
        outcome = on_hub(hub, tmp_path, *arguments, HF_ENDPOINT=nowhere)
    assert outcome.exit_code == 4
    assert "check the network" in error_of(outcome)["hint"]
    assert outcome.stderr.startswith("No folder alice/tiny here; asking the Hub for it\n")
    assert not (tmp_path / "out").exists()

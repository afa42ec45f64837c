import pytest
from awkward_checkpoint import edit_config
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import CheckpointError
from kvarn_cli.model.config_file import check_config_file
from kvarn_cli.model.loading import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def config_file(folder):
    path = folder / "config.json"
    original = path.read_bytes()
    yield path
    path.write_bytes(original)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**8},
        {"num_labels": 1e8},
        {"num_local_experts": 10**400},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"parts": [{"n_layer": 10_001}]},
    ],
)
def test_absurd_counts_are_refused_before_transformers_reads_them(folder, config_file, change):
    edit_config(folder, **change)
    with pytest.raises(CheckpointError, match="is above 10000, more than any model has"):
        load_config(folder)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [["fp8"], "fp8", 8])
def test_quantization_that_is_no_object_is_refused(folder, config_file, key, value):
    edit_config(folder, **{key: value})
    with pytest.raises(CheckpointError, match=f"{key} must be an object"):
        load_config(folder)


def test_ordinary_configurations_pass(folder, config_file):
    check_config_file(config_file)
    edit_config(folder, num_hidden_layers=10_000, vocab_size=10**6, quantization_config=None)
    check_config_file(config_file)


def test_a_width_is_no_count(config_file):
    config_file.write_text('{"shared_expert_intermediate_size": 20480, "label_smoothing": 0.1}')
    check_config_file(config_file)


def test_absurd_nesting_is_refused(config_file):
    deep = "[" * 900 + "]" * 900
    config_file.write_text(f'{{"deep": {deep}}}')
    with pytest.raises(CheckpointError, match="nested too deeply"):
        check_config_file(config_file)


@pytest.mark.parametrize("text", ["[]", '{"a": 1, "a": 2}', "{"])
def test_what_is_no_json_object_is_refused(config_file, text):
    config_file.write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        check_config_file(config_file)

import json
import shutil

import pytest
import torch
from conversions import convert
from tiny_models import build_tiny_checkpoint

from kvarn_cli.errors import CheckpointError, SettingsError, UnsupportedModelError, UsageError
from kvarn_cli.generation import generate_text
from kvarn_cli.model.loading import load_model, load_tokenizer
from kvarn_cli.runtime.cache import KVarNCache

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder):
    return build_tiny_checkpoint(folder / "llama", "llama")


@pytest.fixture(scope="module")
def converted(llama, folder):
    return convert(llama, folder / "converted", preset="k2v2_g32").output


def generate(model, prompt=PROMPT, **options):
    return generate_text(str(model), prompt, **({"max_new_tokens": 8} | options))


def test_the_text_is_what_the_model_generates_with_the_packed_cache(converted):
    pieces = []
    generation = generate(converted, chat_template=False, on_text=pieces.append)
    model = load_model(converted, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(converted)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(
        **prompt, cache=KVarNCache.from_model(model), max_new_tokens=8, do_sample=False
    )
    new_tokens = tokens[0, prompt.input_ids.shape[1] :]
    assert generation.text == tokenizer.decode(new_tokens, skip_special_tokens=True)
    assert "".join(pieces) == generation.text
    assert generation.prompt_tokens == prompt.input_ids.shape[1]
    assert generation.new_tokens == len(new_tokens) == 8
    assert generation.cache_dtype == "kvarn_k2v2_g32"
    assert generation.tokens_per_second == 8 / generation.elapsed_seconds


def test_the_packed_cache_of_a_long_prompt_is_small(converted):
    generation = generate(converted, dtype="bfloat16", chat_template=False)
    tokens = generation.prompt_tokens + generation.new_tokens - 1
    assert generation.sixteen_bit_cache_bytes == 2 * 2 * tokens * 2 * 32 * 2
    packed = (tokens - 128) // 32 * 32
    exact = tokens - packed
    assert generation.cache_bytes == 2 * 2 * (packed // 32 * 896 + exact * 2 * 32 * 2)
    assert generation.cache_bytes < 0.6 * generation.sixteen_bit_cache_bytes


def test_an_original_model_needs_a_preset_and_says_so_before_its_weights_are_read(llama, tmp_path):
    for file in llama.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="is not converted") as raised:
        generate(tmp_path)
    assert "--preset k4v2_g128" in raised.value.hint
    assert generate(llama, preset="k4v2_g64").cache_dtype == "kvarn_k4v2_g64"


@pytest.mark.parametrize(
    ("preset", "changes", "kind", "named"),
    [
        ("mla_k4_g128", {}, UsageError, "which caches K and V, no latent"),
        ("k4v2_g128", {"head_dim": 48}, UnsupportedModelError, "head_dim is 48 in layer 0"),
    ],
)
def test_a_cache_that_cannot_be_packed_is_refused_before_the_weights_are_read(
    llama, tmp_path, preset, changes, kind, named
):
    for file in llama.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(kind, match=named):
        generate(tmp_path, preset=preset)


def test_a_preset_goes_before_that_of_the_conversion(converted):
    assert generate(converted, preset="k4v4_g64").cache_dtype == "kvarn_k4v4_g64"
    with pytest.raises(SettingsError, match="unknown preset"):
        generate(converted, preset="k4")


def test_tiles_are_packed_as_the_conversion_says_or_as_asked(llama, tmp_path):
    refined = convert(llama, tmp_path / "refined", preset="k2v2_g32", encoder="refined").output
    assert generate(llama, preset="k2v2_g32").encoder == "reference"
    assert generate(llama, preset="k2v2_g32", encoder="refined").encoder == "refined"
    assert generate(refined).encoder == "refined"
    assert generate(refined, preset="k4v4_g32").encoder == "refined"
    assert generate(refined, encoder="reference").encoder == "reference"


def test_the_chat_template_is_used_unless_left_out(converted):
    templated = generate(converted, "a", max_new_tokens=1)
    assert generate(converted, "a", max_new_tokens=1, chat_template=False).prompt_tokens == 1
    assert templated.prompt_tokens > 10


def test_an_empty_prompt_is_refused(converted):
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(converted, "", chat_template=False)


def test_a_seed_samples_and_repeats(converted):
    texts = [generate(converted, seed=seed).text for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert generate(converted).text == generate(converted).text


@pytest.mark.parametrize(
    "text",
    [
        '{"use_cache": false}',
        '{"num_beams": 3, "return_dict_in_generate": true, "stop_strings": ["a"]}',
        '{"cache_implementation": "static", "max_new_tokens": -3}',
        '{"temperature": "hot", "top_k": 0}',
        "[1]",
        "{not JSON",
    ],
)
def test_only_stopping_and_sampling_is_taken_from_generation_config(converted, tmp_path, text):
    expected = generate(converted)
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "generation_config.json").write_text(text)
    generation = generate(copy)
    assert generation.text == expected.text
    assert generation.cache_bytes == expected.cache_bytes
    assert generate(copy, seed=1).new_tokens == 8


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{{ a.b.c }}"])
def test_a_broken_chat_template_is_named(converted, tmp_path, template):
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="chat template fails") as caught:
        generate(copy)
    assert "--ignore-chat-template" in caught.value.hint


def test_a_prompt_that_is_no_text_is_refused(converted):
    with pytest.raises(UsageError, match="not UTF-8"):
        generate(converted, "half a character: \ud800")


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    model = build_tiny_checkpoint(tmp_path / "model", "llama", vocab_size=100)
    with pytest.raises(CheckpointError, match="the model embeds 100 tokens"):
        generate(model, preset="k2v2_g32")


def test_weights_beside_an_index_that_does_not_name_them_are_refused(llama, tmp_path):
    sharded = build_tiny_checkpoint(tmp_path / "model", "llama", sharded=True)
    shutil.copy(llama / "model.safetensors", sharded)
    with pytest.raises(CheckpointError, match="which transformers would load") as caught:
        generate(sharded, preset="k2v2_g32")
    assert "out of date" in caught.value.hint

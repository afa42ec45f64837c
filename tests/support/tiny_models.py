"""Tiny random checkpoints of the supported families, made in a second and loaded offline.

Every parameter is drawn at random: a bias left at 0 or a norm weight left at 1 would hide the
very mistakes that tests look for. The scales keep logits near a standard deviation of 2 and let
attention matter, so that a small change anywhere is visible in them.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 300
FAMILIES = ("llama", "mistral", "mistral-sliding", "qwen2", "qwen3")

_CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mistral-sliding": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A cache keeps keys and values of past tokens, "
    "and each new token reads them all. Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16."
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_config(family: str, *, head_dim: int = 32, **overrides: Any) -> PreTrainedConfig:
    """A config of one of `FAMILIES`: 2 layers, 4 query heads, 2 KV heads, 2048 positions.

    `mistral` attends fully (as since v0.2), `mistral-sliding` through a window of 64 tokens in
    every layer; `qwen2` has biases on q, k and v; `qwen3` has q/k norms and a hidden size that
    is not heads * head_dim. Any config value can be replaced through `overrides`.
    """
    num_heads = 4
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "mistral":
        values["sliding_window"] = None
    elif family == "mistral-sliding":
        values["sliding_window"] = 64
    elif family == "qwen3":
        values |= {"head_dim": head_dim, "hidden_size": 96}
    return _CONFIG_CLASSES[family](**(values | overrides))


def tiny_model(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A model of `config` in eval mode with every parameter drawn from `seed`."""
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomize(model, seed=seed)
    return model.eval()


def randomize(model: torch.nn.Module, *, seed: int = 0) -> None:
    """Draw every parameter anew; a product with a matrix keeps the variance of its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                gain = 2.0 if name.endswith(("q_proj.weight", "lm_head.weight")) else 1.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.5 * noise)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `VOCAB_SIZE` entries; it encodes and restores any text.

    The end token has the name that Qwen's tokenizer class would otherwise add as one entry more.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 32,
    num_layers: int = 2,
    sharded: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a tiny model and its tokenizer to `folder` (made if missing) and return the folder.

    With `sharded` the weights lie in several files with an index. `overrides` go to the config.
    """
    config = tiny_config(family, head_dim=head_dim, num_hidden_layers=num_layers, **overrides)
    model = tiny_model(config, dtype=dtype, seed=seed)
    model.save_pretrained(folder, max_shard_size="200KB" if sharded else "5GB")
    tiny_tokenizer().save_pretrained(folder)
    return folder

"""The settings of the KVarN quantizer, their names, and the bytes they cost.

A tile is `group_size` consecutive tokens of one KV head. Light on purpose: no torch, no pydantic,
so that the command line can name the presets without loading either.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvarn_cli.errors import SettingsError

Encoder = Literal["reference", "refined"]
Layout = Literal["vllm-fp16", "paper-fp8"]

KEY_VALUE_BITS = (2, 4)
GROUP_SIZES = (32, 64, 128, 256)
HEAD_DIMS = (32, 64, 128, 256, 512)
MAX_ITERATIONS = 1000
ENCODERS = get_args(Encoder)
LAYOUTS = get_args(Layout)
DEFAULT_PRESET = "k4v2_g128"

_NAME = re.compile(r"(?:kvarn_)?k(?P<key>[0-9]{1,3})v(?P<value>[0-9]{1,3})_g(?P<group>[0-9]{1,3})")
_SCALE_BYTES = {"vllm-fp16": 2, "paper-fp8": 1}
_ZERO_POINT_BYTES = 2


@dataclass(frozen=True)
class KVarNSettings:
    """Everything that decides how a tile is quantized and which tokens stay exact.

    Attributes:
        key_bits: bits of one K code, 2 or 4.
        value_bits: bits of one V code, 2 or 4.
        group_size: tokens in a tile.
        iterations: alternating passes of the variance normalization; 0 leaves it out.
        log_scale_min: lower clip of a log scale.
        log_scale_max: upper clip of a log scale.
        std_min: lower clip of a standard deviation before its logarithm.
        std_max: upper clip of a standard deviation before its logarithm.
        sink_tokens: first tokens of a sequence that stay exact.
        residual_tokens: newest tokens that stay exact besides those of the incomplete tile.
        layout: name of the record layout; `vllm-fp16` is what engines store.
        encoder: how codes and scales are chosen; every decoder takes the records of either.

    Raises:
        SettingsError: a value lies outside what the record layout can hold.

    Source: KVarN (arXiv 2606.03458), section 3; clips as in the public vLLM backend.
    """

    key_bits: int = 4
    value_bits: int = 2
    group_size: int = 128
    iterations: int = 8
    log_scale_min: float = -0.3
    log_scale_max: float = 10.0
    std_min: float = 1e-3
    std_max: float = 1e3
    sink_tokens: int = 128
    residual_tokens: int = 0
    layout: Layout = "vllm-fp16"
    encoder: Encoder = "reference"

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            check_choice(name, getattr(self, name), KEY_VALUE_BITS)
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("encoder", self.encoder, ENCODERS)
        if not 0 <= self.iterations <= MAX_ITERATIONS:
            raise SettingsError(
                f"iterations is {self.iterations}; it must lie between 0 and {MAX_ITERATIONS}"
            )
        for name in ("sink_tokens", "residual_tokens"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not self.log_scale_min < self.log_scale_max:
            raise SettingsError("log_scale_min must be below log_scale_max")
        if not 0 < self.std_min < self.std_max:
            raise SettingsError("std_min must be above 0 and below std_max")

    @classmethod
    def from_name(cls, name: str) -> "KVarNSettings":
        """Settings of a preset such as `k4v2_g128`, with or without the `kvarn_` prefix.

        Raises:
            SettingsError: the name does not parse, or names widths that no record holds.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise SettingsError(
                f"unknown preset {name!r}", hint=f"a preset looks like {DEFAULT_PRESET} or k2v2_g64"
            )
        return cls(
            key_bits=int(match["key"]),
            value_bits=int(match["value"]),
            group_size=int(match["group"]),
        )

    @property
    def name(self) -> str:
        """The preset's name, e.g. `k4v2_g128`."""
        return f"k{self.key_bits}v{self.value_bits}_g{self.group_size}"

    @property
    def cache_dtype(self) -> str:
        """The name that backends take as the cache's dtype, e.g. `kvarn_k4v2_g128`."""
        return f"kvarn_{self.name}"

    def with_(self, **changes: object) -> "KVarNSettings":
        """A checked copy with some values replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def record_bytes(self, head_dim: int) -> int:
        """Bytes of one record: one tile of K and of V of one KV head, codes and scales."""
        check_head_dim(head_dim)
        codes = head_dim * self.group_size * (self.key_bits + self.value_bits) // 8
        scales = 2 * (head_dim + self.group_size) * _SCALE_BYTES[self.layout]
        return codes + scales + (head_dim + self.group_size) * _ZERO_POINT_BYTES

    def bits_per_element(self, head_dim: int) -> float:
        """Bits per K or V element of a packed tile, scales and zeros included."""
        return self.record_bytes(head_dim) * 8 / (2 * head_dim * self.group_size)

    def packed_tokens(self, sequence_length: int) -> int:
        """How many of the first `sequence_length` tokens lie in packed tiles.

        Tiles start behind the sink; one is packed once it is full and older than the residual.
        """
        between = max(sequence_length - self.sink_tokens - self.residual_tokens, 0)
        return between // self.group_size * self.group_size

    def cache_bytes(self, sequence_length: int, head_dim: int, exact_element_bytes: int = 2) -> int:
        """Bytes of one KV head's cache: packed tiles, and sink and tail in their own dtype."""
        packed = self.packed_tokens(sequence_length)
        exact = sequence_length - packed
        return (
            packed // self.group_size * self.record_bytes(head_dim)
            + exact * 2 * head_dim * exact_element_bytes
        )


def check_head_dim(head_dim: int) -> None:
    """Refuse a head width that the Hadamard rotation and the backends cannot take.

    Raises:
        SettingsError: head_dim is no power of two from 32 to 512.
    """
    check_choice("head_dim", head_dim, HEAD_DIMS)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        SettingsError: naming the setting and the choices.
    """
    if value not in choices:
        allowed = ", ".join(map(str, choices))
        raise SettingsError(f"{name} is {value}; it must be one of {allowed}")

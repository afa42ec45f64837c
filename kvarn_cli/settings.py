"""The settings of the KVarN quantizer, their names, and the bytes they cost.

A tile is `group_size` consecutive tokens of one KV head. Light on purpose: no torch, no pydantic,
so that the command line can name the presets without loading either.

A model with multi-head latent attention (MLA) caches a latent, from which it computes K and V of
all heads, and a RoPE key shared by them. Its settings have `value_bits` 16: the latent is quantized
as K is, and the RoPE key, which stands in V's place, stays exact.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvarn_cli.errors import SettingsError

Encoder = Literal["reference", "refined"]
Layout = Literal["vllm-fp16", "paper-fp8"]

KEY_VALUE_BITS = (2, 4)
EXACT_BITS = 16
GROUP_SIZES = (32, 64, 128, 256)
HEAD_DIMS = (32, 64, 128, 256, 512)
MAX_ITERATIONS = 1000
ENCODERS = get_args(Encoder)
LAYOUTS = get_args(Layout)
DEFAULT_PRESET = "k4v2_g128"
DEFAULT_LATENT_PRESET = "mla_k4_g128"
LATENT_ITERATIONS = 16

_NAME = re.compile(
    r"(?:kvarn_)?(?P<latent>mla_)?k(?P<key>[0-9]{1,3})(?(latent)|v(?P<value>[0-9]{1,3}))"
    r"_g(?P<group>[0-9]{1,3})"
)
_SCALE_BYTES = {"vllm-fp16": 2, "paper-fp8": 1}
_ZERO_POINT_BYTES = 2


@dataclass(frozen=True)
class KVarNSettings:
    """Everything that decides how a tile is quantized and which tokens stay exact.

    Attributes:
        key_bits: bits of one K code, 2 or 4.
        value_bits: bits of one V code, 2 or 4; 16 for a latent cache, see above.
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
        check_choice("key_bits", self.key_bits, KEY_VALUE_BITS)
        check_choice("value_bits", self.value_bits, (*KEY_VALUE_BITS, EXACT_BITS))
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

        A preset of a latent cache, such as `mla_k4_g128`, comes with the 16 iterations that the
        public vLLM backend gives it.

        Raises:
            SettingsError: the name does not parse, or names widths that no record holds.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise SettingsError(
                f"unknown preset {name!r}",
                hint=f"a preset looks like {DEFAULT_PRESET} or k2v2_g64, that of a latent cache "
                f"like {DEFAULT_LATENT_PRESET}",
            )
        if match["latent"] is None:
            check_choice("value_bits", int(match["value"]), KEY_VALUE_BITS)
        return cls(
            key_bits=int(match["key"]),
            value_bits=int(match["value"] or EXACT_BITS),
            group_size=int(match["group"]),
            iterations=LATENT_ITERATIONS if match["latent"] else cls.iterations,
        )

    @property
    def latent(self) -> bool:
        """Whether these are settings of a latent cache."""
        return self.value_bits == EXACT_BITS

    @property
    def name(self) -> str:
        """The preset's name, e.g. `k4v2_g128` or `mla_k4_g128`."""
        codes = f"mla_k{self.key_bits}" if self.latent else f"k{self.key_bits}v{self.value_bits}"
        return f"{codes}_g{self.group_size}"

    @property
    def cache_dtype(self) -> str:
        """The name that backends take as the cache's dtype, e.g. `kvarn_k4v2_g128`."""
        return f"kvarn_{self.name}"

    def with_(self, **changes: object) -> "KVarNSettings":
        """A checked copy with some values replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def record_bytes(self, head_dim: int, rope_dim: int = 0) -> int:
        """Bytes of one record: one tile of K and of V of one KV head, codes and scales.

        Args:
            head_dim: width of K and V, or of the latent.
            rope_dim: width of the RoPE key beside a latent.
        """
        check_head_dim(head_dim)
        tokens, scale = self.group_size, _SCALE_BYTES[self.layout]
        keys = head_dim * tokens * self.key_bits // 8
        keys += (head_dim + tokens) * scale + head_dim * _ZERO_POINT_BYTES
        if self.latent:
            return keys + rope_dim * tokens * EXACT_BITS // 8
        values = head_dim * tokens * self.value_bits // 8
        values += (head_dim + tokens) * scale + tokens * _ZERO_POINT_BYTES
        return keys + values

    def bits_per_element(self, head_dim: int, rope_dim: int = 0) -> float:
        """Bits per cached element of a packed tile, scales and zeros included."""
        elements = self._elements(head_dim, rope_dim) * self.group_size
        return self.record_bytes(head_dim, rope_dim) * 8 / elements

    def _elements(self, head_dim: int, rope_dim: int) -> int:
        """What one KV head caches of one token."""
        return head_dim + rope_dim if self.latent else 2 * head_dim

    def packed_tokens(self, sequence_length: int) -> int:
        """How many of the first `sequence_length` tokens lie in packed tiles.

        Tiles start behind the sink; one is packed once it is full and older than the residual.
        """
        between = max(sequence_length - self.sink_tokens - self.residual_tokens, 0)
        return between // self.group_size * self.group_size

    def cache_bytes(
        self,
        sequence_length: int,
        head_dim: int,
        rope_dim: int = 0,
        *,
        exact_element_bytes: int = 2,
    ) -> int:
        """Bytes of one KV head's cache: packed tiles, and sink and tail in their own dtype."""
        packed = self.packed_tokens(sequence_length)
        exact = sequence_length - packed
        return (
            packed // self.group_size * self.record_bytes(head_dim, rope_dim)
            + exact * self._elements(head_dim, rope_dim) * exact_element_bytes
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

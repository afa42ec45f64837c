"""The one interface of every KV-cache quantization method."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, Self

from torch import Tensor

from kvarn_cli.errors import SettingsError
from kvarn_cli.settings import EXACT_BITS, KVarNSettings, check_choice


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """What a cache would give back for the tokens it has packed.

    The first `sink_tokens` tokens and the newest incomplete group stay exact, for every method
    alike, so that methods are compared on the same tokens.

    Attributes:
        group_size: tokens that are packed together.
        sink_tokens: first tokens of a sequence that stay exact.
        residual_tokens: newest tokens that stay exact besides those of the incomplete group.
        tail: `exact` keeps the newest tokens as caches do; `packed` gives every token, the newest
            included, only the packed K and V of all tokens behind the sink (an incomplete last
            group is filled up with copies of its last token). No cache works so: it shows what
            the exact tail hides.
    """

    name: ClassVar[str]
    plain_basis: ClassVar[bool] = True
    """Whether V is wanted in the original model's basis even where its rotation is fused."""
    keys_before_rope: ClassVar[bool] = False
    """Whether K is wanted as it is before RoPE."""
    takes_latents: ClassVar[bool] = False
    """Whether `reconstruct` takes a latent and a RoPE key in the place of K and V."""
    needs_fit: ClassVar[bool] = False
    """Whether `fit` has to come before `reconstruct`."""
    constant_bits: ClassVar[float] = 0.0
    """Bits that one channel costs once, however long the sequence; mean over K and V."""

    group_size: int = KVarNSettings.group_size
    sink_tokens: int = KVarNSettings.sink_tokens
    residual_tokens: int = KVarNSettings.residual_tokens
    tail: Literal["exact", "packed"] = "exact"

    def __post_init__(self) -> None:
        check_choice("tail", self.tail, ("exact", "packed"))
        _ = self.settings  # refuses what no record holds

    @classmethod
    def from_settings(cls, settings: KVarNSettings) -> Self:
        """This method with those of the settings that it has."""
        names = KVarNSettings.__dataclass_fields__.keys() & {field.name for field in fields(cls)}
        return cls(**{name: getattr(settings, name) for name in names})

    @property
    def settings(self) -> KVarNSettings:
        """The fields that are settings of a record, checked."""
        names = KVarNSettings.__dataclass_fields__.keys()
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return KVarNSettings(**{name: own[name] for name in names & own.keys()})

    @property
    def label(self) -> str:
        """The shortest spec that parses to this method, e.g. `fp8,sink_tokens=0`."""
        return ",".join([self.name, *self._options()])

    def _options(
        self, *, besides: tuple[str, ...] = (), preset: KVarNSettings | None = None
    ) -> list[str]:
        """The fields that differ from their defaults, or from the preset where it has them."""
        defaults = {field.name: field.default for field in fields(self) if field.compare}
        if preset is not None:
            defaults |= {name: getattr(preset, name, value) for name, value in defaults.items()}
        return [
            f"{name}={getattr(self, name)}"
            for name, default in defaults.items()
            if name not in besides and getattr(self, name) != default
        ]

    def fit(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> Self:
        """Learn what the method fixes before it runs; most methods fix nothing.

        Args:
            layers: layer → K and V of calibration text, [batch, kv_heads, tokens, head_dim], in
                the form that `reconstruct` gets them.
        """
        return self

    def for_layer(self, layer: int) -> "Method":
        """The method as fitted to one layer."""
        return self

    @abstractmethod
    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and decode.

        Args:
            keys: [..., kv_heads, tokens, head_dim], any float dtype; tokens a multiple of
                group_size; after RoPE unless `keys_before_rope`. Of an MLA model the latent.
            values: the same shape. Of an MLA model the RoPE key, which stays exact in 16 bits.

        Returns:
            What the cache would give back for both, float32, the same shapes.
        """

    @abstractmethod
    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Bits that one element of a packed token costs: codes, scales, zero points, outliers.

        Of a latent cache one element of the latent.
        """

    def average_bits(self, num_tokens: int, head_dim: int, num_kv_heads: int = 1) -> float:
        """Bits per element of a whole cache of `num_tokens`.

        Sink and tail count 16 bits, an incomplete packed group counts as a full one, and what is
        stored once is spread over the tokens.
        """
        packed = self.packed_tokens(num_tokens)
        stored = math.ceil(packed / self.group_size) * self.group_size
        bits = stored * self.bits_per_element(head_dim, num_kv_heads)
        return (bits + (num_tokens - packed) * EXACT_BITS + self.constant_bits) / num_tokens

    def packed_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens are packed."""
        if self.tail == "packed":
            return max(num_tokens - self.sink_tokens, 0)
        return self.settings.packed_tokens(num_tokens)


@dataclass(frozen=True, kw_only=True)
class PresetMethod(Method):
    """A method whose code widths are chosen by a preset such as `k4v2_g128` or `mla_k4_g128`.

    Attributes:
        key_bits: bits of one K code.
        value_bits: bits of one V code; 16 for a latent cache, see `KVarNSettings`.
    """

    key_bits: int = KVarNSettings.key_bits
    value_bits: int = KVarNSettings.value_bits

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings.latent and not self.takes_latents:
            raise SettingsError(
                f"{self.name} does not quantize latents, as {self.settings.name} asks for",
                hint="use kvarn, ablation, quarot or kivi for a model with MLA",
            )

    @property
    def label(self) -> str:
        """The shortest spec that parses to this method, e.g. `kvarn:k2v2_g128,iterations=16`."""
        name = self.settings.name
        options = self._options(
            besides=("key_bits", "value_bits", "group_size"), preset=KVarNSettings.from_name(name)
        )
        return ",".join([f"{self.name}:{name}", *options])

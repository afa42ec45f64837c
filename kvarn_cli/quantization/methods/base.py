"""The one interface of every KV-cache quantization method."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from torch import Tensor

from kvarn_cli.settings import KVarNSettings


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """What a cache would give back for the tokens it has packed.

    The first `sink_tokens` tokens and the newest incomplete group stay exact, for every method
    alike, so that methods are compared on the same tokens.

    Attributes:
        key_bits: bits of one K code.
        value_bits: bits of one V code.
        group_size: tokens that are packed together.
        sink_tokens: first tokens of a sequence that stay exact.
    """

    name: ClassVar[str]
    plain_basis: ClassVar[bool] = True
    """Whether V is wanted in the original model's basis even where its rotation is fused."""

    key_bits: int = KVarNSettings.key_bits
    value_bits: int = KVarNSettings.value_bits
    group_size: int = KVarNSettings.group_size
    sink_tokens: int = KVarNSettings.sink_tokens

    def __post_init__(self) -> None:
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
        """The shortest spec that parses to this method, e.g. `kvarn:k2v2_g128,iterations=16`."""
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in ("key_bits", "value_bits", "group_size")
            and getattr(self, field.name) != field.default
        ]
        return ",".join([f"{self.name}:{self.settings.name}", *options])

    @abstractmethod
    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and decode.

        Args:
            keys: [..., tokens, head_dim] after RoPE, any float dtype; tokens a multiple of
                group_size.
            values: the same shape.

        Returns:
            What the cache would give back for both, float32, the same shapes.
        """

    @abstractmethod
    def bits_per_element(self, head_dim: int) -> float:
        """Bits that one element of a packed token costs, scales and zero points included."""

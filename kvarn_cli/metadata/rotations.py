"""Which matrices rotate K and V, exactly, and where."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvarn_cli.metadata.base import Block


class Application(Block):
    """One place where a rotation is applied."""

    targets: list[str] = Field(
        description="modules, named as in the checkpoint; re: starts a regular expression"
    )
    location: Literal[
        "weight_output", "weight_input", "input", "q_attn", "k_cache", "v_cache", "latent_cache"
    ] = Field(
        description="as in compressed-tensors; v_cache and latent_cache are this format's own"
    )
    inverse: bool = False


class RotatedTensor(Block):
    """Where the channels of heads lie in a tensor that holds a fused rotation.

    Along `axis`, the `head_dim` channels of each head, as a row vector, were multiplied by R.
    """

    axis: Literal[0, 1] = Field(description="0: rows are channels of heads; 1: columns are")
    first_channels: list[Annotated[int, Field(ge=0)]] = Field(
        description="first channel of each head along that axis"
    )


class FoldedNormRecord(Block):
    """A norm between a latent and what reads it, whose weight g was moved into the latter.

    The columns of `into` were multiplied by g before they were rotated, g = weight + 1 - `unit`,
    and the weight itself was set to `unit`, with which the norm scales nothing.
    """

    into: str = Field(description="the tensor that reads the latent")
    unit: Literal[0, 1]


class Rotation(Block):
    """One orthonormal matrix R = H · diag(signs), acting on row vectors: x ↦ x R."""

    type: Literal["hadamard"] = "hadamard"
    order: Literal["sylvester"] = Field(
        default="sylvester",
        description="natural order: entry (i, j) has the sign (-1)^popcount(i & j)",
    )
    normalized: Literal[True] = Field(default=True, description="entries are ±1/√head_dim")
    signs: str | None = Field(
        description="one + or - per column of H, or null for plain H", pattern=r"^[+-]+$"
    )
    head_dim: int
    where: Literal["fused", "online"] = Field(
        description="fused: already in the weights; online: the engine applies it"
    )
    apply: list[Application]
    tensors: dict[str, RotatedTensor] = Field(
        default={}, description="every tensor that a fused rotation turned, by name"
    )
    folded_norms: dict[str, FoldedNormRecord] = Field(
        default={}, description="every norm that was folded for it, by name of its weight"
    )
    not_fused: str | None = Field(
        default=None, description="why the rotation is online although fusing was tried"
    )

    @model_validator(mode="after")
    def _tensors_hold_what_is_fused(self) -> Self:
        if bool(self.tensors) != (self.where == "fused"):
            raise ValueError("tensors must be listed where the rotation is fused, and only there")
        if others := {norm.into for norm in self.folded_norms.values()} - self.tensors.keys():
            raise ValueError(f"a norm is folded into {min(others)}, which is not listed")
        return self

    @property
    def changed_tensors(self) -> set[str]:
        """Names of all tensors that a fused rotation changed."""
        return self.tensors.keys() | self.folded_norms.keys()

    @model_validator(mode="after")
    def _one_sign_per_channel(self) -> Self:
        if self.signs is not None and len(self.signs) != self.head_dim:
            raise ValueError(f"signs has {len(self.signs)} entries for head_dim {self.head_dim}")
        return self

    @model_validator(mode="after")
    def _engines_apply_plain_h(self) -> Self:
        if self.where == "online" and self.signs is not None:
            raise ValueError("signs must be null: engines apply H itself")
        return self


class Rotations(Block):
    """The rotations of K (and Q) and of V."""

    key: Rotation | None = Field(description="null for a latent cache, whose RoPE key stays")
    value: Rotation = Field(description="of V, or of the latent")

    @model_validator(mode="after")
    def _keys_are_rotated_online(self) -> Self:
        if self.key is not None and self.key.where != "online":
            raise ValueError("K cannot be fused: RoPE stands between W_K and the cache")
        return self

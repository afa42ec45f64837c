"""The refined encoder with its parts exchanged, to see what each is worth. Nothing is packed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvarn_cli.evaluation.attention import AttentionCall, attention_tap
from kvarn_cli.quantization.hadamard import hadamard_matrix, rotate
from kvarn_cli.quantization.methods import METHODS, KVarN, Method, parse_method
from kvarn_cli.quantization.refined_encoder import (
    RANGE_SHARES,
    Tokens,
    scale_tokens,
    unbiased_factor,
)
from kvarn_cli.quantization.rounding import RoundedRows, to_float16, to_stored
from kvarn_cli.quantization.tile_record import SCALE_DTYPES, QuantizedTiles, tile_scales
from kvarn_cli.quantization.variance_normalization import TileScales
from kvarn_cli.settings import EXACT_BITS, KVarNSettings

TokenFactor = Literal["unbiased", "one-sided", "norm", "least-squares", "none"]
Queries = Literal["none", "own", "other"]
QueryUse = Literal["none", "factor", "diagonal-factor", "codes"]

_SINK_TOKENS = 128
_DAMPING = 0.1


@dataclass(frozen=True, kw_only=True)
class Variant(KVarN):
    """The refined encoder with parts exchanged.

    Attributes:
        power: of the error that the range search minimises.
        key_shares: shares of K's row ranges that are tried, joined with `:`; empty for the
            encoder's own.
        value_shares: the same of V.
        sigmas: instead of a search, mean ± this many standard deviations, cut at the extremes;
            0 searches.
        key_factor: what a K token's scale is multiplied by; `one-sided` is unbiased, at least 1.
        value_factor: the same of a V token.
        refits: alternating least-squares refits of column scale, row scale and zero point, with
            new codes, before that.
        refit_columns: 0 leaves the column scale out of these.
        code_bits: bits of K and V codes where no record holds them; 0 for those of the preset.
        queries: whose second moment M = E[q qᵀ] is known: the window's own, or that of other text.
        query_use: what M weights in K: the inner products of the token factor (M or its diagonal),
            or the codes, where each channel's error is passed on to later ones as GPTQ does.
        moments: M of each layer, [kv_heads, head_dim, head_dim], in the rotated basis.
        moment: M of the layer at hand.
    """

    name: ClassVar[str] = "variant"

    encoder: Literal["reference", "refined"] = "refined"
    power: int = 3
    key_shares: str = ""
    value_shares: str = ""
    sigmas: float = 0.0
    key_factor: TokenFactor = "unbiased"
    value_factor: TokenFactor = "unbiased"
    refits: int = 0
    refit_columns: int = 1
    code_bits: int = 0
    queries: Queries = "none"
    query_use: QueryUse = "none"
    moments: Mapping[int, Tensor] | None = field(default=None, compare=False)
    moment: Tensor | None = field(default=None, compare=False)

    def for_layer(self, layer: int) -> Self:
        """See `Method.for_layer`."""
        return self if self.moments is None else replace(self, moment=self.moments[layer])

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`; V is rotated online."""
        hadamard = hadamard_matrix(keys.shape[-1])
        key_tiles, value_tiles = (
            rotate(states, hadamard).unflatten(-2, (-1, self.group_size))
            for states in (keys, values)
        )
        decoded_keys = self._keys(key_tiles.transpose(-1, -2)).transpose(-1, -2)
        decoded_values = self._values(value_tiles)
        return (
            rotate(decoded_keys.flatten(-3, -2), hadamard),
            rotate(decoded_values.flatten(-3, -2), hadamard),
        )

    def _keys(self, tiles: Tensor) -> Tensor:
        batch = tiles.flatten(0, -3)
        moment = None
        if self.moment is not None and self.query_use != "none":
            moment = self.moment[None, :, None].expand(*tiles.shape[:3], -1, -1).flatten(0, 2)
        in_codes = self.query_use == "codes"
        bits = self.code_bits or self.key_bits
        quantized = self._rounded(batch, bits, self.key_shares)
        if in_codes and moment is not None:
            quantized = _compensated(batch, quantized, bits, moment)
        if self.query_use == "diagonal-factor" and moment is not None:
            moment = moment.diagonal(dim1=-2, dim2=-1).diag_embed()
        weighting = None if in_codes else moment
        factor = _token_factor(batch, quantized.dequantize(), "columns", self.key_factor, weighting)
        return scale_tokens(quantized, factor, "columns").dequantize().reshape(tiles.shape)

    def _values(self, tiles: Tensor) -> Tensor:
        batch = tiles.flatten(0, -3)
        quantized = self._rounded(batch, self.code_bits or self.value_bits, self.value_shares)
        factor = _token_factor(batch, quantized.dequantize(), "rows", self.value_factor)
        return scale_tokens(quantized, factor, "rows").dequantize().reshape(tiles.shape)

    def _rounded(self, tiles: Tensor, bits: int, shares: str) -> QuantizedTiles:
        scales, dtype = tile_scales(tiles, self.settings), SCALE_DTYPES[self.layout]
        if self.sigmas:
            quantized = _within_sigmas(tiles, scales, bits, self.sigmas, dtype)
        else:
            tried = list(map(float, shares.split(":"))) if shares else RANGE_SHARES.get(bits)
            quantized = _searched(tiles, scales, bits, tried or RANGE_SHARES[2], self.power, dtype)
        for _ in range(self.refits):
            quantized = _refitted(tiles, quantized, bits, columns=bool(self.refit_columns))
        return quantized


@dataclass(frozen=True, kw_only=True)
class Probe(Method):
    """K or V of packed tokens shrunk, or with noise of the same size, to see what each does.

    Attributes:
        part: what is changed.
        kind: `shrink` multiplies by 1 − size; `noise` adds a random vector of length size · ‖x‖.
        size: relative error of each vector.
    """

    name: ClassVar[str] = "probe"

    part: Literal["keys", "values"] = "values"
    kind: Literal["shrink", "noise"] = "shrink"
    size: float = 0.2

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method.reconstruct`."""
        if self.part == "keys":
            return self._changed(keys), values
        return keys, self._changed(values)

    def bits_per_element(self, head_dim: int, num_kv_heads: int = 1) -> float:
        """Nothing is quantized."""
        return EXACT_BITS

    def _changed(self, states: Tensor) -> Tensor:
        if self.kind == "shrink":
            return states * (1 - self.size)
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        noise *= states.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        return states + self.size * noise


def parse_variant(spec: str, preset: KVarNSettings) -> Method:
    """`reference`, `refined` or `probe` with options, a method's own spec, or a `Variant`."""
    head, _, options = spec.partition(",")
    if head in ("reference", "refined"):
        named = f"kvarn:{preset.name},encoder={head}"
        return parse_method(f"{named},{options}" if options else named)
    if head.partition(":")[0] in METHODS:
        return parse_method(spec)
    if head == Probe.name:
        return Probe(**_values(Probe, options))
    own = {name: getattr(preset, name) for name in ("key_bits", "value_bits", "group_size")}
    return Variant(**own | _values(Variant, spec))


def _values(kind: type[Method], options: str) -> dict[str, Any]:
    kinds = {entry.name: type(entry.default) for entry in fields(kind)}
    given = dict(option.split("=") for option in options.split(","))
    return {name: kinds[name](text) for name, text in given.items()}


def query_moments(
    model: PreTrainedModel, windows: Tensor, covered: Collection[int]
) -> dict[int, Tensor]:
    """E[q qᵀ] of the queries behind the sink, by layer: [kv_heads, head_dim, head_dim], rotated."""
    sums: dict[int, Tensor] = {}

    def tap(call: AttentionCall) -> Tensor:
        if call.layer is not None and call.layer in covered:
            heads, head_dim = call.key.shape[1], call.key.shape[3]
            queries = rotate(call.query[0, :, _SINK_TOKENS:], hadamard_matrix(head_dim))
            grouped = queries.unflatten(0, (heads, -1)).flatten(1, 2)
            moment = grouped.transpose(1, 2) @ grouped / grouped.shape[1]
            sums[call.layer] = sums.get(call.layer, 0) + moment / len(windows)
        return call.attend(0, call.key.shape[2], call.key, call.value)

    with torch.inference_mode(), attention_tap(model, tap):
        for window in windows.split(1):
            model(input_ids=window, use_cache=False)
    return sums


def _searched(
    tiles: Tensor,
    scales: TileScales,
    bits: int,
    shares: list[float] | tuple[float, ...],
    power: int,
    dtype: torch.dtype,
) -> QuantizedTiles:
    levels = 2**bits - 1
    column = to_stored(scales.column, dtype)
    low, high = (tiles / (scales.row * scales.column)).aminmax(dim=-1, keepdim=True)
    candidates = [
        (
            (high - low) / levels * scales.row * share,
            (low + (1 - share) * (high - low) / 2) * scales.row,
        )
        for share in shares
    ]
    return _best(tiles / column.float(), column, candidates, bits, power)


def _within_sigmas(
    tiles: Tensor, scales: TileScales, bits: int, sigmas: float, dtype: torch.dtype
) -> QuantizedTiles:
    column = to_stored(scales.column, dtype)
    balanced = tiles / (scales.row * scales.column)
    low, high = balanced.aminmax(dim=-1, keepdim=True)
    mean, std = balanced.mean(-1, keepdim=True), balanced.std(-1, keepdim=True)
    low, high = torch.maximum(low, mean - sigmas * std), torch.minimum(high, mean + sigmas * std)
    candidate = ((high - low) / (2**bits - 1) * scales.row, low * scales.row)
    return _best(tiles / column.float(), column, [candidate], bits, 2)


def _best(
    balanced: Tensor,
    column: Tensor,
    candidates: list[tuple[Tensor, Tensor]],
    bits: int,
    power: int,
) -> QuantizedTiles:
    """The candidate of each row with the least error, no squared error above the first's."""
    least = allowed = best = None
    for exact_scale, exact_zero in candidates:
        rows = _coded(balanced, to_stored(exact_scale, column.dtype), to_float16(exact_zero), bits)
        error = (rows.dequantize() - balanced).abs()
        squares, measure = (error.pow(p).sum(-1, keepdim=True) for p in (2, power))
        if least is None or allowed is None or best is None:
            least, allowed, best = measure, squares, rows
            continue
        better = (measure < least) & (squares <= allowed)
        least = torch.where(better, measure, least)
        best = RoundedRows(
            torch.where(better, rows.codes, best.codes),
            torch.where(better, rows.scale, best.scale),
            torch.where(better, rows.zero_point, best.zero_point),
        )
    assert best is not None
    return QuantizedTiles(best, column)


def _coded(balanced: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> RoundedRows:
    steps = (balanced - zero_point) / scale.float().clamp_min(1e-12)
    return RoundedRows(steps.round().clamp(0, 2**bits - 1).to(torch.uint8), scale, zero_point)


def _refitted(
    tiles: Tensor, quantized: QuantizedTiles, bits: int, *, columns: bool
) -> QuantizedTiles:
    rows, column = quantized.rows, quantized.column_scale
    if columns:
        decoded = rows.dequantize()
        fitted = (decoded * tiles).sum(-2, keepdim=True)
        fitted /= decoded.square().sum(-2, keepdim=True).clamp_min(1e-9)
        column = torch.where(fitted > 0, to_stored(fitted, column.dtype), column)
    balanced, codes = tiles / column.float(), rows.codes.float()
    mean_code, mean = (x.mean(-1, keepdim=True) for x in (codes, balanced))
    centred = codes - mean_code
    slope = (centred * (balanced - mean)).sum(-1, keepdim=True)
    slope /= centred.square().sum(-1, keepdim=True).clamp_min(1e-9)
    scale = torch.where(slope > 0, to_stored(slope, rows.scale.dtype), rows.scale)
    zero_point = to_float16(mean - scale.float() * mean_code)
    return QuantizedTiles(_coded(balanced, scale, zero_point, bits), column)


def _compensated(
    tiles: Tensor, quantized: QuantizedTiles, bits: int, moment: Tensor
) -> QuantizedTiles:
    """Codes channel by channel, each error passed on through the inverse of M (GPTQ)."""
    size = moment.shape[-1]
    damping = _DAMPING * moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    inverse = torch.linalg.inv(moment + damping * torch.eye(size))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left, rows = tiles / quantized.column_scale.float(), quantized.rows
    codes = torch.empty_like(rows.codes)
    for channel in range(size):
        at = slice(channel, channel + 1)
        own = _coded(left[:, at], rows.scale[:, at], rows.zero_point[:, at], bits)
        codes[:, at] = own.codes
        error = (left[:, at] - own.dequantize()) / upper[:, at, at]
        left[:, channel + 1 :] -= upper[:, at, channel + 1 :].transpose(1, 2) * error
    return QuantizedTiles(RoundedRows(codes, rows.scale, rows.zero_point), quantized.column_scale)


def _token_factor(
    tiles: Tensor,
    decoded: Tensor,
    tokens: Tokens,
    correction: TokenFactor,
    moment: Tensor | None = None,
) -> Tensor:
    channels = -1 if tokens == "rows" else -2
    if moment is not None:
        weighted = moment @ tiles
        power, product = ((x * weighted).sum(-2, keepdim=True) for x in (tiles, decoded))
        length = (decoded * (moment @ decoded)).sum(-2, keepdim=True)
        return torch.where(product > 0.5 * (power * length).sqrt(), power / product, 1)
    unbiased = unbiased_factor(tiles, decoded, tokens)
    cosine = torch.cosine_similarity(tiles, decoded, dim=channels).unsqueeze(channels)
    return {
        "unbiased": unbiased,
        "one-sided": unbiased.clamp_min(1),
        "norm": unbiased * cosine,
        "least-squares": unbiased * cosine.square(),
        "none": torch.ones_like(unbiased),
    }[correction]

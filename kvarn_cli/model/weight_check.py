"""Check on the real weights that fused V and O still compute what the original ones did.

For each query head q, reading KV head h, and a block X of seeded Gaussian probes,

    W_O'[:, q] (W_V'[h] X) = W_O[:, q] (W_V[h] X)        W_O'[:, q] b_V'[h] = W_O[:, q] b_V[h]

must hold up to the rounding of the stored dtype. R does not occur in these equations, so a wrong
R, a wrong head order, a transposed R or a forgotten tensor cannot excuse itself. The bias has its
own equation, because next to large weights a small bias would drown in their rounding.

**How much is rounding?** A stored fused entry w carries an error of at most e(w), see
`rounding_error`; u is the unit roundoff of the stored dtype and u' that of the arithmetic. Let the
errors be independent, with e(w) for their standard deviation; rounding really has at most
u |w| / √3. Then the difference of the two sides, squared and summed over rows k and probes c, is
expected at

    T² = Σ_i ‖W_O'[:, i]‖² Σ_jc e(W_V'[i, j])² X[j, c]²  +  Σ_i Σ_k e(W_O'[k, i])² Σ_c V'[i, c]²

and 4 T is allowed. T scales with the weights, so small heads are held to the same standard as
large ones, and it does not depend on hidden_size. Right fusions of random weights use a ninth of
what is allowed in float16 and bfloat16 at any width, those of constant, rank-1, heavy-tailed and
outlier-ridden ones about a third at most.

**Can a wrong fusion pass?** A wrong one mixes V's channels differently on the two sides. Its
difference is about √2 G, with G² = Σ_i ‖W_O'[:, i]‖² Σ_c V'[i, c]², even where the true output
cancels. T is about √2 u G (√2 d u' G in float32), so a wrong fusion exceeds 4 T some 60 times in
bfloat16, 500 times in float16 and 8,000 times in float32. The smallest mistake, one channel with
a wrong sign, makes 2 G / √d, still several times 4 T. Only where float16's subnormals make T
large against G could the check not tell right from wrong; such a layer is refused, since rounding
would damage it in any case.

Of an MLA model the latent stands in V's place as the only head, and what reads it in W_O's, its
columns multiplied by what the norm between them multiplies by: by g before the fusion, by 1 after
it. What the norm divides by is one number a token, the same before and after, and left out.

All of this is made of sums over the rows of V and over those of O, so both are read in blocks
(`head_blocks`) and nothing but the sums is kept: a few numbers for each channel of a head.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.fusion import TensorRotation, tensor_rotations
from kvarn_cli.model.head_blocks import HeadBlock, RowReader, head_blocks
from kvarn_cli.model.layout import ONLINE_HINT, AttentionLayer, HeadSlices, ModelLayout
from kvarn_cli.model.rounding_error import rounding_error
from kvarn_cli.model.torch_threads import one_thread_per_operation
from kvarn_cli.progress import Report, silent

ALLOWED_ROUNDING = 4.0
LARGEST_ROUNDING = 0.02

_STAGE = "checking the weights"
_MOST_LAYERS_AT_ONCE = 4
_NUM_PROBES = 16
_SEED = 20_260_603


@dataclass(frozen=True)
class WeightCheck:
    """What the fusion changed on the real weights.

    Attributes:
        largest_change: largest relative change of a layer's output, ‖Y' − Y‖ / ‖Y‖ with
            Y = Σ_q W_O[:, q] (W_V[h] X + b_V[h]): the attention block's output, before b_O, for
            a token that attends to itself alone.
        layer: the layer where it occurs.
        warnings: heads that are all zero and so could not be checked.
    """

    largest_change: float
    layer: int
    warnings: tuple[str, ...]


def check_weights(
    layout: ModelLayout,
    read: RowReader,
    rotations: Mapping[str, TensorRotation] | None = None,
    *,
    report: Report = silent,
) -> WeightCheck:
    """Compare V and O before and after the fusion, layer by layer.

    Args:
        layout: where V and O live.
        read: the original tensors.
        rotations: what the fusion makes of each tensor; default: `tensor_rotations`.
        report: told after each layer.

    Raises:
        UnsupportedModelError: a head's output changed by more than rounding explains, or
            rounding alone is too coarse for a layer's weights; the message names the layer.
    """
    if rotations is None:
        rotations = tensor_rotations(layout, read=lambda name: torch.cat([*read(name)]))
    checks = []
    report(_STAGE, 0, len(layout.layers))
    at_once = min(os.cpu_count() or 1, _MOST_LAYERS_AT_ONCE)
    with one_thread_per_operation(), ThreadPoolExecutor(at_once) as pool:
        for check in pool.map(lambda layer: _check_layer(layer, read, rotations), layout.layers):
            checks.append(check)
            report(_STAGE, len(checks), len(layout.layers))
    worst = max(checks, key=lambda check: check.largest_change)
    return WeightCheck(
        largest_change=worst.largest_change,
        layer=worst.layer,
        warnings=tuple(warning for check in checks for warning in check.warnings),
    )


@dataclass(frozen=True)
class _Values:
    """V's heads for some probes.

    Attributes:
        before: V, [num_kv_heads, head_dim, probes].
        after: V', the same shape.
        error: summed squares of the rounding errors of V', [num_kv_heads, head_dim].
        alive: whether any weight of a head is not zero, [num_kv_heads].
    """

    before: Tensor
    after: Tensor
    error: Tensor
    alive: Tensor


def _values(blocks: Iterable[HeadBlock], part: HeadSlices, *, is_bias: bool) -> _Values:
    """V for the probes through the weight alone, or what the bias adds to it."""
    heads, probes = len(part.starts), 1 if is_bias else _NUM_PROBES
    before, after = torch.zeros(2, heads, part.head_dim, probes, dtype=torch.float64)
    error = torch.zeros(heads, part.head_dim, dtype=torch.float64)
    alive = torch.zeros(heads, dtype=torch.bool)
    for block in blocks:
        seen = _probes(block) if not is_bias else torch.ones(1, 1, dtype=torch.float64)
        before[block.heads] += block.before.double().mT @ seen
        after[block.heads] += block.after.double().mT @ seen
        squares = rounding_error(block.after, block.before.dtype).square_()
        error[block.heads] += (squares * seen.square().sum(1)[:, None]).sum(1)
        alive[block.heads] |= block.before.abs().amax((1, 2)) > 0
    return _Values(before, after, error, alive)


def _probes(block: HeadBlock) -> Tensor:
    """The probes' entries that meet a block of V: [other axis, probes]; equal for equal places."""
    generator = torch.Generator().manual_seed(_SEED + block.first)
    shape = (block.before.shape[1], _NUM_PROBES)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class _Outputs:
    """What a layer's query heads make of V and V'.

    Attributes:
        distance: ‖W_O'[:, q] V' − W_O[:, q] V‖, for the weight and for the bias of V,
            [parts of V, num_heads].
        weight: summed squares of W_O', [num_heads, head_dim].
        error: summed squares of the rounding errors of W_O', [num_heads, head_dim].
        alive: whether any entry of a head in W_O is not zero, [num_heads].
        size: ‖Y‖ of all heads together.
        change: ‖Y' − Y‖.
        dtype: of the stored W_O'.
    """

    distance: Tensor
    weight: Tensor
    error: Tensor
    alive: Tensor
    size: float
    change: float
    dtype: torch.dtype


def _outputs(
    blocks: Iterable[HeadBlock],
    part: HeadSlices,
    values: list[_Values],
    kv_heads: Tensor,
    gains: tuple[Tensor, Tensor] | None,
) -> _Outputs:
    heads = len(part.starts)
    weight, error = torch.zeros(2, heads, part.head_dim, dtype=torch.float64)
    distance = torch.zeros(len(values), heads, dtype=torch.float64)
    alive = torch.zeros(heads, dtype=torch.bool)
    output: dict[int, Tensor] = {}
    change: dict[int, Tensor] = {}
    for block in blocks:
        old_weight, new_weight = block.before.double(), block.after.double()
        if gains is not None:
            old_weight, new_weight = old_weight * gains[0], new_weight * gains[1]
        weight[block.heads] += new_weight.square().sum(1)
        error[block.heads] += rounding_error(block.after, block.before.dtype).square_().sum(1)
        alive[block.heads] |= block.before.abs().amax((1, 2)) > 0
        for squares, value in zip(distance, values, strict=True):
            read = kv_heads[block.heads]
            old = old_weight @ value.before[read]
            difference = new_weight @ value.after[read] - old
            squares[block.heads] += difference.square().sum((1, 2))
            for sums, part_of_sum in ((output, old), (change, difference)):
                sums[block.first] = sums.get(block.first, torch.zeros(1)) + part_of_sum.sum(0)
        dtype = block.after.dtype
    size, changed = (
        sum(float(rows.square().sum()) for rows in sums.values()) ** 0.5
        for sums in (output, change)
    )
    return _Outputs(distance.sqrt(), weight, error, alive, size, changed, dtype)


def _gains(
    layer: AttentionLayer, read: RowReader, rotations: Mapping[str, TensorRotation]
) -> tuple[Tensor, Tensor] | None:
    """What the norm multiplies the latent's channels by, before and after the fusion."""
    if layer.norm is None:
        return None
    weight = torch.cat([*read(layer.norm.tensor)])
    return layer.norm.gain(weight), layer.norm.gain(rotations[layer.norm.tensor](weight))


def _check_layer(
    layer: AttentionLayer, read: RowReader, rotations: Mapping[str, TensorRotation]
) -> WeightCheck:
    values = [
        _values(head_blocks(part, read, rotations), part, is_bias=index > 0)
        for index, part in enumerate(layer.value)
    ]
    kv_heads = torch.arange(layer.num_heads) // (layer.num_heads // layer.num_kv_heads)
    blocks = head_blocks(layer.output, read, rotations)
    gains = _gains(layer, read, rotations)
    outputs = _outputs(blocks, layer.output, values, kv_heads, gains)
    energies = [value.after.square().sum(2)[kv_heads] for value in values]
    rounding = torch.stack(
        [
            (outputs.weight * value.error[kv_heads] + outputs.error * energy).sum(1)
            for value, energy in zip(values, energies, strict=True)
        ]
    )
    allowed = ALLOWED_ROUNDING * rounding.sqrt()
    for part, head in (~(outputs.distance <= allowed)).nonzero().tolist():
        raise UnsupportedModelError(
            f"layer {layer.index}: fusing {layer.rotated} would change the output of query head "
            f"{head} by {outputs.distance[part, head]:.2e}; rounding explains "
            f"{allowed[part, head]:.2e}",
            hint=ONLINE_HINT,
        )
    size_squared = sum(float((outputs.weight * energy).sum()) for energy in energies)
    alive = (values[0].alive[kv_heads] & outputs.alive).any()
    if alive and rounding.sum() > LARGEST_ROUNDING**2 * size_squared:
        raise UnsupportedModelError(
            f"layer {layer.index}: {layer.rotated} and what reads it are so small that rounding to "
            f"{outputs.dtype} would change the layer's output",
            hint=f"pass --dtype bfloat16, or {ONLINE_HINT}",
        )
    return WeightCheck(
        largest_change=outputs.change / outputs.size if outputs.size else 0.0,
        layer=layer.index,
        warnings=(
            *_dead("V of KV head", values[0].alive, layer),
            *_dead("W_O of query head", outputs.alive, layer),
        ),
    )


def _dead(what: str, alive: Tensor, layer: AttentionLayer) -> Iterator[str]:
    for head in (~alive).nonzero().flatten().tolist():
        yield f"layer {layer.index}: {what} {head} is all zero"

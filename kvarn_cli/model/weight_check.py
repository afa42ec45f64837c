"""Check on the real weights that fused V and O still compute what the original ones did.

For each query head q, reading KV head h, and a block X of seeded Gaussian probes,

    W_O'[:, q] (W_V'[h] X) = W_O[:, q] (W_V[h] X)        W_O'[:, q] b_V'[h] = W_O[:, q] b_V[h]

must hold up to the rounding of the stored dtype. R does not occur in these equations, so a wrong
R, a wrong head order, a transposed R or a forgotten tensor cannot excuse itself. The bias has its
own equation, because next to large weights a small bias would drown in their rounding.

**How much is rounding?** A stored fused entry w carries an error of at most

    e(w) = u |w| + η + d u' r

u is the unit roundoff of the stored dtype (2⁻⁸ bfloat16, 2⁻¹¹ float16, 2⁻²⁴ float32) and η half
its smallest subnormal. The last term is the arithmetic's: u' is its unit roundoff (2⁻²⁴, or 2⁻⁵³
for float64 weights), d the head's width, r the root mean square of the d entries that the
rotation mixed into w. Let the errors be independent, with e(w) for their standard deviation;
rounding really has at most u |w| / √3. Then the difference of the two sides, squared and summed
over rows k and probes c, is expected at

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
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn_cli.errors import UnsupportedModelError
from kvarn_cli.model.fusion import take_heads, tensor_rotations
from kvarn_cli.model.layout import ONLINE_HINT, AttentionLayer, ModelLayout
from kvarn_cli.progress import Report, silent

ALLOWED_ROUNDING = 4.0
LARGEST_ROUNDING = 0.02

_STAGE = "checking the weights"
_NUM_PROBES = 16
_SEED = 20_260_603


TensorReader = Callable[[str], Tensor]


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
    read: TensorReader,
    read_fused: TensorReader | None = None,
    *,
    report: Report = silent,
) -> WeightCheck:
    """Compare V and O before and after the fusion, layer by layer.

    Args:
        layout: where V and O live.
        read: from a tensor's name to the original tensor.
        read_fused: the same for the fused tensor, for example from the written checkpoint;
            default: what `tensor_rotations` makes of the original.
        report: told after each layer.

    Raises:
        UnsupportedModelError: a head's output changed by more than rounding explains, or
            rounding alone is too coarse for a layer's weights; the message names the layer.
    """
    if read_fused is None:
        read_fused = _fused_reader(layout, read)
    checks = []
    report(_STAGE, 0, len(layout.layers))
    for layer in layout.layers:
        checks.append(_check_layer(layer, read, read_fused))
        report(_STAGE, len(checks), len(layout.layers))
    worst = max(checks, key=lambda check: check.largest_change)
    return WeightCheck(
        largest_change=worst.largest_change,
        layer=worst.layer,
        warnings=tuple(warning for check in checks for warning in check.warnings),
    )


@dataclass(frozen=True)
class _Head:
    """One query head and the KV head it reads, in the stored dtype.

    Attributes:
        value_weight: W_V[h], [head_dim, hidden_size].
        value_bias: b_V[h], [head_dim, 1], or None.
        output_weight: W_O[:, q], [hidden_size, head_dim].
    """

    value_weight: Tensor
    value_bias: Tensor | None
    output_weight: Tensor


def _fused_reader(layout: ModelLayout, read: TensorReader) -> TensorReader:
    rotations = tensor_rotations(layout)
    return lambda name: rotations[name](read(name))


def _heads(layer: AttentionLayer, read: TensorReader) -> Iterator[_Head]:
    values = [take_heads(read(heads.tensor), heads) for heads in layer.value]
    output_weight = take_heads(read(layer.output.tensor), layer.output)
    group = layer.num_heads // layer.num_kv_heads
    for query_head in range(layer.num_heads):
        weight, *bias = (value[query_head // group] for value in values)
        yield _Head(weight.T, bias[0][:, None] if bias else None, output_weight[query_head])


def _check_layer(
    layer: AttentionLayer, read: TensorReader, read_fused: TensorReader
) -> WeightCheck:
    output = change = torch.zeros(1, dtype=torch.float64)
    rounding_squared = size_squared = 0.0
    alive = False
    warnings: dict[str, None] = {}
    heads = zip(_heads(layer, read), _heads(layer, read_fused), strict=True)
    for query_head, (head, fused) in enumerate(heads):
        warnings |= dict.fromkeys(_dead_parts(layer, query_head, head))
        old_output_weight = head.output_weight.double()
        new_output_weight = fused.output_weight.double()
        column_size = new_output_weight.square().sum(0)
        column_error = _rounding_error(fused.output_weight, dim=1).square().sum(0)
        for before, after, error in _value_pairs(head, fused):
            old = old_output_weight @ before
            difference = new_output_weight @ after - old
            energy = after.square().sum(1)
            rounding = float(column_size @ error + column_error @ energy)
            distance, allowed = float(difference.norm()), ALLOWED_ROUNDING * rounding**0.5
            if not distance <= allowed:
                raise UnsupportedModelError(
                    f"layer {layer.index}: fusing V would change the output of query head "
                    f"{query_head} by {distance:.2e}; rounding explains {allowed:.2e}",
                    hint=ONLINE_HINT,
                )
            rounding_squared += rounding
            size_squared += float(column_size @ energy)
            alive = alive or bool(before.any() and old_output_weight.any())
            output = output + old
            change = change + difference
    if alive and rounding_squared > LARGEST_ROUNDING**2 * size_squared:
        raise UnsupportedModelError(
            f"layer {layer.index}: V and W_O are so small that rounding them to "
            f"{head.output_weight.dtype} would change the layer's output",
            hint=f"pass --dtype bfloat16, or {ONLINE_HINT}",
        )
    size = float(output.norm())
    return WeightCheck(
        largest_change=float(change.norm()) / size if size else 0.0,
        layer=layer.index,
        warnings=tuple(warnings),
    )


def _value_pairs(head: _Head, fused: _Head) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """V before and after, [head_dim, probes], and the summed squares of its rounding errors.

    First for the probes through the weights alone, then for the bias, if there is one.
    """
    generator = torch.Generator().manual_seed(_SEED)
    probes = torch.randn(
        head.value_weight.shape[1], _NUM_PROBES, generator=generator, dtype=torch.float64
    ).to(head.value_weight.device)
    error = _rounding_error(fused.value_weight, dim=0).square() @ probes.square().sum(1)
    yield head.value_weight.double() @ probes, fused.value_weight.double() @ probes, error
    if head.value_bias is not None and fused.value_bias is not None:
        error = _rounding_error(fused.value_bias, dim=0).square().sum(1)
        yield head.value_bias.double(), fused.value_bias.double(), error


def _rounding_error(weight: Tensor, dim: int) -> Tensor:
    """e(w) of each entry of a fused weight whose dimension `dim` was rotated; float64."""
    stored = torch.finfo(weight.dtype)
    arithmetic = torch.finfo(torch.promote_types(weight.dtype, torch.float32))
    weight = weight.double()
    spread = weight.square().mean(dim, keepdim=True).sqrt()
    return (
        stored.eps / 2 * weight.abs()
        + stored.smallest_normal * stored.eps / 2
        + weight.shape[dim] * arithmetic.eps / 2 * spread
    )


def _dead_parts(layer: AttentionLayer, query_head: int, head: _Head) -> Iterator[str]:
    if not head.value_weight.any():
        kv_head = query_head * layer.num_kv_heads // layer.num_heads
        yield f"layer {layer.index}: V of KV head {kv_head} is all zero"
    if not head.output_weight.any():
        yield f"layer {layer.index}: W_O of query head {query_head} is all zero"

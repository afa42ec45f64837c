"""How much of a fused entry is rounding, at most.

A stored entry w that a rotation made carries an error of at most

    e(w) = u |w| + η + d u' r

u is the unit roundoff of the stored dtype (2⁻⁸ bfloat16, 2⁻¹¹ float16, 2⁻²⁴ float32) and η half
its smallest subnormal. The last term is the arithmetic's: u' is its unit roundoff (2⁻²⁴, or 2⁻⁵³
for float64 weights), d the head's width, r the root mean square of the d entries that the
rotation mixed into w.
"""

import torch
from torch import Tensor


def rounding_error(stored: Tensor, original: torch.dtype) -> Tensor:
    """e(w) of each entry of heads' channels that were rotated.

    Args:
        stored: [..., head_dim], in the dtype that they were rounded to.
        original: dtype of what was rotated, in float32 or better.

    Returns:
        float64, the same shape.
    """
    rounded = torch.finfo(stored.dtype)
    arithmetic = torch.finfo(torch.promote_types(original, torch.float32))
    vectors = stored.double()
    width = vectors.shape[-1]
    spread = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) / width**0.5
    absolute = rounded.smallest_normal * rounded.eps / 2 + width * arithmetic.eps / 2 * spread
    return vectors.abs().mul_(rounded.eps / 2).add_(absolute)

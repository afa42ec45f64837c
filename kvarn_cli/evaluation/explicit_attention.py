"""Attention with what transformers' sdpa function leaves out: capped scores and attention sinks."""

import torch
from torch import Tensor

EXPLICIT_OPTIONS = ("softcap", "s_aux")
"""Keyword arguments of an attention call that need `explicit_attention`."""

_BLOCK = 512


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attend, some hundred queries at a time so that the scores stay small.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, seen, head_dim].
        value: the same shape.
        mask: bool, what may be attended to, or floats to add to the scores;
            [batch, 1, tokens, seen].
        scaling: of the scores; None means 1/√head_dim.
        softcap: c to cap scores s with as c · tanh(s / c), before the mask; None leaves them.
        s_aux: for each head the score of a sink that takes probability and gives nothing, [heads].

    Returns:
        [batch, tokens, heads, head_dim], in the dtype of the query.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    outputs = []
    for rows, allowed in zip(query.split(_BLOCK, dim=2), mask.split(_BLOCK, dim=2), strict=True):
        scores = (rows @ keys.transpose(-1, -2)).to(dtype) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if allowed.dtype == torch.bool:
            scores = scores.masked_fill(~allowed, torch.finfo(dtype).min)
        else:
            scores = scores + allowed
        if s_aux is not None:
            sinks = s_aux.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
        outputs.append(weights.to(value.dtype) @ values)
    return torch.cat(outputs, dim=2).transpose(1, 2)

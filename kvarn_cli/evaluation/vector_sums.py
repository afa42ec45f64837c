"""Errors of K or V vectors over windows, layers and heads, as means and a capped sample."""

import math

import torch
from torch import Tensor

from kvarn_cli.evaluation.error_report import Distribution, VectorErrorSummary, WorstTokens
from kvarn_cli.evaluation.samples import Sample
from kvarn_cli.evaluation.vector_errors import VectorErrors

WORST_SHARES = (0.01, 0.05, 0.1)
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)

_DISTRIBUTION_SAMPLES = 1 << 17
_DRAWN_SAMPLES = 400
_TINY = torch.finfo(torch.float32).tiny


class VectorSums:
    """Folds the errors of packed vectors.

    The worst tokens are those with the largest ‖x − x̂‖² within one window, layer and KV head
    (heads differ too much in scale to be ranked together); all means weigh heads alike.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros((), dtype=torch.float64)
        self._num_heads = 0
        self._sample = Sample(_DISTRIBUTION_SAMPLES)

    def add(self, layers: dict[int, VectorErrors]) -> None:
        """Fold one window in; layer → errors [..., kv_heads, tokens]."""
        for errors in layers.values():
            if not errors.squared_norm.shape[-1]:
                continue
            means = _head_means(errors)
            self._sums = self._sums + means.sum(1)
            self._num_heads += means.shape[1]
            relative = torch.stack((errors.magnitude, errors.direction), -1)
            relative = relative / errors.squared_norm.clamp(min=_TINY)[..., None]
            self._sample.add(relative.flatten(0, -2).cpu())

    def summary(self) -> VectorErrorSummary | None:
        """None where nothing was packed."""
        if not self._num_heads:
            return None
        magnitude, direction, share, *worst = (self._sums / self._num_heads).tolist()
        sample = self._sample.values().double()
        quantiles = torch.quantile(sample, torch.tensor(QUANTILES).double(), dim=0)
        drawn = sample[:: math.ceil(len(sample) / _DRAWN_SAMPLES)]
        return VectorErrorSummary(
            magnitude=magnitude,
            direction=direction,
            magnitude_share=share,
            worst=tuple(
                WorstTokens(share=worst_share, total_share=total, magnitude_share=own)
                for worst_share, total, own in zip(
                    WORST_SHARES, worst[::2], worst[1::2], strict=True
                )
            ),
            distribution=Distribution(
                quantiles=QUANTILES,
                magnitude=tuple(quantiles[:, 0].tolist()),
                direction=tuple(quantiles[:, 1].tolist()),
            ),
            sample=tuple((m, d) for m, d in drawn.tolist()),
        )


def _head_means(errors: VectorErrors) -> Tensor:
    """Means of each head, float64 [numbers, heads], in the order that `summary` reads them."""
    norms, total = errors.squared_norm.clamp(min=_TINY), errors.total
    magnitude_share = errors.magnitude / total.clamp(min=_TINY)
    rows = [
        (errors.magnitude / norms).mean(-1),
        (errors.direction / norms).mean(-1),
        magnitude_share.mean(-1),
    ]
    order = total.sort(-1, descending=True)
    whole = total.sum(-1).clamp(min=_TINY)
    for share in WORST_SHARES:
        count = math.ceil(share * total.shape[-1])
        worst = order.indices[..., :count]
        rows.append(order.values[..., :count].sum(-1) / whole)
        rows.append(magnitude_share.gather(-1, worst).mean(-1))
    return torch.stack(rows).flatten(1).cpu().double()

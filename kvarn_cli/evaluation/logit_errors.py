"""How far the predictions of a quantized run are from the exact ones."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class LogitErrors:
    """One entry per predicted token, [tokens - 1].

    Attributes:
        kl: KL(exact ‖ method) of the next-token distributions, nats.
        agreement: whether both rank the same token first.
        loss_exact: next-token loss of the exact run, nats.
        loss_method: of the quantized run.
        hit_exact: whether the exact run ranks the true next token first.
        hit_method: whether the quantized run does.
    """

    kl: Tensor
    agreement: Tensor
    loss_exact: Tensor
    loss_method: Tensor
    hit_exact: Tensor
    hit_method: Tensor


@torch.inference_mode()
def compare_logits(exact: Tensor, method: Tensor, tokens: Tensor) -> LogitErrors:
    """Compare two runs of the same tokens; each position predicts the next token.

    All positions count, those before the first packed tile as well; the last one, whose next
    token is unknown, does not.

    Args:
        exact: logits [tokens, vocabulary], any float dtype; computed in float32 or better.
        method: the same shape.
        tokens: int64 [tokens].
    """
    dtype = torch.promote_types(exact.dtype, torch.float32)
    chunks = []
    for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        rows = slice(start, min(start + _CHUNK_TOKENS, len(tokens) - 1))
        targets = tokens[rows.start + 1 : rows.stop + 1, None]
        log_p, log_q = (log_softmax(logits[rows].to(dtype), dim=-1) for logits in (exact, method))
        first_p, first_q = log_p.argmax(-1), log_q.argmax(-1)
        chunks.append(
            (
                (log_p.exp() * (log_p - log_q)).sum(-1),
                first_p == first_q,
                -log_p.gather(-1, targets)[:, 0],
                -log_q.gather(-1, targets)[:, 0],
                first_p == targets[:, 0],
                first_q == targets[:, 0],
            )
        )
    return LogitErrors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

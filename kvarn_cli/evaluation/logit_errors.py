"""How far the predictions of a quantized run are from the exact ones."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class LogitErrors:
    """One entry per predicted token, [tokens - 1].

    Attributes:
        kl: KL(exact ‖ method) of the next-token distributions, nats.
        agreement: whether both rank the same token first.
        loss_exact: next-token loss of the exact run, nats.
        loss_method: of the quantized run.
    """

    kl: Tensor
    agreement: Tensor
    loss_exact: Tensor
    loss_method: Tensor


@torch.inference_mode()
def compare_logits(exact: Tensor, method: Tensor, tokens: Tensor) -> LogitErrors:
    """Compare two runs of the same tokens; each position predicts the next token.

    All positions count, those before the first packed tile as well; the last one, whose next
    token is unknown, does not. Memory is that of a few rows: what a chunk of rows leaves behind is
    written into tensors made beforehand, since small tensors between large freed ones would keep
    the heap from shrinking.

    Args:
        exact: logits [tokens, vocabulary], any float dtype; computed in float32 or better.
        method: the same shape.
        tokens: int64 [tokens].
    """
    dtype = torch.promote_types(exact.dtype, torch.float32)
    count = len(tokens) - 1
    targets = tokens[1:, None]
    kl, loss_exact, loss_method = (exact.new_empty(count, dtype=dtype) for _ in range(3))
    first_exact, first_method = (tokens.new_empty(count) for _ in range(2))
    for start in range(0, count, _CHUNK_TOKENS):
        rows = slice(start, min(start + _CHUNK_TOKENS, count))
        log_p, log_q = (log_softmax(logits[rows], -1, dtype=dtype) for logits in (exact, method))
        first_exact[rows], first_method[rows] = log_p.argmax(-1), log_q.argmax(-1)
        loss_exact[rows] = -log_p.gather(-1, targets[rows])[:, 0]
        loss_method[rows] = -log_q.gather(-1, targets[rows])[:, 0]
        torch.sub(log_p, log_q, out=log_q)
        kl[rows] = log_q.mul_(log_p.exp_()).sum(-1).clamp(min=0)  # float noise may be below
    return LogitErrors(
        kl=kl,
        agreement=first_exact == first_method,
        loss_exact=loss_exact,
        loss_method=loss_method,
    )

import math

import pytest
import torch

from kvarn_cli.evaluation.logit_errors import compare_logits


def _softmax(row: list[float]) -> list[float]:
    weights = [math.exp(value - max(row)) for value in row]
    return [weight / sum(weights) for weight in weights]


def test_every_prediction_is_compared_as_its_definition_says() -> None:
    generator = torch.Generator().manual_seed(0)
    exact, method = (3 * torch.randn(150, 11, generator=generator) for _ in range(2))
    tokens = torch.randint(11, (150,), generator=generator)
    errors = compare_logits(exact, method, tokens)
    assert len(errors.kl) == len(errors.agreement) == len(errors.loss_exact) == 149
    for position in range(149):
        p, q = _softmax(exact[position].tolist()), _softmax(method[position].tolist())
        target = tokens[position + 1].item()
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert errors.kl[position].item() == pytest.approx(kl, abs=1e-5)
        assert errors.agreement[position].item() == (p.index(max(p)) == q.index(max(q)))
        assert errors.loss_exact[position].item() == pytest.approx(-math.log(p[target]), abs=1e-5)
        assert errors.loss_method[position].item() == pytest.approx(-math.log(q[target]), abs=1e-5)


def test_equal_logits_have_no_error_at_all() -> None:
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = compare_logits(logits, logits.clone(), torch.arange(70))
    assert errors.kl.dtype == torch.float32
    assert errors.kl.abs().max() == 0
    assert errors.agreement.all()
    assert torch.equal(errors.loss_exact, errors.loss_method)

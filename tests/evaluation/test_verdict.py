import pytest
from error_reports import tiny_report

from kvarn_cli.evaluation.error_report import ErrorReport, MethodResult, OracleKL
from kvarn_cli.evaluation.verdict import thresholds, verdict


def _result(
    name: str,
    *,
    by_layer: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    top1: float = 0.99,
    kl: float = 0.01,
    loss: float = 2.0,
    static: float = 1.0,
    accumulated: float = 1.0,
    bits: float = 2.5,
) -> MethodResult:
    base = tiny_report().results[2]
    errors = base.attention.accumulated.model_copy(
        update={"by_layer": by_layer, "layers": tuple(range(len(by_layer)))}
    )
    attention = base.attention.model_copy(
        update={
            "static": errors.model_copy(update={"mae": static}),
            "accumulated": errors.model_copy(update={"mae": accumulated}),
        }
    )
    logits = base.logits.model_copy(
        update={
            "top1": top1,
            "loss": loss,
            "loss_exact": 2.0,
            "kl": base.logits.kl.model_copy(update={"mean": kl}),
        }
    )
    return base.model_copy(
        update={
            "method": name,
            "logits": logits,
            "attention": attention,
            "packed_bits_per_element": bits,
            "oracle": None,
        }
    )


def _report(*results: MethodResult) -> ErrorReport:
    return tiny_report().model_copy(update={"results": results})


def test_a_method_within_all_thresholds_keeps_the_choices() -> None:
    assert verdict(_report(_result("a", top1=0.978))) == [
        "a keeps 97.8% of top-1 choices at 300 tokens."
    ]


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"top1": 0.88}, "top-1 below 90%"),
        ({"kl": 0.06}, "KL 0.060 above 0.05"),
        ({"loss": 2.07}, "loss +0.070 above 0.05"),
    ],
)
def test_every_missed_threshold_is_named(measured: dict[str, float], reason: str) -> None:
    [sentence] = verdict(_report(_result("a", **measured)))
    assert "does not keep the model's choices" in sentence
    assert reason in sentence


@pytest.mark.parametrize(
    ("by_layer", "words"),
    [
        ((9, 1, 1, 1, 1, 1), "layer 0 carries most of the error."),
        ((5, 1, 1, 1, 1, 4), "layers 0 and 5 carry most of the error."),
        ((1, 3, 3, 3, 3, *[1] * 11), "layers 1, 2, 3 and 4 carry most of the error."),
        (
            (1, 3, 3, 3, 3, *[1] * 12),
            "the error is spread, 5 of 17 layers hold half of it; layers 2, 3 and 4 carry 36%.",
        ),
        ((3, 1, 1), "layer 0 carries most of the error."),
        ((1, 1, 1), "spread, 2 of 3 layers hold half of it; layers 0, 1 and 2 carry 100%."),
        ((1, 1), "layer 1 carries most of the error."),
        ((1,), "spread, 1 of 1 layers hold half of it; layer 0 carries 100%."),
    ],
)
def test_layers_are_named_when_few_of_them_hold_half_the_error(
    by_layer: tuple[float, ...], words: str
) -> None:
    [sentence] = verdict(_report(_result("a", kl=1.0, by_layer=by_layer)))
    assert words in sentence


def test_the_static_view_is_compared_among_the_methods_with_the_fewest_bits() -> None:
    sentences = verdict(
        _report(
            _result("a", accumulated=2.0),
            _result("b", static=1.1, accumulated=4.0),
            _result("c", static=9.0, accumulated=9.0, bits=4),
        )
    )
    assert sentences[-1] == (
        "The attention error of b is 1.10 times that of a when each layer is judged alone "
        "(static), 2.00 times when errors accumulate."
    )


def test_what_an_oracle_saves_is_stated() -> None:
    oracle = (
        OracleKL(restored="worst", share=0.05, kl_mean=0.03),
        OracleKL(restored="others", share=0.05, kl_mean=0.01),
    )
    result = _result("a", kl=0.04).model_copy(update={"oracle": oracle})
    assert verdict(_report(result))[-1] == (
        "Restoring the worst 5% of tokens exactly takes 25% off the KL of a, "
        "restoring all others 75%."
    )


def test_clamped_scales_are_told_with_their_layers() -> None:
    result = _result("a").model_copy(update={"saturated_scales": {1: 7}})
    assert verdict(_report(result))[-1].endswith("were clamped: 7 of layer 1.")


def test_the_thresholds_are_stated() -> None:
    assert "at least 90%" in thresholds(tiny_report())
    assert "at most 0.05" in thresholds(tiny_report())

"""A converted real model says what the original says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvarn_cli.conversion.plan import plan_conversion
from kvarn_cli.conversion.run import run_conversion
from kvarn_cli.evaluation.logit_errors import compare_logits
from kvarn_cli.settings import KVarNSettings

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def converted(smollm2, tmp_path_factory):
    output = tmp_path_factory.mktemp("converted") / "smollm2"
    plan = plan_conversion(str(smollm2), settings=KVarNSettings(), rotation="fused", output=output)
    return run_conversion(plan)


def test_the_proof_holds_on_the_real_weights(converted):
    proof = converted.metadata.proof
    assert proof.instance_difference < 1e-12
    assert proof.smallest_control > 0.1
    assert 1e-4 < proof.weight_change < 1e-2
    assert converted.warnings == ()


@torch.inference_mode()
def test_fusion_costs_no_more_than_one_rounding(converted, smollm2_model, calibration_windows):
    tokens = calibration_windows.flatten()[None, :1000]
    fused = AutoModelForCausalLM.from_pretrained(converted.output, dtype=torch.float32)
    errors = compare_logits(
        smollm2_model(input_ids=tokens).logits[0], fused(input_ids=tokens).logits[0], tokens[0]
    )
    assert 0 < errors.kl.mean() < 1e-4
    assert errors.agreement.float().mean() > 0.99


def test_it_answers_as_before(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted.output)
    model = AutoModelForCausalLM.from_pretrained(converted.output, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])

"""Which engines are told to take which settings, as docs/backends.md has it."""

import pytest

from kvarn_cli.conversion.backends import backend_commands
from kvarn_cli.settings import KVarNSettings

HUAWEI = "vLLM fork huawei-csl/KVarN"
FP = "vLLM fork ytwang13/KVarN-FP"
LAB = "vLLM forks of local-inference-lab and JMPSequeira"
EVERY_WIDTH = {"kvarn", LAB}


@pytest.mark.parametrize(
    ("preset", "head_dim", "taking"),
    [
        ("k4v2_g128", 128, {"kvarn", HUAWEI, FP, LAB, "BeeLlama.cpp", "gmlx"}),
        ("k4v2_g128", 256, {"kvarn", HUAWEI, FP, LAB, "BeeLlama.cpp", "gmlx", "ninfer"}),
        ("k4v4_g64", 512, {"kvarn", HUAWEI, FP, LAB}),
        ("k2v2_g128", 128, {"kvarn", FP, "BeeLlama.cpp", "gmlx"}),
        ("k4v2_g128", 64, EVERY_WIDTH),
        ("k4v2_g32", 128, {"kvarn"}),
    ],
)
def test_engines_take_what_their_sources_say(preset: str, head_dim: int, taking: set[str]) -> None:
    settings = KVarNSettings.from_name(preset)
    commands = backend_commands(settings, head_dim, "DIR")
    assert {each.backend for each in commands if each.command} == taking
    assert all("take" in each.note for each in commands if not each.command)


def test_forks_differ_in_what_they_must_be_told() -> None:
    settings = KVarNSettings.from_name("k4v2_g64")
    commands = {each.backend: each.command for each in backend_commands(settings, 128, "DIR")}
    serve = "vllm serve DIR --kv-cache-dtype kvarn_k4v2_g64"
    assert commands[HUAWEI] == f"{serve} --block-size 64 --dtype float16"
    assert commands[LAB] == serve

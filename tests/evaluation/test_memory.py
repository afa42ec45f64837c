"""Memory of a measurement: that of one window's logits, whatever the number of methods."""

import subprocess
import sys

MEASURE = """
import re
from pathlib import Path
import torch
from tiny_models import tiny_config, tiny_model
from kvarn_cli.evaluation.measurement import measure_methods
from kvarn_cli.quantization.methods import parse_method

VOCAB_SIZE, NUM_TOKENS = 60_000, 400

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

torch.set_num_threads(1)
model = tiny_model(tiny_config("llama", vocab_size=VOCAB_SIZE), dtype=torch.float32)
windows = torch.randint(3, VOCAB_SIZE, (1, NUM_TOKENS))
specs = "kvarn:k2v2_g32 kvarn:k4v2_g32 quarot:k2v2_g32 kivi:k2v2_g32 fp8"
methods = [parse_method(spec) for spec in specs.split()]
with torch.inference_mode():
    model(input_ids=windows[:1], use_cache=False)
peaks = [peak()]
for some in (methods[:1], methods):
    measure_methods(model, windows, some)
    peaks.append(peak())
print(*(round(bytes / (4 * VOCAB_SIZE * NUM_TOKENS), 2) for bytes in peaks))
"""


def test_it_grows_neither_with_the_methods_nor_beyond_two_sets_of_logits() -> None:
    """In units of one window's logits; the exact run's and one method's are alive at a time."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{MEASURE}"],
        check=True,
        capture_output=True,
        text=True,
    )
    plain, one, five = map(float, done.stdout.split())
    assert one - plain < 2
    assert five - one < 0.5

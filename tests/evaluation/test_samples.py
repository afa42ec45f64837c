import torch
from hypothesis import given
from hypothesis import strategies as st

from kvarn_cli.evaluation.samples import Sample


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 40))
def test_a_sample_keeps_all_up_to_its_limit_then_evenly_spaced_ones(parts, limit):
    sample, stream = Sample(limit), torch.arange(sum(parts))
    for part in stream.split(parts):
        sample.add(part)
    kept = sample.values()
    if len(stream) <= limit:
        assert torch.equal(kept, stream)
    else:
        stride = int(kept[1] - kept[0]) if len(kept) > 1 else len(stream)
        assert limit / 2 - 1 <= len(kept) <= limit
        assert torch.equal(kept, torch.arange(0, len(stream), stride)[: len(kept)])

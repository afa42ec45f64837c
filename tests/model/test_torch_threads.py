from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvarn_cli.model.torch_threads import one_thread_per_operation


def test_threads_started_inside_work_alone_and_afterwards_all_is_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            pytest.raises(ArithmeticError),
            one_thread_per_operation(),
            ThreadPoolExecutor(1) as pool,
        ):
            assert torch.get_num_threads() == 1
            assert pool.submit(torch.get_num_threads).result() == 1
            raise ArithmeticError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

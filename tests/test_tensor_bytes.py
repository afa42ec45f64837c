import pytest
import torch

from kvarn_cli.checkpoint.safetensors_header import TensorInfo
from kvarn_cli.model.layout import FUSIBLE_DTYPES
from kvarn_cli.tensor_bytes import to_bytes, to_tensor


@pytest.mark.parametrize("name", FUSIBLE_DTYPES)
def test_bytes_come_back(name):
    tensor = torch.randn(3, 5).to(FUSIBLE_DTYPES[name])
    data = bytearray(to_bytes(tensor))
    assert len(data) == 15 * tensor.itemsize
    info = TensorInfo(name, (3, 5), 0, len(data))
    assert torch.equal(to_tensor(data, info), tensor)


def test_bytes_are_in_row_major_order():
    columns = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    assert bytes(to_bytes(columns)) == bytes(to_bytes(torch.tensor([[1.0, 3.0], [2.0, 4.0]])))

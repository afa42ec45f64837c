"""A sample of a long stream of values that never grows beyond a limit."""

import torch
from torch import Tensor


class Sample:
    """Every value of a stream, or evenly spaced ones once there are more than `limit`.

    Args:
        limit: most rows kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stride = 1
        self._seen = 0
        self._kept: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """Add rows, [n, ...]; those kept are copied, so that the stream can be freed."""
        first = -self._seen % self._stride
        self._seen += len(values)
        self._kept.append(values[first :: self._stride].clone())
        while sum(map(len, self._kept)) > self._limit:
            self._kept = [torch.cat(self._kept)[::2].clone()]
            self._stride *= 2

    def values(self) -> Tensor:
        """What was kept, in the order of the stream; at least one row was added."""
        return torch.cat(self._kept)

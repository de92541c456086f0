"""Numbers of a step that the host reads from the device by one copy.

Guarantee: the host gets the exact bits of every number.

Cost: one copy, for which the host waits until the device has finished all earlier work. Everything that the host needs
of a step is in this copy, so that it waits once in a step: before the update, and not after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class StepNumbers:
    """Numbers of one step on the device, of which the host reads all at once.

    The engine reads them together with the norm of the gradients. `values` reads them without a norm if the engine has
    not done so.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Keep tensors; nothing is read.

        Args:
            tensors: 1-D tensors of dtype float64 or int64 on one device. They must not change until they are read.
        """
        self._tensors = list(tensors)
        self._values: list[list[Any]] | None = None

    def read_with(self, norm: torch.Tensor) -> float:
        """Copy all numbers and a norm to the host, and return the norm. The host waits for the device.

        Args:
            norm: scalar of any floating-point dtype on the device of the tensors.
        """
        [[norm_on_host], *self._values] = _read([norm.double().reshape(1), *self._tensors])
        return float(norm_on_host)

    def values(self) -> list[list[Any]]:
        """Return the elements of each tensor as Python numbers; only a first call, if any, waits for the device."""
        if self._values is None:
            self._values = _read(self._tensors)
        return self._values


def _read(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return the elements of 1-D tensors of 8-byte dtypes, which are copied to the host as one tensor of integers."""
    words = torch.cat([tensor.detach().view(torch.int64) for tensor in tensors])
    host_words = np.array(words.tolist(), np.int64)
    values = []
    start = 0
    for tensor in tensors:
        part = host_words[start : start + tensor.numel()]
        start += tensor.numel()
        values.append((part.view(np.float64) if tensor.is_floating_point() else part).tolist())
    return values

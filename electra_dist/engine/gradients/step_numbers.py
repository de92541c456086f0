"""Read the numbers of a step, such as losses and counts, from the device with one copy.

Guarantee: the host gets the exact bits of every number.

Cost: one copy, for which the host waits until the device has finished all earlier work. The copy contains every number
of the step that the host needs. Therefore the host waits only once in a step, and before the update, not after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class StepNumbers:
    """Numbers of a step that are still on the device: 1-D float64 or int64 tensors, unchanged until they are read."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._values: list[list[Any]] | None = None

    def read_with(self, norm: torch.Tensor) -> float:
        """Copy all numbers and the gradient norm to the host with a single copy; return the norm."""
        norm_on_host, *self._values = _read([norm.double().reshape(1), *self._tensors])
        return float(norm_on_host[0])

    def values(self) -> list[list[Any]]:
        """Return the elements of each tensor as Python numbers; copy them unless `read_with` has done so."""
        if self._values is None:
            self._values = _read(self._tensors)
        return self._values


def _read(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    words = torch.cat([tensor.detach().view(torch.int64) for tensor in tensors])
    host_words = np.array(words.tolist(), np.int64)
    values = []
    start = 0  # first word of the next tensor
    for tensor in tensors:
        tensor_words = host_words[start : start + tensor.numel()]
        start += tensor.numel()
        if tensor.is_floating_point():
            values.append(tensor_words.view(np.float64).tolist())
        else:
            values.append(tensor_words.tolist())
    return values

"""Make the keys of dropout: which elements a network drops is a function of seed, step, row number and position.

Shapes: B rows, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.keyed_random import device_keys
from electra_kernels.operation_types import LayerDropout


class DropoutKeys(NamedTuple):
    """Keys that determine which elements a network drops in one forward pass, and the backend that applies dropout."""

    seed: int  # seed of this tower, derived from the run's
    step: int  # number of the optimizer step
    row_B: torch.Tensor  # int64 numbers of the rows within the global batch
    backend: str  # `kernels.backend` of the config

    @classmethod
    def off(cls, ids_BS: torch.Tensor) -> DropoutKeys:
        """Return placeholder keys for evaluation mode, where no key is read; only the number of rows is used."""
        row_B = torch.arange(len(ids_BS), device=ids_BS.device)
        return cls(seed=0, step=0, row_B=row_B, backend="auto")

    def of_layers(self, num_layers: int) -> list[LayerDropout]:
        """Return the dropout of each layer, still of probability 0."""
        backend = resolve_without_cuda(self.backend, self.row_B.device.type)
        if backend == "triton":
            key_L3 = device_keys(self.seed, self.step, self.row_B.device, num_layers)
        else:
            key_L3 = torch.tensor([[self.seed, self.step, number] for number in range(num_layers)])
        return [LayerDropout(key_3, self.row_B, backend) for key_3 in key_L3.unbind(0)]

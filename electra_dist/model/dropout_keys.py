"""Make the keys of dropout: which elements a network drops is a function of seed, step, row number and position.

Shapes: B rows, L layers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.keyed_random import copy_to_device


class DropoutKeys(NamedTuple):
    """Keys that determine which elements a network drops in one forward pass, and the backend that applies dropout."""

    seed: int  # seed of this tower, derived from the run's
    step: int  # number of the optimizer step
    row_B: torch.Tensor  # int64 numbers of the rows within the global batch
    backend: str  # `kernels.backend` of the config
    step_on_device: torch.Tensor | None = None  # int64 [1] that kernels read; None: copied from `step`

    @classmethod
    def off(cls, ids_BS: torch.Tensor) -> DropoutKeys:
        """Return placeholder keys for evaluation mode, where no key is read; only the number of rows is used."""
        row_B = torch.arange(len(ids_BS), device=ids_BS.device)
        return cls(seed=0, step=0, row_B=row_B, backend="auto")

    def of_layers(self, num_layers: int) -> list[LayerDropoutKeys]:
        """Return the keys of each layer, as views of one tensor: on the device under Triton, else on the host."""
        # Kernels of Triton read the keys from the device. They are computed there, so that nothing is copied in the
        # middle of a micro-batch.
        device = self.row_B.device
        if resolve_without_cuda(self.backend, device.type) == "triton":
            step = self.step_on_device
            if step is None:
                step = copy_to_device(torch.tensor([self.step]), device)
            key_L3 = _keys_without_step(self.seed, num_layers, device) + step * _step_column(device)
        else:
            key_L3 = torch.tensor([[self.seed, self.step, number] for number in range(num_layers)])
        return [LayerDropoutKeys(key_3=key_3, row_B=self.row_B, backend=self.backend) for key_3 in key_L3.unbind(0)]


@functools.lru_cache(maxsize=16)
def _keys_without_step(seed: int, num_layers: int, device: torch.device) -> torch.Tensor:
    """Return [seed, 0, layer] for each layer, int64 [num_layers, 3]; the caller adds the step to the 0."""
    return torch.tensor([[seed, 0, number] for number in range(num_layers)], device=device)


@functools.lru_cache(maxsize=4)
def _step_column(device: torch.device) -> torch.Tensor:
    return torch.tensor([0, 1, 0], device=device)


class LayerDropoutKeys(NamedTuple):
    """Keys that determine which elements one layer of a network drops in one forward pass."""

    # A tensor and not Python integers, so that one graph of torch.compile serves all layers and steps, and no argument
    # of a kernel's launch changes with the step.
    key_3: torch.Tensor  # int64 [3]: seed, step, number of the layer; on the device under Triton, else on the host
    row_B: torch.Tensor  # int64 numbers of the rows within the global batch
    backend: str  # `kernels.backend` of the config

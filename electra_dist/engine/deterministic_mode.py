"""Set torch's deterministic mode on a GPU (`engine.deterministic`), so that a repeated step gives the same bits.

Guarantee: nothing changes on a CPU, whose results repeat without it. On a GPU torch takes deterministic kernels where
it has them, for example for the gradients of embedding tables, and warns once of each operation that has none.

How: cuBLAS reads the environment variable CUBLAS_WORKSPACE_CONFIG when its first handle is created; without the
variable it may sum in another order in each run. FlashAttention needs a stricter mode, which
`model/flash_attention.py` sets for its backward pass.

Limits: docs/exactness.md lists what is expected to repeat on a GPU; no GPU has confirmed it.
"""

from __future__ import annotations

import os

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_WORKSPACES = (
    ":4096:8"  # eight buffers of 4 MiB, one of the two settings that cuBLAS documents as deterministic
)


def set_deterministic_mode(enabled: bool) -> None:
    """Switch torch to deterministic operations if `enabled` and there is a GPU; call it before the GPU is used."""
    if not enabled or not torch.cuda.is_available():
        return
    os.environ.setdefault(CUBLAS_VARIABLE, _CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # By default the mode also fills each new tensor with NaN, to show reads of uninitialised memory. That costs a
    # kernel launch for each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

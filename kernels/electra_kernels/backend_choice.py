"""Chooses the implementation of an operation: turns `config.kernels.backend` into the name of what runs.

Guarantee: `auto` is Triton on a CUDA device where Triton is installed, and the plain-PyTorch reference everywhere
else. `triton` and `cuda` are strict: where they cannot run, an error names the reason and nothing replaces them. The
CUDA library holds only the discriminator tail; under `cuda`, every other operation uses what `auto` would choose.

Limits: on a CPU, Triton runs only in its interpreter, which TRITON_INTERPRET=1 in the environment enables (tests).
"""

from __future__ import annotations

import importlib.util
import os

from electra_kernels import BackendUnavailable

BACKENDS = ("auto", "triton", "cuda", "reference")


def resolve(backend: str, device: str) -> str:
    """Return the implementation that `backend` selects on `device`: "triton", "cuda" or "reference".

    For "cuda", the CUDA library is loaded, so that a missing library is reported before the first operation runs.

    Args:
        backend: `config.kernels.backend`, one of `BACKENDS`.
        device: A device type, "cuda" or "cpu". An index after a colon is ignored.

    Raises:
        BackendUnavailable: `backend` is "triton" or "cuda", and that implementation cannot run on this machine.
    """
    assert backend in BACKENDS, f"kernels.backend is {backend!r}: set it to one of {', '.join(BACKENDS)}"
    on_gpu = device.split(":")[0] == "cuda"
    if backend == "auto":
        return "triton" if on_gpu and _has_triton() else "reference"
    if backend == "triton":
        if not _has_triton():
            raise BackendUnavailable(
                "kernels.backend is triton, but Python finds no package `triton`: "
                "install triton, or set kernels.backend to auto"
            )
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendUnavailable(
                "kernels.backend is triton, but this process has no CUDA device: "
                "set kernels.backend to auto or reference, or run on a machine with a GPU"
            )
    if backend == "cuda":
        if not on_gpu:
            raise BackendUnavailable(
                "kernels.backend is cuda, but this process has no CUDA device: "
                "set kernels.backend to auto or reference, or run on a machine with a GPU"
            )
        from electra_kernels.native.discriminator_tail import library

        library()
    return backend


def resolve_without_cuda(backend: str, device: str) -> str:
    """Return "triton" or "reference" for an operation that is not in the CUDA library.

    "cuda" is treated as "auto". Arguments and errors are those of `resolve`.
    """
    return resolve("auto" if backend == "cuda" else backend, device)


def _has_triton() -> bool:
    """Return whether the package `triton` is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None

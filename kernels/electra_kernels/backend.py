"""Which implementation of an operation runs: `config.kernels.backend` in, one name out.

`auto` is Triton on a CUDA device where Triton is installed and the plain-PyTorch reference everywhere else. `triton`
and `cuda` are demands: where they cannot be met, the user is told so and nothing else runs in their stead. The CUDA
library holds the discriminator tail only; under `cuda` every other operation takes what `auto` would.

Triton runs on a CPU only in its interpreter, which `TRITON_INTERPRET=1` in the environment switches on (tests).
"""

from __future__ import annotations

import importlib.util
import os

from electra_kernels import BackendUnavailable

BACKENDS = ("auto", "triton", "cuda", "reference")


def resolve(backend: str, device: str) -> str:
    """The implementation that `backend` means on `device`: "triton", "cuda" or "reference".

    Args:
        backend: `config.kernels.backend`.
        device: a device type, "cuda" or "cpu" (an index after a colon is ignored).

    Raises:
        BackendUnavailable: the demanded implementation cannot run here.
    """
    assert backend in BACKENDS, backend
    on_gpu = device.split(":")[0] == "cuda"
    if backend == "auto":
        return "triton" if on_gpu and _has_triton() else "reference"
    if backend == "triton":
        if not _has_triton():
            raise BackendUnavailable(
                "kernels.backend is triton, but triton is not installed here: install it or set auto"
            )
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendUnavailable(
                "kernels.backend is triton, but there is no CUDA device here: set auto or reference"
            )
    if backend == "cuda":
        if not on_gpu:
            raise BackendUnavailable(
                "kernels.backend is cuda, but there is no CUDA device here: set auto or reference"
            )
        from electra_kernels.native.discriminator_tail import library

        library()
    return backend


def resolve_without_cuda(backend: str, device: str) -> str:
    """As `resolve`, for an operation that the CUDA library does not hold."""
    return resolve("auto" if backend == "cuda" else backend, device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

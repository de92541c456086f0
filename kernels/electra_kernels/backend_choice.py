"""Choose the implementation of an operation: turn `config.kernels.backend` into "triton", "cuda" or "reference".

Guarantee: `auto` selects Triton on a CUDA device where Triton is installed, and the plain-PyTorch reference everywhere
else. `triton` and `cuda` are strict: where they cannot run, `BackendUnavailable` names the reason, and no other
implementation is used instead. The CUDA library holds only one operation, the discriminator tail (the loss from the
dense layer on). Under `cuda`, every other operation therefore uses what `auto` would choose.

Limits: on a CPU, Triton runs only in its interpreter, which TRITON_INTERPRET=1 in the environment enables; that is
meant for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os

from electra_kernels import BackendUnavailable

BACKENDS = ("auto", "triton", "cuda", "reference")


@functools.cache  # each operation asks at every call, and the answer stays the same as long as the process
def resolve(backend: str, device: str, *, in_cuda_library: bool = True) -> str:
    """Return which implementation of an operation runs on a device: "triton", "cuda", or "reference" (plain PyTorch).

    `backend` is the config's `kernels.backend`, one of BACKENDS; `device` is a name such as "cuda:3". An operation
    that is not `in_cuda_library` takes "cuda" for "auto". For "cuda" the library is loaded, so that a missing one is
    reported before the first operation. BackendUnavailable: the implementation cannot run on this machine.
    """
    assert backend in BACKENDS, f"kernels.backend is {backend!r}: set it to one of {', '.join(BACKENDS)}"
    if backend == "cuda" and not in_cuda_library:
        backend = "auto"
    device_type = device.split(":")[0]  # "cuda" for "cuda:3"
    on_gpu = device_type == "cuda"
    if backend == "auto":
        return "triton" if on_gpu and _has_triton() else "reference"
    if backend == "triton":
        _require_triton(on_gpu)
    if backend == "cuda":
        _require_cuda(on_gpu)
    return backend


def _require_triton(on_gpu: bool) -> None:
    """Raise BackendUnavailable unless Triton is installed and has a GPU, or its interpreter is switched on."""
    if not _has_triton():
        raise BackendUnavailable(
            "kernels.backend is triton, but Python finds no package `triton`: "
            "install triton, or set kernels.backend to auto"
        )
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not on_gpu and not is_interpreted:
        raise BackendUnavailable(
            "kernels.backend is triton, but this process has no CUDA device: "
            "set kernels.backend to auto or reference, or run on a machine with a GPU"
        )


def _require_cuda(on_gpu: bool) -> None:
    if not on_gpu:
        raise BackendUnavailable(
            "kernels.backend is cuda, but this process has no CUDA device: "
            "set kernels.backend to auto or reference, or run on a machine with a GPU"
        )
    from electra_kernels.native.discriminator_tail import library

    library()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

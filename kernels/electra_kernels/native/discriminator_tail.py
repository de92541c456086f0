"""Build, load and launch the discriminator tail as a CUDA library, for machines without Triton.

The tail is everything after the matrix product of the discriminator's dense layer: bias, GELU, output unit and loss.

Guarantee: results are those of the Triton kernels (`triton/discriminator_tail.py`) to rounding; sums have a fixed
order.

How: `python -m electra_kernels.native.discriminator_tail` builds `discriminator_tail.cu` with nvcc (sm_80 and sm_90a,
10 s) into `~/.cache/electra-dist`. The name of the library contains the digest of its source, so a library that was
built from another version of the source is never loaded. The build is optional: only `kernels.backend: cuda` needs the
library, and the error for a missing one names the command.

Limits: bf16 and fp32 dense outputs; H up to 2**31.

Shapes: T tokens, H hidden, P thread blocks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from electra_kernels import BackendUnavailable

SOURCE = Path(__file__).with_name("discriminator_tail.cu")
NUM_BLOCKS = 1024
_BUILD = "python -m electra_kernels.native.discriminator_tail"


def library_path() -> Path:
    """Return where the CUDA library for the present source file belongs, whether or not it has been built.

    BackendUnavailable: this user has no home folder.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    try:
        home = Path.home()
    except RuntimeError:
        raise BackendUnavailable(
            "kernels.backend is cuda, but this user has no home folder for its library: set HOME, or set "
            "kernels.backend to auto"
        ) from None
    return home / ".cache" / "electra-dist" / f"discriminator_tail-{digest}.so"


def build(path: Path) -> str:
    """Compile the CUDA library to `path` with nvcc; return nvcc's report of each kernel's registers and spills.

    The file appears under its name only when it is complete. BackendUnavailable: nvcc is not on PATH, or it rejects
    the source; the message has the last line of nvcc's errors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a")]
    report_resources = ["-Xptxas", "-v"]
    shared_library = ["-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    options = ["-O3", "-std=c++17", *report_resources, *shared_library, *targets]
    command = ["nvcc", *options, "-o", str(unfinished), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)
    except FileNotFoundError:
        raise BackendUnavailable(
            "nvcc is not on PATH: install the CUDA toolkit, or set kernels.backend to auto, which does not need it"
        ) from None
    except subprocess.CalledProcessError as error:
        last_line = error.stderr.strip().splitlines()[-1]
        raise BackendUnavailable(
            f"nvcc could not compile {SOURCE}: {last_line}: "
            "correct this, or set kernels.backend to auto, which does not need the library"
        ) from None
    unfinished.replace(path)
    return done.stderr


@functools.cache
def library(path: Path | None = None) -> ctypes.CDLL:
    """Load the CUDA library from `path`, once per process; None stands for `library_path()`.

    BackendUnavailable: the file does not exist; the text names the command that builds it.
    """
    if path is None:
        path = library_path()
    if not path.exists():
        raise BackendUnavailable(
            f"kernels.backend is cuda, but its library {path} is not built: run `{_BUILD}`, "
            f"or set kernels.backend to auto"
        )
    loaded = ctypes.CDLL(str(path))
    # Without these types, ctypes would pass 64-bit numbers and pointers as int.
    is_bf16 = ctypes.c_int
    num_tokens = ctypes.c_int64
    hidden = ctypes.c_int
    num_blocks = ctypes.c_int
    stream = ctypes.c_void_p
    forward_tensors = [ctypes.c_void_p] * 8
    backward_tensors = [ctypes.c_void_p] * 11
    loaded.electra_tail_forward.argtypes = [is_bf16, *forward_tensors, num_tokens, hidden, stream]
    loaded.electra_tail_backward.argtypes = [is_bf16, *backward_tensors, num_tokens, hidden, num_blocks, stream]
    return loaded


def forward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss, times its mask, and logit, fp32 [T] each, as `rtd_losses_reference` defines them.

    The dense output is contiguous bf16 or fp32; labels and masks are contiguous fp32. RuntimeError: CUDA did not start
    the kernel.
    """
    bias_H = _as_fp32(bias_H)
    out_weight_H = _as_fp32(out_weight_H)
    out_bias = _as_fp32(out_bias)
    loss_T = torch.empty_like(label_T)
    logits_T = torch.empty_like(label_T)
    tensors = (dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T, loss_T, logits_T)
    _call(library().electra_tail_forward, dense_TH, tensors)
    return loss_T, logits_T


def backward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
    logits_T: torch.Tensor,
    upstream_T: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the dense output, its bias, the output weight and the output bias.

    The first is in the dtype of the dense output, the others are fp32. `logits_T` comes from `forward_pass`;
    `upstream_T`, contiguous fp32, is the gradient of each token's masked loss.
    """
    num_tokens, hidden = dense_TH.shape
    num_blocks = min(NUM_BLOCKS, num_tokens)
    grad_dense_TH = torch.empty_like(dense_TH)
    # Each thread block writes one row of partial sums; they are added afterwards, in a fixed order.
    partial_bias_PH, partial_weight_PH = torch.empty(2, num_blocks, hidden, device=dense_TH.device)
    partial_out_bias_P = torch.empty(num_blocks, device=dense_TH.device)
    inputs = (dense_TH, _as_fp32(bias_H), _as_fp32(out_weight_H), label_T, mask_T, logits_T, upstream_T)
    outputs = (grad_dense_TH, partial_bias_PH, partial_weight_PH, partial_out_bias_P)
    _call(library().electra_tail_backward, dense_TH, inputs + outputs, num_blocks)
    partials = (partial_bias_PH, partial_weight_PH, partial_out_bias_P)
    grad_bias_H, grad_out_weight_H, grad_out_bias = (each.sum(0, dtype=torch.float64).float() for each in partials)
    return grad_dense_TH, grad_bias_H, grad_out_weight_H, grad_out_bias


def _as_fp32(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.float().contiguous()


def _call(function: Any, dense_TH: torch.Tensor, tensors: tuple[torch.Tensor, ...], *more: int) -> None:
    """Launch a function of the library on torch's current stream; `tensors` and `more` are its arguments in order.

    The tensors must stay alive until the call returns. After that, the caller may free them although the kernel may
    still run: torch gives their memory only to later work of the same stream.
    """
    assert dense_TH.dtype in (torch.bfloat16, torch.float32), (
        f"the dense output is {dense_TH.dtype}: pass bf16 or fp32, or set kernels.backend to auto"
    )
    num_tokens, hidden = dense_TH.shape
    if num_tokens == 0:
        return
    is_bf16 = int(dense_TH.dtype == torch.bfloat16)
    pointers = [tensor.data_ptr() for tensor in tensors]
    stream = torch.cuda.current_stream(dense_TH.device).cuda_stream if dense_TH.is_cuda else None
    error = function(is_bf16, *pointers, num_tokens, hidden, *more, stream)
    if error:
        raise RuntimeError(
            f"the CUDA kernel of the discriminator tail did not start: CUDA error {error}: look it up in cudaError_t; "
            "if the GPU is not of compute capability 8.x or 9.0, set kernels.backend to auto"
        )


def main() -> None:
    """Build the CUDA library with nvcc; print registers and spills of each kernel, and the path of the library."""
    path = library_path()
    report = build(path)
    for line in report.splitlines():
        if "spill" in line or "registers" in line:
            print(line)
    print(path)


if __name__ == "__main__":
    try:
        main()
    except BackendUnavailable as error:
        sys.exit(str(error))

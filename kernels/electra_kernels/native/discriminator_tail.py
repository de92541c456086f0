"""Builds, loads and launches the discriminator tail as a CUDA library, for machines without Triton.

Guarantee: results are those of the Triton kernels (`triton/discriminator_tail.py`) to rounding; sums have a fixed
order.

How: `python -m electra_kernels.native.discriminator_tail` builds `discriminator_tail.cu` with nvcc (sm_80 and sm_90a,
10 s) into `~/.cache/electra-dist`. The file name contains the digest of the source, so a library of another source is
never loaded. The build is optional. Only `kernels.backend: cuda` needs it, and its error message names the command.

Cost: the memory traffic is that of the Triton kernels.

Limits: bf16 and fp32 dense outputs; H up to 2**31.

Shapes: T tokens, H hidden, P blocks.
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
from electra_kernels.partial_sums import sum_of_strips

SOURCE = Path(__file__).with_name("discriminator_tail.cu")
NUM_BLOCKS = 1024
_BUILD = "python -m electra_kernels.native.discriminator_tail"


def library_path() -> Path:
    """Return the path of the CUDA library for the present source file, whether or not it is built."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return Path.home() / ".cache" / "electra-dist" / f"discriminator_tail-{digest}.so"


def build(path: Path) -> str:
    """Compile the CUDA library to `path`; return the assembler's report (registers and spills of each kernel).

    The file appears under its name only when it is complete. Missing parent folders are created.

    Raises:
        BackendUnavailable: nvcc is not on PATH, or it rejects the source; the text has its last line of errors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a")]
    options = ["-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    command = ["nvcc", *options, *targets, "-o", str(unfinished), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
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
    """Load the CUDA library once and declare the argument types of its functions.

    Args:
        path: File of the library; None is the path of the present source, `library_path()`.

    Raises:
        BackendUnavailable: The file does not exist; the text names the command that builds it.
    """
    path = path or library_path()
    if not path.exists():
        raise BackendUnavailable(
            f"kernels.backend is cuda, but its library {path} is not built: run `{_BUILD}`, "
            f"or set kernels.backend to auto"
        )
    loaded = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.electra_tail_forward.argtypes = [number, *[pointer] * 8, size, number, pointer]
    loaded.electra_tail_backward.argtypes = [number, *[pointer] * 11, size, number, number, pointer]
    return loaded


def forward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masked loss and logit of every token, fp32 [T] each, by the CUDA library.

    Args:
        dense_TH: Contiguous bf16 or fp32 matrix product of the dense layer, without its bias.
        bias_H: Bias of the dense layer.
        out_weight_H: Weights of the output unit.
        out_bias: Bias of the output unit, one element.
        label_T: Contiguous fp32, 1 where the token was replaced and 0 elsewhere.
        mask_T: Contiguous fp32, the weight of each token in the loss.

    Raises:
        BackendUnavailable: The library is not built.
        RuntimeError: CUDA did not start the kernel.
    """
    loss_T, logits_T = torch.empty_like(label_T), torch.empty_like(label_T)
    inputs = (dense_TH, *_as_fp32(bias_H, out_weight_H, out_bias), label_T, mask_T)
    _call(library().electra_tail_forward, dense_TH, (*inputs, loss_T, logits_T))
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
    """Return the gradients of the dense output, its bias, the output weight and the output bias, by the CUDA library.

    Args:
        dense_TH: Contiguous bf16 or fp32 matrix product of the dense layer, without its bias.
        bias_H: Bias of the dense layer.
        out_weight_H: Weights of the output unit.
        label_T: Contiguous fp32, as in the forward pass.
        mask_T: Contiguous fp32, as in the forward pass.
        logits_T: Logits that the forward pass returned.
        upstream_T: Contiguous fp32 gradient of each token's masked loss.

    Returns:
        The gradients; the first is in the dtype of `dense_TH`, the others are fp32.
    """
    blocks = min(NUM_BLOCKS, len(dense_TH))
    grad_dense_TH = torch.empty_like(dense_TH)
    partial_bias_PH, partial_weight_PH = torch.empty(2, blocks, dense_TH.shape[1], device=dense_TH.device)
    partial_out_bias_P = torch.empty(blocks, device=dense_TH.device)
    tensors = (
        *(dense_TH, *_as_fp32(bias_H, out_weight_H), label_T, mask_T, logits_T, upstream_T),
        *(grad_dense_TH, partial_bias_PH, partial_weight_PH, partial_out_bias_P),
    )
    _call(library().electra_tail_backward, dense_TH, tensors, blocks)
    sums = (sum_of_strips(partial) for partial in (partial_bias_PH, partial_weight_PH, partial_out_bias_P))
    return grad_dense_TH, *sums


def _as_fp32(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors as contiguous fp32, the only form in which the CUDA library reads parameters."""
    return [tensor.float().contiguous() for tensor in tensors]


def _call(function: Any, dense_TH: torch.Tensor, tensors: tuple[torch.Tensor, ...], *more: int) -> None:
    """Launch a function of the library on the current stream of torch; with no tokens, do nothing.

    The tensors must stay alive until the call returns. After that their memory may be freed, because torch reuses it
    in the order of the stream.

    Args:
        function: `electra_tail_forward` or `electra_tail_backward`.
        dense_TH: Dense output, which gives dtype, number of tokens and width.
        tensors: All tensors of the function, in its order.
        *more: Further integers after the width.

    Raises:
        RuntimeError: CUDA did not start the kernel.
    """
    assert dense_TH.dtype in (torch.bfloat16, torch.float32), (
        f"the dense output is {dense_TH.dtype}: pass bf16 or fp32, or set kernels.backend to auto"
    )
    if not len(dense_TH):
        return
    stream = torch.cuda.current_stream().cuda_stream if dense_TH.is_cuda else None
    pointers = [tensor.data_ptr() for tensor in tensors]
    error = function(int(dense_TH.dtype == torch.bfloat16), *pointers, *dense_TH.shape, *more, stream)
    if error:
        raise RuntimeError(
            f"the CUDA kernel of the discriminator tail did not start: CUDA error {error}: look it up in cudaError_t; "
            "if the GPU is not of compute capability 8.x or 9.0, set kernels.backend to auto"
        )


def main() -> None:
    """Build the library, then print registers and spills of each kernel, and the path of the library."""
    path = library_path()
    report = build(path)
    print("\n".join(line for line in report.splitlines() if "spill" in line or "registers" in line))
    print(path)


if __name__ == "__main__":
    try:
        main()
    except BackendUnavailable as error:
        sys.exit(str(error))

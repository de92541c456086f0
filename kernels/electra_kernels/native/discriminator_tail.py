"""The discriminator tail by the CUDA library, where Triton is absent or not wanted.

`python -m electra_kernels.native.discriminator_tail` builds `discriminator_tail.cu` with nvcc (sm_80 and sm_90a, 10 s)
into `~/.cache/electra-dist`, under a name that carries the digest of the source: a library of another source is never
loaded. The build is optional: nothing else needs it, and `kernels.backend: cuda` says so where it is missing.

Guarantee and cost: those of the Triton kernels (`triton/discriminator_tail.py`); sums in a fixed order.
Where it stops: bf16 and fp32 dense outputs; H up to 2**31.

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
    """Where the library of this source lies when it is built."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return Path.home() / ".cache" / "electra-dist" / f"discriminator_tail-{digest}.so"


def build(path: Path) -> str:
    """Compile the library to `path` and return the assembler's report (registers and spills of each kernel)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a")]
    options = ["-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    command = ["nvcc", *options, *targets, "-o", str(unfinished), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise BackendUnavailable(
            "nvcc is not on PATH: install the CUDA toolkit, or leave kernels.backend at auto"
        ) from None
    except subprocess.CalledProcessError as error:
        raise BackendUnavailable(f"nvcc could not compile {SOURCE}: {error.stderr.strip().splitlines()[-1]}") from None
    unfinished.replace(path)
    return done.stderr


@functools.cache
def library(path: Path | None = None) -> ctypes.CDLL:
    """The library; a BackendUnavailable names the command that builds it where it is missing."""
    path = path or library_path()
    if not path.exists():
        raise BackendUnavailable(f"kernels.backend is cuda, but {path} is not built: run {_BUILD}")
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
    """Masked loss and logit of every token, fp32."""
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
    """Gradients of the dense output, its bias, the output weight and the output bias."""
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
    return [tensor.float().contiguous() for tensor in tensors]


def _call(function: Any, dense_TH: torch.Tensor, tensors: tuple[torch.Tensor, ...], *more: int) -> None:
    """Launch on the current stream; the tensors stay alive until the call returns, their memory is stream-ordered."""
    assert dense_TH.dtype in (torch.bfloat16, torch.float32), dense_TH.dtype
    if not len(dense_TH):
        return
    stream = torch.cuda.current_stream().cuda_stream if dense_TH.is_cuda else None
    pointers = [tensor.data_ptr() for tensor in tensors]
    error = function(int(dense_TH.dtype == torch.bfloat16), *pointers, *dense_TH.shape, *more, stream)
    if error:
        raise RuntimeError(f"the discriminator tail's kernel did not start: CUDA error {error}")


def main() -> None:
    """Build the library and print where it is and what the assembler reports."""
    path = library_path()
    report = build(path)
    print("\n".join(line for line in report.splitlines() if "spill" in line or "registers" in line))
    print(path)


if __name__ == "__main__":
    try:
        main()
    except BackendUnavailable as error:
        sys.exit(str(error))

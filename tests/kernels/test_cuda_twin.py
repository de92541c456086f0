"""The CUDA twin of the discriminator tail: its source run on the CPU by g++, and built by nvcc where there is one."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from electra_kernels import BackendUnavailable
from electra_kernels.backend_choice import resolve
from electra_kernels.discriminator_tail import _RtdLosses, rtd_losses_reference
from electra_kernels.native import discriminator_tail

SHIM = Path(__file__).with_name("cuda_on_cpu.h")


@pytest.fixture(scope="module")
def library_for_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA source compiled by g++ for the CPU, where 32 threads run as one warp."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("twin")
    (folder / "cuda_runtime.h").write_text("")
    library = folder / "tail.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-I", str(folder), "-include", str(SHIM)]
    done = subprocess.run(
        [*command, "-x", "c++", str(discriminator_tail.SOURCE), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 8), (21, 64), (13, 37)])
def test_losses_and_gradients_of_the_cuda_source_are_those_of_float64(
    monkeypatch, library_for_cpu, dtype, num_tokens, hidden
):
    """Gradients may differ by a rounding to their dtype; logits and losses are fp32 for every dtype."""
    torch.manual_seed(0)
    library = discriminator_tail.library(library_for_cpu)
    monkeypatch.setattr(discriminator_tail, "library", lambda: library)
    monkeypatch.setattr(discriminator_tail, "NUM_BLOCKS", 5)
    shapes = [(num_tokens, hidden), (hidden,), (hidden,), ()]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    float64_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    label = (torch.rand(num_tokens) > 0.6).float()
    mask = (torch.rand(num_tokens) > 0.2).float()
    upstream = torch.rand(num_tokens)

    loss, logits = _RtdLosses.apply(*tensors, label, mask, discriminator_tail)
    grads = torch.autograd.grad(loss, tensors, upstream)

    exact_loss, exact_logits = rtd_losses_reference(*float64_tensors, label.double(), mask.double())
    exact_grads = torch.autograd.grad(exact_loss, float64_tensors, upstream.double())
    torch.testing.assert_close(logits.double(), exact_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-5)
    allowed = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-5
    for grad, exact_grad in zip(grads, exact_grads):
        assert grad.dtype == dtype
        absolute = 1e-5 * exact_grad.abs().max().item()
        torch.testing.assert_close(grad.double(), exact_grad, rtol=allowed, atol=absolute)


def test_nvcc_compiles_the_cuda_source_without_register_spills(tmp_path):
    """There are 16 kernels: two passes, two dtypes, wide and narrow rows, two GPU architectures."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    path = tmp_path / "tail.so"

    report = discriminator_tail.build(path)

    stack_and_spill_bytes = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    assert len(stack_and_spill_bytes) == 16
    assert len(registers) == 16
    assert set(stack_and_spill_bytes) == {("0", "0", "0")}
    assert max(registers) <= 96
    library = discriminator_tail.library(path)
    assert isinstance(library.electra_tail_forward, ctypes._CFuncPtr)
    if not torch.cuda.is_available():
        no_pointers = [None] * 8
        error_code = library.electra_tail_forward(1, *no_pointers, 1, 8, None)
        assert error_code != 0  # without a GPU the call fails, but does not crash


def test_a_backend_that_cannot_run_is_refused_with_the_reason_and_auto_falls_back_to_the_reference(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(discriminator_tail, "library_path", lambda: tmp_path / "absent.so")
    with pytest.raises(BackendUnavailable, match="run `python -m electra_kernels"):
        resolve("cuda", "cuda")
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        resolve("cuda", "cpu")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        resolve("triton", "cpu")

    assert resolve("auto", "cpu") == "reference"
    assert resolve("reference", "cuda:0") == "reference"

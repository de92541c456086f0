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
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library compiled for the CPU, each kernel run by 32 threads a warp."""
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
def test_its_values_are_the_references(monkeypatch, on_cpu, dtype, num_tokens, hidden):
    torch.manual_seed(0)
    library = discriminator_tail.library(on_cpu)
    monkeypatch.setattr(discriminator_tail, "library", lambda: library)
    monkeypatch.setattr(discriminator_tail, "NUM_BLOCKS", 5)
    shapes = [(num_tokens, hidden), (hidden,), (hidden,), ()]
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    label, mask = (torch.rand(num_tokens) > 0.6).float(), (torch.rand(num_tokens) > 0.2).float()
    loss, logits = _RtdLosses.apply(*given, label, mask, discriminator_tail)
    exactly = [t.detach().double().requires_grad_() for t in given]
    exact_loss, exact_logits = rtd_losses_reference(*exactly, label.double(), mask.double())
    torch.testing.assert_close(logits.double(), exact_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-5)
    upstream = torch.rand(num_tokens)
    grads = torch.autograd.grad(loss, given, upstream)
    exact_grads = torch.autograd.grad(exact_loss, exactly, upstream.double())
    for grad, exact in zip(grads, exact_grads):
        assert grad.dtype == dtype
        allowed = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(grad.double(), exact, rtol=allowed, atol=1e-5 * exact.abs().max().item())


def test_nvcc_builds_it_without_spills(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    path = tmp_path / "tail.so"
    report = discriminator_tail.build(path)
    kernels = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    assert len(kernels) == len(registers) == 16  # two passes, two types, wide and narrow, two architectures
    assert set(kernels) == {("0", "0", "0")}
    assert max(registers) <= 96
    library = discriminator_tail.library(path)
    assert isinstance(library.electra_tail_forward, ctypes._CFuncPtr)
    if not torch.cuda.is_available():
        no_pointers = [None] * 8
        assert library.electra_tail_forward(1, *no_pointers, 1, 8, None) != 0  # an error code, not a crash


def test_a_demand_that_cannot_be_met_is_the_users_to_know(monkeypatch, tmp_path):
    monkeypatch.setattr(discriminator_tail, "library_path", lambda: tmp_path / "absent.so")
    with pytest.raises(BackendUnavailable, match="run `python -m electra_kernels"):
        resolve("cuda", "cuda")
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        resolve("cuda", "cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        resolve("triton", "cpu")
    assert resolve("auto", "cpu") == resolve("reference", "cuda:0") == "reference"

"""AdamW equals a float64 transcription of the reference and, on a GPU, apex's and DeepSpeed's FusedAdam."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from electra_dist.config import OptimizerConfig
from electra_dist.engine.foreach_optimizers import ForeachAdamW
from electra_dist.engine.optimizer import build_optimizer, has_nvidia_apex

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def test_ten_updates_equal_a_float64_transcription_of_the_reference() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(50))
    optimizer = ForeachAdamW([p], **SETTINGS)
    truth, m, v = p.detach().double().numpy().copy(), np.zeros(50), np.zeros(50)
    for _ in range(10):
        grad = torch.randn(50)
        p.grad = grad.clone()
        optimizer.step()
        g = grad.double().numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        truth -= 1e-2 * (m / (np.sqrt(v) + 1e-6) + 0.01 * truth)
    np.testing.assert_allclose(p.detach().numpy(), truth, rtol=0, atol=1e-6)


def test_zero_gradient_at_lr_zero_changes_nothing() -> None:
    p = nn.Parameter(torch.randn(5))
    before = p.detach().clone()
    optimizer = ForeachAdamW([p], **{**SETTINGS, "lr": 0.0})
    p.grad = torch.zeros(5)
    optimizer.step()
    assert torch.equal(p, before)
    assert all(not state.any() for state in optimizer.state[p].values())


def test_cuda_fused_adams_equal_ours() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: apex's and DeepSpeed's FusedAdam run there")
    torch.manual_seed(0)
    start = torch.randn(1000, device="cuda")
    results = {}
    for choice in ["foreach", "deepspeed", *(["apex"] if has_nvidia_apex() else [])]:
        layer = nn.Linear(1000, 1, bias=False, device="cuda")
        layer.weight.data.copy_(start[None])
        optimizer, name = build_optimizer(layer, OptimizerConfig(implementation=choice), "cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for _ in range(10):
            layer.weight.grad = torch.randn(1, 1000, device="cuda", generator=generator)
            optimizer.step()
        results[name] = layer.weight.detach()
    first, *others = results.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)

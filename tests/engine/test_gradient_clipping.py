"""The engine clips the gradients of a step to one global norm, in every precision and at every ZeRO stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.state_fragments import owned_fragments

BETA1 = 0.9
CLIP_NORM = 0.05


def small_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 12))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("precision", "stage", "tolerance"),
    [("fp32", 0, 1e-5), ("fp32", 1, 1e-5), ("fp32", 3, 1e-5), ("bf16", 0, 0.05), ("bf16", 1, 0.05), ("bf16", 2, 0.05)],
)
def test_the_first_moments_of_the_first_step_are_those_of_the_gradients_clipped_to_the_bound(
    tiny_config: Callable[..., Path], precision: str, stage: int, tolerance: float
) -> None:
    """Adam's update hardly depends on the size of a gradient, so the test reads the moments: after the first step the
    first moment is (1 - beta1) times the clipped gradient. The expected gradient is autograd's, in fp32, over the
    same inputs, multiplied by clip_norm / norm. A bound above the norm changes nothing. The tolerance, a share of the
    norm of all moments, is the rounding of bf16 (8 bits) through four layers.
    """
    inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
    reference = copy.deepcopy(small_net())
    reference(inputs).pow(2).mean().backward()
    gradient_of = {name: parameter.grad.flatten() for name, parameter in reference.named_parameters()}
    true_norm = float(torch.cat(list(gradient_of.values())).norm())
    assert true_norm > 2 * CLIP_NORM

    for clip_norm in (CLIP_NORM, 100.0):
        settings = {
            "train.precision": precision,
            "engine.zero_stage": stage,
            "train.global_batch": 4,
            "train.micro_batch": 4,
            "optimizer.clip_norm": clip_norm,
            "optimizer.beta1": BETA1,
        }
        config = load_config(tiny_config("run", **settings), [])
        engine = Engine(small_net(), config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
        dtype = next(engine.deepspeed.module.parameters()).dtype
        engine.backward(engine.deepspeed(inputs.to(dtype)).float().pow(2).mean())
        norm, was_updated = engine.step(1e-3)

        assert was_updated
        assert norm == pytest.approx(true_norm, rel=tolerance)  # the norm before clipping is reported
        factor = min(1.0, clip_norm / true_norm)
        difference = 0.0
        for fragment in owned_fragments(engine):
            expected = (1 - BETA1) * factor * gradient_of[fragment.name]
            moment = fragment.views["exp_avg"].double()
            difference += float((moment - expected[fragment.start : fragment.start + fragment.numel]).square().sum())
        assert difference**0.5 < tolerance * (1 - BETA1) * factor * true_norm
        engine.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_in_fp16_before_it_does_not_scale_the_loss_of_an_engine_in_fp32(
    tiny_config: Callable[..., Path], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in one process, as a notebook may make them; at stage 0 DeepSpeed computes fp16 by autocast."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    settings = {"train.precision": "fp16", "engine.zero_stage": 0, "train.global_batch": 4, "train.micro_batch": 4}
    config = load_config(tiny_config("before", **settings), [])
    Engine(small_net(), config.train, config.engine, config.optimizer).close()  # type: ignore[arg-type]
    test_the_first_moments_of_the_first_step_are_those_of_the_gradients_clipped_to_the_bound(
        tiny_config, "fp32", stage, 1e-5
    )

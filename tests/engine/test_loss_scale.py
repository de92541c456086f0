"""The loss scale of fp16: its rule, and steps of real DeepSpeed engines that overflow, grow the scale or are refused.

DeepSpeed refuses fp16 on CPUs without instructions for it, although torch computes it on all of them; the tests
replace `is_fp16_supported`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from torch import nn

from electra_dist.config.load import load_config
from electra_dist.engine import zero
from electra_dist.engine.engine import Engine, check_precision
from electra_dist.engine.state_fragments import owned_fragments
from electra_dist.engine.zero import LossScale
from electra_dist.errors import UserError

STAGES = [
    (0, False),
    (1, False),
    (1, True),
    (2, False),
    (2, True),
    (3, False),
    (3, True),
]  # ZeRO stage, offload_optimizer
WITHOUT_OFFLOAD = [(stage, offload) for stage, offload in STAGES if not offload]
TOO_LARGE = 1e7  # factor of a loss whose gradients overflow fp16

BuildEngine = Callable[[int, bool], Engine]


@pytest.mark.usefixtures("one_rank")
def test_scale_follows_its_rule_and_continues_from_its_state_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is written out here; the scale under test is restored from its saved state before every step."""
    monkeypatch.setattr(zero, "STEPS_UNTIL_GROWTH", 4)
    overflows = [step in (2, 3, 4, 16, 17, 30) or step > 40 for step in range(70)]
    expected_scale = 65536.0
    updates_without_overflow = 0
    overflows_until_halving = 2
    state = None
    for overflow in overflows:
        scale = LossScale()
        scale.restore(state)
        assert scale.cur_scale == expected_scale
        if not overflow:
            scale.count_update()
            if updates_without_overflow > 0 and updates_without_overflow % 4 == 0:
                expected_scale *= 2
                overflows_until_halving = 2
            updates_without_overflow += 1
        elif expected_scale == 1:
            assert not scale.lower()
        else:
            assert scale.lower()
            updates_without_overflow = 0
            if overflows_until_halving == 1:
                expected_scale /= 2
            else:
                overflows_until_halving -= 1
        state = scale.state
    assert expected_scale == 1.0  # the end of the list reaches the minimum


@pytest.fixture
def build_engine(tiny_config: Callable[..., Path], one_rank: None, monkeypatch: pytest.MonkeyPatch) -> BuildEngine:
    """`build_engine(stage, offload)` returns an engine of a small net in fp16, always with the same weights."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr(zero, "INITIAL_SCALE", 2.0**6)
    # DeepSpeed remembers the autocast of an engine for all later ones of the process; this forgets it after the test.
    monkeypatch.setattr(torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False)
    monkeypatch.setattr(torch_autocast, "TORCH_AUTOCAST_DTYPE", None)

    def build(stage: int, offload: bool) -> Engine:
        settings = {"engine.zero_stage": stage, "engine.offload_optimizer": offload, "train.precision": "fp16"}
        config = load_config(tiny_config("run", **{"train.global_batch": 4, "train.micro_batch": 2, **settings}), [])
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 12))
        return Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]

    return build


def run_step(
    engine: Engine, number: int, factor: float = 1.0, accept: Callable[[], bool] = lambda: True
) -> tuple[float, bool]:
    """Run a step of two micro-batches of inputs drawn by `number`, with the loss times `factor`."""
    dtype = next(engine.deepspeed.module.parameters()).dtype
    for micro in range(2):
        inputs = torch.randn(2, 12, generator=torch.Generator().manual_seed(2 * number + micro)).to(dtype)
        engine.backward(engine.deepspeed(inputs).float().pow(2).mean() * factor)
    return engine.step(1e-2, accept)


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a copy of all masters and moments."""
    return {
        f"{fragment.name} {kind}": view.clone()
        for fragment in owned_fragments(engine)
        for kind, view in fragment.views.items()
    }


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that two copies of masters and moments are equal bit for bit."""
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_overflow_changes_only_the_scale_and_the_next_step_is_as_without_it(
    build_engine: BuildEngine, stage: int, offload: bool
) -> None:
    engine = build_engine(stage, offload)
    assert engine.loss_scale is not None
    engine.layout.publish()  # as after a restart; at stage 3 it gathers the parameters
    run_step(engine, 0)
    before = state_of(engine)
    scale_before = engine.loss_scale.state
    norm, was_updated = run_step(engine, 1, TOO_LARGE)
    assert math.isnan(norm) and not was_updated
    assert_equal(state_of(engine), before)
    assert engine.loss_scale.state == scale_before  # the caller decides whether it was an overflow
    assert engine.loss_scale.lower()
    norm_after, _ = run_step(engine, 2)
    assert run_step(engine, 3)[1]
    after = state_of(engine)
    engine.close()

    steady = build_engine(stage, offload)
    steady.layout.publish()
    run_step(steady, 0)
    assert run_step(steady, 2) == (norm_after, True)
    run_step(steady, 3)
    assert_equal(after, state_of(steady))
    steady.close()


@pytest.mark.parametrize(("stage", "offload"), WITHOUT_OFFLOAD)
def test_step_in_which_the_scale_grows_makes_the_same_update_as_with_a_constant_scale(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch, stage: int, offload: bool
) -> None:
    results = []
    for steps_until_growth in (1, 1000):
        monkeypatch.setattr(zero, "STEPS_UNTIL_GROWTH", steps_until_growth)
        engine = build_engine(stage, offload)
        norms = [run_step(engine, number)[0] for number in range(2)]
        assert engine.loss_scale is not None
        assert engine.loss_scale.cur_scale == (128.0 if steps_until_growth == 1 else 64.0)
        results.append((norms, state_of(engine)))
        engine.close()
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("stage", "offload"), WITHOUT_OFFLOAD)
def test_update_is_that_of_the_unscaled_gradient_and_a_refused_step_leaves_the_scale_as_it_was(
    build_engine: BuildEngine, stage: int, offload: bool
) -> None:
    engine = build_engine(stage, offload)
    assert engine.loss_scale is not None
    scale_before = engine.loss_scale.state
    _, was_updated = run_step(engine, 0, accept=lambda: False)
    assert not was_updated
    assert engine.loss_scale.state == scale_before

    norm, _ = run_step(engine, 0)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 12)).double()
    for micro in range(2):
        inputs = torch.randn(2, 12, generator=torch.Generator().manual_seed(micro)).double()
        net(inputs).pow(2).mean().backward()
    gradients = {name: parameter.grad.flatten() for name, parameter in net.named_parameters()}
    true_norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm == pytest.approx(true_norm, rel=2e-3)
    clip = max(1.0, true_norm)
    for name, moment in state_of(engine).items():
        if not name.endswith(" exp_avg"):
            continue
        true_moment = 0.1 * gradients[name.removesuffix(" exp_avg").removeprefix("module.")] / clip
        torch.testing.assert_close(moment.double(), true_moment, rtol=0.02, atol=2e-5)
    engine.close()


def test_precision_that_the_device_lacks_is_refused_with_the_ones_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: None)  # as DeepSpeed answers for most CPUs
    with pytest.raises(UserError, match=r"fp16 cannot run on this CPU; set train.precision: bf16 or fp32"):
        check_precision("fp16")
    check_precision("bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    check_precision("fp16")
    check_precision("fp32")
    with pytest.raises(UserError, match=r"bf16 cannot run on Tesla V100.*; set train.precision: fp16 or fp32"):
        check_precision("bf16")

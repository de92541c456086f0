"""What the engine assumes about the inside of DeepSpeed, one test for each assumption, on one rank.

After an update of DeepSpeed, the names of the tests that fail say what has changed, and each test what relies on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero import stage3, stage_1_and_2
from support.tiny_engine import tiny_engine

from electra_dist.engine.engine import Engine
from electra_dist.engine.zero import Bf16Stage1, Stage1And2, Stage3, Whole, ZeroLayout, layout_of
from electra_dist.version import DEEPSPEED

pytestmark = pytest.mark.usefixtures("one_rank")

PLACES = {
    "0 fp32": Whole,
    "0 bf16": Whole,
    "0 fp16": Whole,
    "1 fp32": Stage1And2,
    "1 bf16": Bf16Stage1,
    "1 fp16": Stage1And2,
    "2 fp32": Stage1And2,
    "2 bf16": Stage1And2,
    "2 fp16": Stage1And2,
    "3 fp32": Stage3,
    "3 bf16": Stage3,
    "3 fp16": Stage3,
}


def engine_at(place: str) -> Engine:
    """Return an engine of two tiny towers at "ZERO-STAGE PRECISION"."""
    stage, precision = place.split()
    _, engine = tiny_engine({"engine.zero_stage": int(stage), "train.precision": precision})
    return engine


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """A ZeRO stage and a precision."""
    return request.param


@pytest.fixture
def engine(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine at `place`. DeepSpeed refuses fp16 on most CPUs, although torch computes it on all of them."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = engine_at(place)
    yield engine
    engine.close()


def test_the_version_is_the_tested_one() -> None:
    assert deepspeed.__version__.split("+")[0] == DEEPSPEED


def test_each_stage_and_precision_has_the_optimizer_whose_layout_is_known(place: str, engine: Engine) -> None:
    layout = layout_of(engine.optimizer)
    assert type(layout) is PLACES[place]
    assert [name for name in type(layout).read if not hasattr(engine.optimizer, name)] == []


def test_masters_are_fp32_and_cover_each_parameter_once(engine: Engine) -> None:
    module = engine.deepspeed.module
    whole = {name: getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in module.named_parameters()}
    masters = list(layout_of(engine.optimizer).masters(module))
    assert {master.name: (master.start, master.numel) for master in masters} == {
        name: (0, numel) for name, numel in whole.items()
    }
    assert {master.flat.dtype for master in masters} == {torch.float32}


def test_masters_are_what_the_forward_pass_reads_once_they_are_published(place: str, engine: Engine) -> None:
    """At stages 1 and 2 `update_lp_params` publishes them; at stage 3 the three views of each group do."""
    module, layout = engine.deepspeed.module, layout_of(engine.optimizer)
    for master in layout.masters(module):
        master.flat.detach().reshape(-1).narrow(0, master.offset, master.numel).fill_(0.25)
    layout.publish()
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=place.startswith("3")):
        assert all(bool((parameter == 0.25).all()) for parameter in module.parameters())


def test_the_base_optimizer_has_the_parameter_groups_with_our_keys(engine: Engine) -> None:
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert all("is_generators" in group for group in base.param_groups)
    assert all("is_generators" in group for group in engine.optimizer.param_groups)


def test_an_optimizer_without_an_attribute_that_is_read_is_refused_by_its_name() -> None:
    class Changed(BF16_Optimizer):
        def __init__(self) -> None:
            self.optimizer = None

    with pytest.raises(
        RuntimeError, match=r"Changed has no attribute fp32_groups_flat_partition; install deepspeed=="
    ):
        layout_of(Changed())


def test_an_optimizer_of_another_class_is_refused_by_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"object has a layout that is not known; install deepspeed=="):
        layout_of(object())


def parameters_of(function: Any) -> list[str]:
    """Return the names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def test_the_sums_of_bf16_replace_methods_with_these_parameters() -> None:
    """`gradient_sums.py` replaces them on the optimizer."""
    assert parameters_of(BF16_Optimizer._update_hp_grad)[1:] == ["lp", "group_idx", "param_idx", "clear_lp_grads"]
    assert parameters_of(BF16_Optimizer.accumulate_hp_grads_and_remove_lp)[1:] == [
        "lp_param",
        "group_idx",
        "param_idx",
    ]
    assert "backward_epilogue" in dir(BF16_Optimizer)


def test_the_sums_of_bf16_find_one_flat_tensor_for_each_group() -> None:
    engine = engine_at("1 bf16")
    optimizer = engine.optimizer
    sizes = [sum(parameter.numel() for parameter in group) for group in optimizer.bf16_groups]
    for flat, size in zip(optimizer.fp32_groups_gradients_flat, sizes, strict=True):
        assert flat.dtype == torch.float32
        assert 0 <= flat.numel() - size < 32  # padding at the end
    assert [len(flags) for flags in optimizer.fp32_groups_has_gradients] == [len(g) for g in optimizer.bf16_groups]
    engine.close()


REPLACED: list[tuple[ModuleType, str]] = [
    (bf16_optimizer, "get_global_norm_of_tensors"),
    (bf16_optimizer, "clip_tensors_by_global_norm"),
    (bf16_optimizer, "is_invalid_grad_norm"),
    (stage_1_and_2, "is_invalid_grad_norm"),
    (stage_1_and_2, "mask_nan_or_inf_with_val_inplace"),
    (bf16_optimizer, "see_memory_usage"),
    (stage_1_and_2, "see_memory_usage"),
    (stage3, "see_memory_usage"),
]


@pytest.mark.parametrize(("module", "name"), REPLACED, ids=[f"{module.__name__}.{name}" for module, name in REPLACED])
def test_a_function_that_the_engine_replaces_is_called_by_this_name(module: ModuleType, name: str) -> None:
    """A name that is imported but never called would be replaced without an effect."""
    assert f"{name}(" in inspect.getsource(module)


def test_the_loss_scale_has_the_counters_that_a_checkpoint_holds() -> None:
    scaler = DynamicLossScaler(
        init_scale=4.0,
        scale_window=3,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
        dtype=torch.float16,
    )
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis) == (4.0, 0, -1, 2)
    assert parameters_of(DynamicLossScaler.update_scale) == ["self", "overflow"]


def test_the_engine_has_the_switches_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_at("1 bf16")
    assert isinstance(engine.deepspeed, DeepSpeedEngine)
    for name in ("enable_backward_allreduce", "communication_data_type", "is_gradient_accumulation_boundary"):
        assert hasattr(engine.deepspeed, name), name
    engine.close()
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine = engine_at("0 fp16")
    assert hasattr(engine.deepspeed, "torch_autocast_z0_gradscaler")
    engine.close()


def test_every_layout_has_a_place() -> None:
    assert set(PLACES.values()) == {Whole, Bf16Stage1, Stage1And2, Stage3}
    assert all(issubclass(layout, ZeroLayout) for layout in PLACES.values())

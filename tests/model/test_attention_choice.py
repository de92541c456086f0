"""The attention backend follows from config, device and a trial; dropout is in effect, and the log has all of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support import flash_definition
from support.torch_versions import IS_2_8, needs_other_kernels
from torch.nn.attention.flex_attention import BlockMask

from electra_dist.collectives import Choice
from electra_dist.config import EngineConfig
from electra_dist.config.load import load_config
from electra_dist.engine import process_group
from electra_dist.errors import UserError
from electra_dist.model import attention, attention_choice, flash_attention
from electra_dist.model.attention import BACKENDS, Flash3Mask, FlashMask, FlexMask, LayerMask
from electra_dist.model.attention_choice import attention_note, choose_attention, find_fault, find_trial_fault

CONFIGS = Path(__file__).parents[2] / "configs"
STAND_INS = Path(__file__).parents[1] / "pretended_gpu" / "packages"
LARGE = CONFIGS / "large_25pct_mask.yaml"
FP32 = ("train.precision=fp32", "engine.overlap_communication=false")
NO_DROPOUT = "model.attention_dropout=0"
ELECTRIC = "objective.name=electric"
MODERN = ["model.architecture=modern", "model.attention_dropout=0.1"]


def test_the_config_and_the_model_know_the_same_backends() -> None:
    assert [*get_args(EngineConfig.model_fields["attention"].annotation)] == ["auto", *BACKENDS]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """A function that pretends a GPU whose trials have the given faults, and returns the trials that are made."""

    def pretend(
        flash: str = "", flex: str = "", flash3: str | None = None, capability: tuple[int, int] = (9, 0)
    ) -> list[tuple[Any, ...]]:
        trials: list[tuple[Any, ...]] = []

        def find_spec(name: str) -> str | None:
            return None if name == "flash_attn_interface" and flash3 is None else name

        def trial(backend: type[LayerMask], *rest: Any) -> str:
            trials.append((backend.name, *rest))
            return {"flash": flash, "flash3": flash3 or "", "flex": flex}[backend.name]

        monkeypatch.setattr(attention_choice, "find_trial_fault", trial)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(attention.importlib.util, "find_spec", find_spec)
        return trials

    return pretend


@pytest.mark.parametrize(
    ("overrides", "faults", "backend", "reason"),
    [
        ([], {}, "flash", "have dropout"),
        ([], {"flash": "no kernel image"}, "sdpa", "width 64: no kernel image"),
        ([], {"capability": (7, 0)}, "sdpa", "compute capability 7.0"),
        ([*FP32], {}, "sdpa", "train.precision is fp32"),
        (["model.generator.num_heads=64"], {}, "sdpa", "head of width 4 "),
        ([NO_DROPOUT], {}, "flash", "compute no pairs"),
        ([NO_DROPOUT], {"flash": "no kernel image"}, "flex", "no kernel image"),
        ([NO_DROPOUT], {"flex": "ptxas is missing", "flash": "no kernel"}, "sdpa", "no kernel"),
        ([], {"flash3": ""}, "flash", "FlashAttention 3 cannot be used: it has no dropout"),
        ([NO_DROPOUT], {"flash3": ""}, "flash3", "made for this GPU"),
        ([*MODERN, NO_DROPOUT], {"flash3": ""}, "flash3", "made for this GPU"),
        ([NO_DROPOUT], {"flash3": "no kernel image"}, "flash", "width 64: no kernel image"),
        ([NO_DROPOUT], {"flash3": "", "capability": (10, 0)}, "flash", "on 9.0 only"),
        ([NO_DROPOUT, "engine.attention=flash3"], {"flash3": ""}, "flash3", "set by engine.attention"),
        ([NO_DROPOUT, *FP32], {"flex": "ptxas"}, "sdpa", "train.precision is fp32"),
        ([NO_DROPOUT, *FP32], {}, "flex", "train.precision is fp32"),
        ([*MODERN, NO_DROPOUT], {}, "flash", "windows"),
        (MODERN, {}, "flash", "windows"),
        ([*MODERN, NO_DROPOUT], {"flash": "no kernel"}, "flex", "width 64: no kernel"),
        (MODERN, {"flash": "no kernel"}, "sdpa", "it has no dropout"),
        ([*MODERN, NO_DROPOUT, *FP32], {}, "flex", "train.precision is fp32"),
        ([ELECTRIC], {}, "sdpa", "two directions"),
        (["engine.attention=sdpa"], {}, "sdpa", "set by engine.attention"),
        (["engine.attention=flash"], {}, "flash", "set by engine.attention"),
        ([NO_DROPOUT, "engine.attention=flash"], {}, "flash", "set by engine.attention"),
        ([NO_DROPOUT, "engine.attention=flex"], {}, "flex", "set by engine.attention"),
    ],
)
def test_the_choice_on_a_gpu_and_its_reason(
    overrides: list[str], faults: dict[str, Any], backend: str, reason: str, gpu: Any
) -> None:
    gpu(**faults)
    choice = choose_attention(load_config(LARGE, overrides), "cuda")
    assert choice.name == backend and reason in choice.reason


@pytest.mark.parametrize("overrides", [[], [NO_DROPOUT], [ELECTRIC]])
def test_a_cpu_takes_sdpa_without_a_trial(overrides: list[str], gpu: Any) -> None:
    trials = gpu()
    assert choose_attention(load_config(LARGE, overrides), "cpu").name == "sdpa"
    assert not trials


def test_each_width_of_a_head_is_tried_with_the_dropout_and_dtype_of_the_run(gpu: Any) -> None:
    trials = gpu()
    overrides = ["model.generator.num_heads=8", "model.attention_dropout=0.2"]
    choose_attention(load_config(LARGE, overrides), "cuda")
    assert trials == [("flash", "cuda", torch.bfloat16, width, 0.2, None) for width in (32, 64)]


def test_windows_are_tried_beside_whole_examples(gpu: Any) -> None:
    trials = gpu()
    choose_attention(load_config(LARGE, [*MODERN, "model.local_window=16"]), "cuda")
    assert [trial[-1] for trial in trials] == [None, 8]


def test_flex_is_no_candidate_for_dropout_and_needs_triton(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = gpu()
    assert "it has no dropout" in find_fault(FlexMask, load_config(LARGE), "cuda")
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert "triton" in find_fault(FlexMask, load_config(LARGE, [NO_DROPOUT]), "cuda")
    assert not trials


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_a_demand_that_the_device_cannot_meet_ends_the_run(backend: str, gpu: Any) -> None:
    gpu(flash="no kernel image", flex="no kernel image")
    config = load_config(LARGE, [f"engine.attention={backend}", NO_DROPOUT])
    with pytest.raises(UserError, match=f"{backend} needs a GPU"):
        choose_attention(config, "cpu")
    with pytest.raises(UserError, match=f"{backend} cannot be used on this GPU: .*no kernel image"):
        choose_attention(config, "cuda")


def test_flash3_needs_its_package(gpu: Any) -> None:
    trials = gpu()
    with pytest.raises(UserError, match=r"cannot be used on this GPU: it needs the package flash-attn-3, .*; set"):
        choose_attention(load_config(LARGE, ["engine.attention=flash3", NO_DROPOUT]), "cuda")
    assert not trials


@needs_other_kernels
def test_torch_runs_the_kernels_of_flash_attn_3_from_its_trial_on_until_another_backend_is_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in takes the package's place. On a CPU torch asks the package for its kernels and calls none."""
    used: list[str | None] = []

    def forward(*arguments: Any, **window: Any) -> Any:
        used.append(flash_attention.used_kernels())
        return flash_definition.forward(*arguments, **window)

    monkeypatch.setattr(flash_attention, "_forward_operator", forward)
    monkeypatch.setattr(flash_attention, "_backward_operator", flash_definition.backward)
    missing = find_trial_fault(Flash3Mask, "cpu", torch.float32, 32, 0.0, None)
    assert missing == "No module named 'flash_attn_interface'" and not used

    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    try:
        assert flash_attention.flash3_is_installed()
        assert find_trial_fault(Flash3Mask, "cpu", torch.float32, 32, 0.0, None) == ""
        assert used == ["FA3"]
        assert find_trial_fault(FlashMask, "cpu", torch.float32, 32, 0.0, None) == ""
        assert used == ["FA3", None]
        Flash3Mask.switch_on()
        assert flash_attention.used_kernels() == "FA3"
    finally:
        BACKENDS["sdpa"].switch_on()
    assert flash_attention.used_kernels() is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.attention=flash3", "model.attention_dropout=0.1"], "flash3 supports neither attention dropout nor"),
        (["engine.attention=flash3", NO_DROPOUT, ELECTRIC], "flash3 supports neither attention dropout nor"),
        (["engine.attention=flash3", NO_DROPOUT, *FP32], "flash3 computes in bf16 or fp16 only"),
        (["engine.attention=flex", "model.attention_dropout=0.1"], "flex supports neither attention dropout nor"),
        (["engine.attention=flex", NO_DROPOUT, ELECTRIC], "flex supports neither attention dropout nor"),
        (["engine.attention=flash", ELECTRIC], "flash does not support the one-directional attention"),
        (["engine.attention=flash", *FP32], "flash computes in bf16 or fp16 only"),
    ],
)
def test_a_demand_that_no_device_can_meet_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(LARGE, overrides)


def dense_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
    """FlexAttention by plain operations, which have a backward pass on a CPU."""
    index = torch.arange(query.shape[2])
    rows = torch.arange(len(query))[:, None, None, None]
    seen = block_mask.mask_mod(rows, torch.zeros_like(rows), index[None, None, :, None], index)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def nan_gradients(query: torch.Tensor, *rest: Any, **mask: Any) -> torch.Tensor:
    """The right output, whose gradient of the query is NaN."""
    query.register_hook(lambda grad: grad * torch.nan)
    return dense_flex(query, *rest, **mask)


def test_the_trial_of_flex_passes_where_both_agree_and_names_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(function: Any) -> str:
        monkeypatch.setattr(attention, "flex_function", lambda compiled: function)
        return find_trial_fault(FlexMask, "cpu", torch.float32, 64, 0.0, None)

    own_fault = find_trial_fault(FlexMask, "cpu", torch.float32, 64, 0.0, None)
    if IS_2_8:  # it has these gradients
        assert own_fault == ""
    else:
        assert "does not support backward on CPU" in own_fault
    assert fault(dense_flex) == ""
    assert fault(lambda q, k, v, block_mask: dense_flex(q, k, 2 * v, block_mask)).startswith("it differs by")
    assert fault(lambda q, k, v, block_mask: dense_flex(q, k, v, block_mask) * torch.nan) == (
        "it differs by nan from its definition, more than 0.05"
    )
    assert fault(nan_gradients) == "it differs by nan from its definition, more than 0.05"


def test_a_trial_does_not_depend_on_torch_s_own_attention_whose_libraries_may_be_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(flash_attention, "_forward_operator", flash_definition.forward)
    monkeypatch.setattr(flash_attention, "_backward_operator", flash_definition.backward)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    assert find_trial_fault(FlashMask, "cpu", torch.float32, 32, 0.1, None) == ""


@pytest.mark.parametrize("reach", [None, 40])
def test_the_trial_of_flash_passes_where_both_agree_and_names_what_breaks(
    monkeypatch: pytest.MonkeyPatch, reach: int | None
) -> None:
    def fault(forward: Any = flash_definition.forward, backward: Any = flash_definition.backward) -> str:
        monkeypatch.setattr(flash_attention, "_forward_operator", forward)
        monkeypatch.setattr(flash_attention, "_backward_operator", backward)
        return find_trial_fault(FlashMask, "cpu", torch.float32, 32, 0.1, reach)

    def without_dropout(*args: Any, **window: Any) -> Any:
        return flash_definition.forward(*args[:7], 0.0, *args[8:], **window)

    def without_scale(*args: Any, **window: Any) -> Any:
        out, *rest = flash_definition.forward(*args, **window)
        return out * (1 - args[7]), *rest

    whole_rows = [torch.tensor([0, 256, 512], dtype=torch.int32)] * 2

    def across_examples(*args: Any, **window: Any) -> Any:
        return flash_definition.forward(*args[:3], *whole_rows, *args[5:], **window)

    def back_across_examples(*args: Any, **window: Any) -> Any:
        return flash_definition.backward(*args[:6], *whole_rows, *args[8:], **window)

    def in_whole_examples(*args: Any, **window: Any) -> Any:
        return flash_definition.forward(*args)

    def back_in_whole_examples(*args: Any, **window: Any) -> Any:
        return flash_definition.backward(*args)

    def wrong_gradient(*args: Any, **window: Any) -> Any:
        dq, dk, dv = flash_definition.backward(*args, **window)
        return dq, dk, dv * torch.nan

    assert fault() == ""
    assert "dropout of 0.1 is not in effect" in fault(without_dropout)
    assert "dropout of 0.1 is not in effect" in fault(without_scale)
    assert fault(across_examples, back_across_examples).startswith("it differs by")
    assert fault(backward=wrong_gradient) == "it differs by nan from its definition, more than 0.05"
    assert fault(in_whole_examples, back_in_whole_examples).startswith("it differs by") == (reach is not None)
    assert "CPU" in fault(torch.ops.aten._flash_attention_forward)


@pytest.mark.parametrize(
    ("backend", "device", "overrides", "end"),
    [
        ("flash", "cuda", [], "dropout 0.1, gradients deterministic"),
        ("flash", "cuda", ["engine.deterministic=false"], "dropout 0.1, gradients not deterministic, because"),
        ("flex", "cuda", [NO_DROPOUT], "dropout 0, gradients deterministic"),
        ("sdpa", "cuda", [], "dropout 0.1, gradients not deterministic, because"),
        ("sdpa", "cpu", ["engine.deterministic=false"], "dropout 0.1, gradients deterministic"),
    ],
)
def test_the_log_has_backend_reason_dropout_and_determinism(
    backend: str, device: str, overrides: list[str], end: str
) -> None:
    note = attention_note(Choice(backend, "the reason"), load_config(LARGE, overrides), device)
    assert note.startswith(f"attention: {backend} (the reason), {end}")


@pytest.mark.parametrize(("enabled", "has_gpu"), [(True, True), (False, True), (True, False)])
def test_the_deterministic_mode_is_for_gpus_and_fills_no_memory(
    enabled: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv(process_group.CUBLAS_VARIABLE, "unset by the test")
    monkeypatch.delenv(process_group.CUBLAS_VARIABLE)
    is_on = enabled and has_gpu
    try:
        process_group.set_deterministic_mode(enabled)
        assert torch.are_deterministic_algorithms_enabled() == is_on
        assert torch.utils.deterministic.fill_uninitialized_memory == (not is_on)
        assert process_group.os.environ.get(process_group.CUBLAS_VARIABLE) == (":4096:8" if is_on else None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_new_keys_are_no_part_of_the_identity() -> None:
    overrides = ["engine.deterministic=false", "engine.attention=flash"]
    assert load_config(LARGE, overrides).identity() == load_config(LARGE).identity()


def test_large_fast_differs_from_the_paper_in_attention_dropout_and_the_generators_depth_alone() -> None:
    same = ["run_dir=x", NO_DROPOUT, "model.generator.num_layers=12"]
    assert load_config(CONFIGS / "large_fast.yaml", ["run_dir=x"]) == load_config(LARGE, same)

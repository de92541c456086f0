"""Building the optimizer: which parameters have weight decay, and which implementation a machine can run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import deepspeed.ops.adam
import pytest
import torch
from support.real_runs import REPOSITORY
from torch import nn

from electra_dist import collectives
from electra_dist.collectives import Choice
from electra_dist.config import OptimizerConfig
from electra_dist.config.load import load_config
from electra_dist.engine import optimizer as module_under_test
from electra_dist.engine.engine import Engine
from electra_dist.engine.optimizer import (
    build_optimizer,
    choose_implementation,
    has_nvidia_apex,
    misaligned_parameters,
    parameter_groups,
)
from electra_dist.errors import UserError
from electra_dist.model.towers import ElectraTowers


def test_embeddings_and_weights_have_decay_and_layer_norms_and_biases_have_none() -> None:
    module = nn.ModuleDict({"word": nn.Embedding(4, 3), "norm": nn.LayerNorm(3), "dense": nn.Linear(3, 3)})
    decayed, plain = parameter_groups(module, 0.01)
    assert {id(p) for p in decayed["params"]} == {id(module["word"].weight), id(module["dense"].weight)}
    assert {id(p) for p in plain["params"]} == {
        id(module["norm"].weight),
        id(module["norm"].bias),
        id(module["dense"].bias),
    }
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)


def test_another_package_named_apex_is_not_mistaken_for_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def only_the_name(name: str) -> importlib.machinery.ModuleSpec | None:
        if name == "apex":
            return importlib.machinery.ModuleSpec("apex", None)
        return real(name)

    monkeypatch.setattr(module_under_test.importlib.util, "find_spec", only_the_name)
    assert not has_nvidia_apex()


class WithoutNvcc:
    """DeepSpeed's FusedAdam on a machine that cannot compile it."""

    def __init__(self, *_: object, **__: object) -> None:
        raise FileNotFoundError("[Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'\nninja: stopped")


class Compiled:
    """DeepSpeed's FusedAdam on a machine that has compiled it."""

    def __init__(self, groups: list, **_: object) -> None:
        self.param_groups = groups


REASON = (
    "DeepSpeed's FusedAdam cannot be used: FileNotFoundError: "
    "[Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"
)


def test_a_gpu_machine_without_a_cuda_compiler_runs_the_optimizer_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", WithoutNvcc)
    config = OptimizerConfig()
    _, name = build_optimizer(nn.Linear(2, 2), config, "cuda")
    assert name == "ForeachAdamW (electra-dist)"
    assert choose_implementation(config, "cuda") == Choice("foreach", REASON)
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", Compiled)
    assert choose_implementation(config, "cuda") == Choice("deepspeed")


@pytest.mark.usefixtures("one_rank")
def test_the_reason_for_another_optimizer_is_noted_for_the_log_and_all_ranks_take_it(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank could run DeepSpeed's optimizer, but another one of the two cannot."""
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", Compiled)
    monkeypatch.setattr(collectives, "gather", lambda own: [own, Choice("foreach", REASON)])
    config = load_config(tiny_config(), [])
    engine = Engine.__new__(Engine)
    engine.device = module_under_test.torch.device("cuda")
    engine.notes = []
    assert engine._choose_implementation(config.optimizer, config.engine) == "foreach"
    assert engine.notes == [f"optimizer: foreach, because {REASON}"]
    engine.notes = []
    monkeypatch.setattr(collectives, "gather", lambda own: [own, Choice("apex")])
    assert engine._choose_implementation(config.optimizer, config.engine) == "foreach"
    assert engine.notes == ["optimizer: foreach, because rank 0 would use deepspeed, but rank 1 apex"]
    engine.notes = []
    monkeypatch.setattr(collectives, "gather", lambda own: [own, own])
    assert engine._choose_implementation(config.optimizer, config.engine) == "deepspeed"
    assert engine.notes == []


@pytest.mark.parametrize("implementation", ["apex", "deepspeed"])
def test_a_demanded_optimizer_that_is_missing_is_one_line_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", WithoutNvcc)
    config = OptimizerConfig(implementation=implementation)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"cannot be used: .*; set optimizer.implementation: auto, or install"
    ) as error:
        build_optimizer(nn.Linear(2, 2), config, "cuda")
    assert "\n" not in str(error.value)


def test_an_apex_that_cannot_be_imported_is_noted_and_deepspeeds_optimizer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", Compiled)
    monkeypatch.setattr(module_under_test, "has_nvidia_apex", lambda: True)
    choice = choose_implementation(OptimizerConfig(), "cuda")
    assert choice == Choice("deepspeed", "NVIDIA's apex cannot be used: ModuleNotFoundError: No module named 'apex'")


def test_an_offloaded_optimizer_gets_tensors_in_host_memory_and_so_is_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", Compiled)
    choice = choose_implementation(OptimizerConfig(), "cuda", updates_on_host=True)
    assert choice.name == "foreach" and "host memory" in choice.reason
    assert choose_implementation(OptimizerConfig(), "cpu", updates_on_host=True) == Choice("foreach")
    with pytest.raises(UserError, match=r"engine.offload_optimizer .* set optimizer.implementation: auto"):
        choose_implementation(OptimizerConfig(implementation="deepspeed"), "cuda", updates_on_host=True)


def test_the_engine_offloads_only_where_deepspeed_does(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ZeRO stage 0 DeepSpeed ignores `offload_optimizer`, and the optimizer updates GPU memory."""
    monkeypatch.setattr(deepspeed.ops.adam, "FusedAdam", Compiled)
    monkeypatch.setattr(collectives, "gather", lambda own: [own])
    chosen = []
    for stage in (0, 1, 2, 3):
        settings = {"engine.zero_stage": stage, "engine.offload_optimizer": True}
        config = load_config(tiny_config("run", **settings), [])
        engine = Engine.__new__(Engine)
        engine.device = module_under_test.torch.device("cuda")
        engine.notes = []
        chosen.append(engine._choose_implementation(config.optimizer, config.engine))
    assert chosen == ["deepspeed", "foreach", "foreach", "foreach"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("vocab_size", [30_522, 50_265, 119_547])
def test_every_parameter_begins_at_a_multiple_of_16_bytes(
    tiny_config: Callable[..., Path], vocab_size: int, stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed lays the parameters of a group one after another; GPU kernels read and write them by 16 bytes."""
    monkeypatch.setattr(module_under_test, "_DEVICES_THAT_NEED_ALIGNMENT", ("cpu", "cuda"))
    settings = {"train.precision": precision, "engine.zero_stage": stage, "train.global_batch": 4}
    config = load_config(tiny_config("run", **settings, **{"train.micro_batch": 4}), [])
    module = nn.Sequential(nn.Linear(1, vocab_size), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    engine = Engine(module, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    misaligned = misaligned_parameters(module)
    engine.close()
    assert misaligned == []
    assert all(p.data_ptr() % 16 == 0 for p in module.parameters() if p.numel() > 1)


@pytest.mark.parametrize(
    "name", ["small", "base_size", "large_25pct_mask", "large_fast", "modern_base", "modern_large"]
)
def test_the_parameters_of_shipped_configs_begin_at_multiples_of_16_bytes(name: str) -> None:
    """A single element may lie anywhere, because no kernel reads 16 bytes of it."""
    config = load_config(REPOSITORY / "configs" / f"{name}.yaml", [])
    with torch.device("meta"):
        towers = ElectraTowers(config.model, config.objective)
    for group in parameter_groups(towers, 0.01, aligned=True):
        offset = 0
        for parameter in group["params"]:
            assert offset % 8 == 0 or parameter.numel() == 1
            offset += parameter.numel()

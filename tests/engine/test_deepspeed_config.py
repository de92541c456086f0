"""The DeepSpeed config: no waits for the GPU by timers, fp32 exchange on GPUs, silence, and no needless reduction."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support.real_runs import free_port
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.engine import engine as engine_module
from electra_dist.engine.engine import Engine, deepspeed_config
from electra_dist.errors import UserError

WORKER = Path(__file__).parent / "gradient_exchange_worker.py"


@pytest.mark.multiproc
def test_on_gpus_the_sum_over_ranks_is_fp32_at_every_stage_and_on_cpus_it_is_that_in_fp16_only() -> None:
    """The worker's ranks have the gradients 1 and 2^-9, whose sum bf16 rounds to 1; in fp16 they have 1 and 2^-12."""
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                env={**os.environ, **place, **address, "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], output[0][-3000:] + output[1][-3000:]
    for lines in output:
        sums = [line.split()[1:] for line in lines.splitlines() if line.startswith("MEASURED")]
        assert sums == [
            *(["bf16", "cpu", str(stage), "1.0"] for stage in (1, 2, 3)),
            *(["bf16", "cuda", str(stage), str(1 + 2**-9)] for stage in (1, 2, 3)),
            *(["fp16", device, str(stage), str(1 + 2**-12)] for device in ("cpu", "cuda") for stage in (1, 2, 3)),
        ]


def config_of(tiny_config: Callable[..., Path], precision: str, stage: int) -> Config:
    """Return the config of a tiny run of two micro-batches a step."""
    settings = {"train.precision": precision, "engine.zero_stage": stage, "optimizer.clip_norm": 1e9}
    return load_config(tiny_config("run", **{"train.global_batch": 4, "train.micro_batch": 2, **settings}), [])


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp32", 1), ("fp32", 3), ("bf16", 0)])
def test_runs_whose_gradients_are_fp32_have_the_same_deepspeed_config_on_all_devices(
    tiny_config: Callable[..., Path], precision: str, stage: int
) -> None:
    config = config_of(tiny_config, precision, stage)
    on_cpu, on_gpu = (deepspeed_config(config.train, config.engine, 1.0, device) for device in ("cpu", "cuda"))
    assert on_cpu == on_gpu
    assert "communication_data_type" not in on_gpu


@pytest.mark.parametrize(
    ("precision", "stage", "key"), [("bf16", 2, "zero_stage: 1"), ("bf16", 0, "zero_stage: 1"), ("fp32", 1, "bf16")]
)
def test_overlap_is_refused_where_the_ranks_have_no_fp32_sums_of_whole_groups(
    tiny_config: Callable[..., Path], precision: str, stage: int, key: str
) -> None:
    settings = {"train.precision": precision, "engine.zero_stage": stage, "engine.overlap_communication": True}
    with pytest.raises(UserError, match=key):
        load_config(tiny_config("run", **settings), [])


def test_overlap_changes_neither_the_identity_nor_the_config_of_one_that_is_off(
    tiny_config: Callable[..., Path],
) -> None:
    config = config_of(tiny_config, "bf16", 1)
    overlapping = config.model_copy(
        update={"engine": config.engine.model_copy(update={"overlap_communication": True})}
    )
    assert overlapping.identity() == config.identity()
    on_cpu = deepspeed_config(config.train, config.engine, 1.0, "cpu")
    assert "communication_data_type" not in on_cpu
    assert deepspeed_config(config.train, overlapping.engine, 1.0, "cpu")["communication_data_type"] == "fp32"


class WaitCounter(TorchDispatchMode):
    """Counts operations for whose result the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")
        self.count += operator.overloadpacket.__name__ in waits
        return operator(*args, **(kwargs or {}))


def build(config: Config, monkeypatch: pytest.MonkeyPatch, device_type: str) -> Engine:
    """Return an engine of a small net with the DeepSpeed config of a kind of device, on this CPU."""
    monkeypatch.setattr(
        engine_module,
        "deepspeed_config",
        lambda train, section, clip, _: deepspeed_config(train, section, clip, device_type),
    )
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 12))
    return Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]


def micro_batch(engine: Engine, number: int) -> torch.Tensor:
    """Run forward and backward on inputs drawn by `number`; return the loss."""
    dtype = next(engine.deepspeed.module.parameters()).dtype
    inputs = torch.randn(2, 12, generator=torch.Generator().manual_seed(number)).to(dtype)
    loss = engine.deepspeed(inputs).float().pow(2).mean()
    engine.backward(loss)
    return loss.detach()


def train(engine: Engine, num_steps: int) -> list[float]:
    """Return the loss of every micro-batch, and the norm of every step."""
    numbers = []
    for step in range(num_steps):
        numbers.append(float(micro_batch(engine, 2 * step)))
        numbers.append(float(micro_batch(engine, 2 * step + 1)))
        norm, was_updated = engine.step(1e-2)
        assert was_updated
        numbers.append(norm)
    return numbers


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1), ("bf16", 2)])
def test_no_micro_batch_waits_for_the_device_and_no_timer_does(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, precision: str, stage: int
) -> None:
    engine = build(config_of(tiny_config, precision, stage), monkeypatch, "cuda")
    synchronizations: list[int] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: synchronizations.append(1))
    waits_in_micro_batches = 0
    for step in range(4):  # DeepSpeed's timer began to wait in the third step
        for micro in range(2):
            with WaitCounter() as counter:
                micro_batch(engine, 2 * step + micro)
            waits_in_micro_batches += counter.count
        engine.step(1e-2)
    assert (waits_in_micro_batches, len(synchronizations)) == (0, 0)
    engine.close()


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_printed_while_an_engine_is_built(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in (1, 2, 3):
        build(config_of(tiny_config, "bf16", stage), monkeypatch, "cpu")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("one_rank")
def test_one_gpu_reduces_nothing_at_stage_1_and_computes_the_same(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_config, "bf16", 1)
    engine = build(config, monkeypatch, "cuda")
    reduced: list[int] = []
    monkeypatch.setattr(engine.deepspeed, "allreduce_bucket", lambda *_: reduced.append(1))
    numbers = train(engine, 3)
    assert reduced == []
    engine.close()
    monkeypatch.undo()
    reducing = build(config, monkeypatch, "cuda")
    reducing.deepspeed.enable_backward_allreduce = True
    assert train(reducing, 3) == numbers


@pytest.mark.usefixtures("one_rank")
def test_gradients_added_to_their_sum_at_once_give_the_same_bits(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(train_section, section, clip, _device):
        config = deepspeed_config(train_section, section, clip, "cuda")
        del config["bf16"]["immediate_grad_update"]
        return config

    config = config_of(tiny_config, "bf16", 1)
    at_once = build(config, monkeypatch, "cuda")
    assert at_once.optimizer.immediate_grad_update
    numbers = train(at_once, 3)
    monkeypatch.setattr(engine_module, "deepspeed_config", late)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 12))
    later = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    assert not later.optimizer.immediate_grad_update
    assert train(later, 3) == numbers

"""`train.micro_batch: auto` chooses the largest micro-batch that fits the measured memory and keeps it on restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from support.real_runs import REPOSITORY

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.engine import micro_batch
from electra_dist.engine.micro_batch import PredictRows, with_micro_batch
from electra_dist.errors import UserError
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.planning.activation_memory import micro_batch_limit
from electra_dist.run.folder import MICRO_BATCH_FILE
from electra_dist.train.run import _predict_rows

CPU = torch.device("cpu")
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture
def config(tiny_config: Callable[..., Path], tmp_path: Path) -> Config:
    """The config of a tiny run with 24 rows a step and an automatic micro-batch."""
    (tmp_path / "run").mkdir()
    return load_config(tiny_config("run", **{"train.global_batch": 24, "train.micro_batch": "auto"}), [])


@pytest.fixture
def module(config: Config) -> Objective:
    """The objective of that run."""
    return build_objective(config.model, config.objective, SPECIAL, config.seed)


def state_bytes(module: Objective) -> int:
    """Return the bytes of weights, gradients, master copy and two moments: fp32, ZeRO-1, one rank."""
    return 20 * sum(parameter.numel() for parameter in module.parameters())


def test_auto_is_one_row_until_it_is_measured_and_does_not_change_the_runs_identity(config: Config) -> None:
    assert config.train.micro_batch == 1 and config.train.largest_micro_batch
    assert Config.model_validate(config.model_dump()) == config
    fixed = config.train.model_copy(update={"micro_batch": 8, "largest_micro_batch": False})
    assert config.model_copy(update={"train": fixed}).identity() == config.identity()


def test_memory_is_a_constant_plus_an_amount_for_each_row(config: Config, module: Objective) -> None:
    measure = micro_batch._rows_to_bytes(config, module, CPU)
    one, two = measure(1), measure(2)
    assert one is not None and two is not None
    ids_BS = torch.randint(5, config.model.vocab_size, (6, config.data.seq_len))
    ids_BS[:, 0], ids_BS[:, -1] = SPECIAL.cls, SPECIAL.sep
    six = micro_batch._kept_on_cpu(module, StepInput(ids_BS, torch.arange(6), 0, 1, 0.1, 0.1))
    assert 0 < two - one < one
    assert six == pytest.approx(one + 5 * (two - one), rel=0.02)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("rows", "expected"), [(1.5, 1), (2.5, 2), (5.9, 4), (7.0, 6), (100.0, 24)])
def test_auto_is_the_largest_divisor_of_the_batch_that_fits(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch, rows: float, expected: int
) -> None:
    monkeypatch.setattr(micro_batch, "_rows_to_bytes", lambda *_: lambda rows: 2_000_000 + 1_000_000 * rows)
    free = (state_bytes(module) + 2_000_000 + 1_000_000 * rows) / 0.9
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: free)
    train = with_micro_batch(config, module, CPU).train
    assert (train.micro_batch, train.global_batch, train.largest_micro_batch) == (expected, 24, False)


@pytest.mark.usefixtures("one_rank")
def test_a_restart_uses_the_stored_micro_batch_whatever_memory_is_free(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = with_micro_batch(config, module, CPU).train.micro_batch
    assert first == 24  # the whole batch of so small a model fits
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: 0.0)
    assert with_micro_batch(config, module, CPU).train.micro_batch == first
    assert list(json.loads((Path(config.run_dir) / MICRO_BATCH_FILE).read_text()).values()) == [24]
    (Path(config.run_dir) / MICRO_BATCH_FILE).unlink()
    with pytest.raises(UserError, match="not one row fits"):
        with_micro_batch(config, module, CPU)


class GpuAllocator:
    """Peak memory of ELECTRA-Large on a GPU, in GB, as it was measured: 1 row 1.183, 2 rows 1.201, then 0.517 a row.

    With few rows the peak comes at the end of the backward pass, when the gradients of all parameters exist. With more
    rows it comes at the end of the forward pass.
    """

    def __init__(self, largest_rows: int = 10**9) -> None:
        self.largest_rows = largest_rows
        self.measured: list[int] = []

    def peak(self, _module: Objective, given: StepInput) -> int:
        """Return the bytes for the rows of the input; more than `largest_rows` are out of memory."""
        rows = len(given.ids_BS)
        self.measured.append(rows)
        if rows > self.largest_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int(1e9 * max(1.165 + 0.018 * rows, 0.1 + 0.517 * rows))


def largest_on_gpu(
    config: Config,
    module: Objective,
    monkeypatch: pytest.MonkeyPatch,
    allocator: GpuAllocator,
    rows: int,
    free_gb: float,
    predict_rows: PredictRows | None = None,
) -> int:
    """Return what `auto` takes for `rows` rows per rank on a GPU, of which tensors on "meta" are the stand-in."""
    for measure in ("_peak_on_gpu", "_kept_on_cpu"):
        monkeypatch.setattr(micro_batch, measure, allocator.peak)
    monkeypatch.setattr(micro_batch, "_free_bytes", lambda device: 1e9 * free_gb)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": rows})})
    return micro_batch._largest(config, module, torch.device("meta"), predict_rows)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("rows", "free_gb", "expected"), [(256, 80, 128), (240, 80, 120), (256, 141, 128), (12, 80, 12)]
)
def test_on_a_gpu_the_gradients_of_the_backward_pass_do_not_hide_what_a_row_takes(
    config: Config, module: Objective, monkeypatch: pytest.MonkeyPatch, rows: int, free_gb: float, expected: int
) -> None:
    allocator = GpuAllocator()
    found = largest_on_gpu(config, module, monkeypatch, allocator, rows, free_gb)
    assert found == expected
    assert 1e-9 * GpuAllocator().peak(module, StepInput(torch.zeros(found, 1), CPU, 0, 0, 1, 1)) < 0.9 * free_gb  # type: ignore[arg-type]
    assert allocator.measured == [min(16, rows) // 2, min(16, rows)]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("predicted", "expected", "measured"),
    [
        (130, 128, [65, 130]),
        (200, 128, [100, 200, 50, 100]),  # 200 rows are out of memory
        (4, 128, [8, 16]),  # with few rows the gradients would hide what a row takes
        (1000, 128, [128, 256, 64, 128]),  # no more than the rows of a step
    ],
)
def test_on_a_gpu_the_measurement_starts_from_the_predicted_rows(
    config: Config,
    module: Objective,
    monkeypatch: pytest.MonkeyPatch,
    predicted: int,
    expected: int,
    measured: list[int],
) -> None:
    allocator = GpuAllocator(largest_rows=150)
    asked: list[tuple[float, int]] = []

    def predict_rows(_config: Config, free_bytes: float, world_size: int) -> int:
        asked.append((free_bytes, world_size))
        return predicted

    assert largest_on_gpu(config, module, monkeypatch, allocator, 256, 80, predict_rows) == expected
    assert allocator.measured == measured
    assert asked == [(80e9, 1)]


def test_prediction_of_a_run_is_that_of_its_plan() -> None:
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml", ["plan.num_gpus=4"])
    assert _predict_rows(config, 80e9, 4) == micro_batch_limit(config, 80).fitting_rows > 16


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("largest_rows", "free_gb", "expected", "measured"),
    [
        (12, 8, 8, [8, 16, 4, 8]),  # 16 rows are out of memory
        (12, 4, 4, [8, 4, 8]),  # 8 rows leave no room for the state
        (1, 2, 1, [8, 4, 2, 1, 2, 1]),
        (0, 80, 0, [8, 4, 2, 1, 1]),
        (16, 1, 0, [8, 4, 2, 1, 1]),
    ],
)
def test_on_a_small_gpu_fewer_rows_are_measured(
    config: Config,
    module: Objective,
    monkeypatch: pytest.MonkeyPatch,
    largest_rows: int,
    free_gb: float,
    expected: int,
    measured: list[int],
) -> None:
    allocator = GpuAllocator(largest_rows)
    assert largest_on_gpu(config, module, monkeypatch, allocator, 64, free_gb) == expected
    assert allocator.measured == measured


def test_ranks_of_a_node_share_its_memory_whichever_launcher_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(micro_batch.psutil, "virtual_memory", lambda: SimpleNamespace(available=64.0))
    assert micro_batch._free_bytes(CPU) == 64
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_SIZE", "4")  # of DeepSpeed
    assert micro_batch._free_bytes(CPU) == 16
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of torchrun
    assert micro_batch._free_bytes(CPU) == 32

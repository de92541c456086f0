"""The row whose loss is an outlier in a step is found; inputs for FlashAttention have the bounds of their examples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ObjectiveConfig
from electra_dist.data.loader import RowBatch
from electra_dist.data.receipt import Receipt
from electra_dist.engine.zero import LossScale
from electra_dist.model.attention import FlashMask, LayerMask, SdpaMask
from electra_dist.model.flash_attention import example_bounds
from electra_dist.objectives.base import Objective, Schedules, StepInput, Sums
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train.evaluator import Evaluator
from electra_dist.train.step import TrainStep, outlier

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


class Recorder:
    """Fake of the engine that records the input and the random state of every forward pass, and computes nothing."""

    device = torch.device("cpu")
    loss_scale = None

    def __init__(self, attention: type[LayerMask], **objective: Any) -> None:
        self.module = Objective.__new__(ReplacedTokenDetection)  # without networks
        torch.nn.Module.__init__(self.module)
        self.module.objective = ObjectiveConfig(**objective)
        self.module.special = SPECIAL
        self.module.attention = attention
        self.inputs: list[StepInput] = []
        self.draws: list[float] = []

    def forward(self, given: StepInput) -> Any:
        self.inputs.append(given)
        self.draws.append(torch.rand(()).item())
        zeros_BS = torch.zeros(given.ids_BS.shape)
        sums = torch.zeros(len(Sums._fields), dtype=torch.float64)
        return SimpleNamespace(
            loss=torch.zeros(()), sums=sums, rtd_logit_BS=zeros_BS, label_BS=zeros_BS, is_real_BS=zeros_BS > 0
        )

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(
        self, learning_rate: float, accept: Any, generator_learning_rate: float | None, numbers: Any
    ) -> tuple[float, bool]:
        return numbers.read_with(torch.tensor(0.0)), accept()


def packed_ids(num_rows: int) -> np.ndarray:
    """Rows of 16 tokens, each with one to four examples and pads."""
    ids = np.full((num_rows, 16), 9, np.uint16)
    for number, row in enumerate(ids):
        row[: 4 * (1 + number % 4) : 4] = SPECIAL.cls
        row[16 - number % 3 :] = SPECIAL.pad
    return ids


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


@pytest.mark.parametrize("attention", [FlashMask, SdpaMask])
def test_every_micro_batch_has_the_bounds_of_its_own_rows_and_a_seed_of_its_own(
    attention: type[LayerMask], one_rank: None
) -> None:
    ids = packed_ids(12)
    batch = RowBatch(step=3, row0=24, ids=ids, row_ids=np.arange(12), receipt=Receipt())
    draws = []
    for _ in range(2):
        engine = Recorder(attention)
        step: Any = TrainStep(engine, 5, 4, Schedules(engine.module.objective, 10))  # type: ignore[arg-type]
        step(batch, 1e-4)
        step.row_losses(batch)
        draws.append(engine.draws)
    spans = [slice(0, 4), slice(4, 8), slice(8, 12), *(slice(row, row + 1) for row in range(12))]
    for given, rows in zip(engine.inputs, spans, strict=True):
        assert given.row_B.tolist() == list(range(24 + rows.start, 24 + rows.stop))
        assert torch.equal(given.ids_BS, torch.from_numpy(ids[rows].astype(np.int64)))
        if attention is SdpaMask:
            assert given.bounds is None
        else:
            assert given.bounds is not None and given.bounds.longest == 16
            assert torch.equal(given.bounds.cu_seqlens, example_bounds(ids[rows], SPECIAL).cu_seqlens)
    assert draws[0] == draws[1]  # what dropout draws from torch's generator repeats with the step
    assert len(set(draws[0][:3])) == 3


def test_an_evaluation_has_the_bounds_of_its_rows_and_of_its_padding(one_rank: None) -> None:
    ids = packed_ids(6)
    engine: Any = Recorder(FlashMask)
    evaluator: Any = Evaluator(cache=None, num_rows=6, micro_batch=4, seed=1, special=SPECIAL)  # type: ignore[arg-type]
    evaluator._score(engine, evaluator._inputs(engine, ids))
    padded = np.concatenate([ids, np.full((2, 16), SPECIAL.pad, np.uint16)])
    for given, rows in zip(engine.inputs, (slice(0, 4), slice(4, 8)), strict=True):
        assert torch.equal(given.bounds.cu_seqlens, example_bounds(padded[rows], SPECIAL).cu_seqlens)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_per_replica_losses_are_the_means_of_the_micro_batches_averaged_over_all_ranks(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """With scales 1 / (tokens of the micro-batch x micro-batches of all ranks), the losses of all forward passes of
    all ranks add up to the average of their means. Here a rank has two micro-batches of different lengths.
    """
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    engine: Any = Recorder(SdpaMask, loss_mean="per_replica", mask_prob=0.15)
    engine.num_micro_batches = 2
    ids = packed_ids(8)
    ids[4:, 8:] = SPECIAL.pad
    step = TrainStep(engine, 5, 4, Schedules(engine.module.objective, 10))
    step(RowBatch(3, 0, ids, np.arange(8), Receipt()), 1e-3)

    first, second = engine.inputs
    for given, rows in ((first, ids[:4]), (second, ids[4:])):
        num_real = int((rows != SPECIAL.pad).sum())
        num_masked = sum(max(1, round(0.15 * int((row != SPECIAL.pad).sum()))) for row in rows)
        assert float(given.second_scale) == pytest.approx(1 / (num_real * 2 * num_ranks))
        assert float(given.first_scale) == pytest.approx(1 / (num_masked * 2 * num_ranks))
    assert float(first.second_scale) != float(second.second_scale)


class Scoring(Recorder):
    """Fake of an engine that gives fixed logits and labels, and says which tokens are real."""

    def __init__(self, logit_RS: torch.Tensor, label_RS: torch.Tensor) -> None:
        super().__init__(SdpaMask)
        self.logit_RS = logit_RS
        self.label_RS = label_RS

    def train(self, mode: bool) -> None:
        pass

    def forward(self, given: StepInput) -> Any:
        sums = torch.zeros(len(Sums._fields), dtype=torch.float64)
        sums[Sums._fields.index("rtd_weight")] = 1.0
        is_real_BS = given.ids_BS != SPECIAL.pad
        rows = given.row_B.clamp(max=len(self.logit_RS) - 1)  # rows of padding fill the last round
        logit_BS = self.logit_RS[rows]
        return SimpleNamespace(sums=sums, rtd_logit_BS=logit_BS, label_BS=self.label_RS[rows], is_real_BS=is_real_BS)


def test_pads_count_neither_in_the_auc_of_an_evaluation_nor_in_its_other_measures(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pads have the label "original" and here the highest scores, as a network may give them. The expected measures
    count pairs and tokens over the real tokens only. Six rows fill two rounds of four with two rows of padding.
    """
    ids = packed_ids(6)
    generator = torch.Generator().manual_seed(1)
    is_real = torch.from_numpy(ids != SPECIAL.pad)
    label = (torch.rand(ids.shape, generator=generator) < 0.3) & is_real
    logit = torch.randn(ids.shape, generator=generator) + label
    logit[~is_real] = 9.0
    monkeypatch.setattr(torch.distributed, "all_gather", lambda tensors, tensor: tensors[0].copy_(tensor))
    monkeypatch.setattr(Evaluator, "_read_rows", lambda *_: ids)
    evaluator = Evaluator(cache=None, num_rows=6, micro_batch=4, seed=1, special=SPECIAL)  # type: ignore[arg-type]
    engine: Any = Scoring(logit, label)

    record = evaluator.run(engine, step=10).record

    replaced, original = logit[is_real & label], logit[is_real & ~label]
    wins = (replaced[:, None] > original).double().mean()
    assert record.auc == pytest.approx(float(wins))
    num_right = int((replaced > 0).sum() + (original <= 0).sum())
    assert record.accuracy == pytest.approx(num_right / int(is_real.sum()))
    assert record.precision == pytest.approx(int((replaced > 0).sum()) / int((logit[is_real] > 0).sum()))
    assert record.recall == pytest.approx(float((replaced > 0).double().mean()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_bad", [1, 1000])
def test_an_evaluation_of_a_diverged_model_says_so_and_has_no_measures(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, bad: float, num_bad: int
) -> None:
    """Outputs that are not finite are not taken for padding; those at pads mean nothing."""
    ids = packed_ids(6)
    is_real = torch.from_numpy(ids != SPECIAL.pad)
    logit = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    logit[~is_real] = bad
    monkeypatch.setattr(torch.distributed, "all_gather", lambda tensors, tensor: tensors[0].copy_(tensor))
    monkeypatch.setattr(Evaluator, "_read_rows", lambda *_: ids)
    evaluator = Evaluator(cache=None, num_rows=6, micro_batch=4, seed=1, special=SPECIAL)  # type: ignore[arg-type]
    engine: Any = Scoring(logit, (logit > 1) & is_real)
    good = evaluator.run(engine, step=10)
    assert good.fault == "" and good.record.accuracy > 0.5

    places = torch.nonzero(is_real)[:num_bad]
    logit[places[:, 0], places[:, 1]] = bad
    evaluation = evaluator.run(engine, step=10)

    assert evaluation.fault == f"{len(places)} of {int(is_real.sum())} outputs of the discriminator are not finite"
    record = evaluation.record
    assert all(math.isnan(value) for value in (record.auc, record.accuracy, record.precision, record.recall))


class Overflowing(Recorder):
    """Fake of an engine in fp16 whose gradients are never finite."""

    def __init__(self) -> None:
        super().__init__(SdpaMask)
        self.loss_scale: Any = LossScale()

    def step(
        self, learning_rate: float, accept: Any, generator_learning_rate: float | None, numbers: Any
    ) -> tuple[float, bool]:
        return numbers.read_with(torch.tensor(float("nan"))), False


def test_overflow_lowers_the_scale_and_only_at_its_minimum_or_with_a_bad_loss_the_guard_stops_the_step(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 1)  # DeepSpeed's scaler logs on rank 0
    engine: Any = Overflowing()
    step: Any = TrainStep(engine, 5, 4, Schedules(engine.module.objective, 10))
    batch = RowBatch(step=3, row0=24, ids=packed_ids(4), row_ids=np.arange(4), receipt=Receipt())
    spike = step(batch, 1e-4, lambda loss: "a spike")
    assert (spike.fault, spike.overflow, spike.loss_scale) == ("a spike", False, 65536.0)
    scales = []
    while not (result := step(batch, 1e-4)).fault:
        assert result.overflow
        scales.append(result.loss_scale)
    assert scales == [65536.0, *(2.0**power for power in range(16, 0, -1))]  # the first overflow lowers nothing
    assert result.fault == "the gradient is not finite at the least loss scale, 1"
    assert not result.overflow
    assert engine.loss_scale.cur_scale == 1.0


def test_outlier_is_the_row_with_an_extreme_or_nan_loss_and_none_among_ordinary_rows() -> None:
    rng = np.random.default_rng(0)
    losses = (30.0 + rng.standard_normal(64)).tolist()
    assert outlier(losses) is None
    assert outlier([*losses, 60.0]) == 64
    assert outlier([*losses[:5], float("nan"), *losses]) == 5


def test_the_guard_judges_unweighted_losses_where_a_weight_is_scheduled() -> None:
    sums = Sums(**dict.fromkeys(Sums._fields, 0.0))
    sums = sums._replace(loss=27.0, mlm_loss_sum=35.0, mlm_weight=5.0, rtd_loss_sum=4.0, rtd_weight=10.0)
    rising = {"from": 0, "to": 50, "shape": "step", "over": 0.3}
    falling = {"from": 4, "to": 1, "shape": "linear"}
    for fields, expected in [({}, 27.0), ({"temperature": falling}, 27.0), ({"rtd_weight": rising}, 7.0 + 0.4)]:
        schedules = Schedules(ObjectiveConfig(**fields), 10)
        engine: Any = Recorder(SdpaMask, **fields)
        step = TrainStep(engine, seed=5, micro_batch=4, schedules=schedules)
        assert step.judged_loss(sums) == pytest.approx(expected)
        assert np.isnan(step.judged_loss(sums._replace(loss=float("nan"))))

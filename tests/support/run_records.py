"""Example records of an imaginary run, for tests of the code that reads and writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.metrics import EvalRecord, StepRecord

STEP = StepRecord(
    step=12340,
    mlm_loss=2.3456789,
    rtd_loss=0.1234567,
    loss=8.5185139,
    mlm_accuracy=0.551,
    replaced_accuracy=0.6123,
    original_accuracy=0.9784,
    replaced_fraction=0.071,
    lr=1.9383e-4,
    grad_norm=0.8531,
    tokens_per_s=1.2345e6,
    mfu=0.4123,
    data_wait=0.0012,
    memory_gb=61.24,
    eta_s=329_000.0,
    tokens_seen=12_900_000_000,
    step_s=0.8494,
    rows_seen=25_272_320,
    receipt="0123456789abcdef",
    store_retries=3,
    store_wait_s=0.25,
    refetches=0,
    gpu_temperature_c=64,
    gpu_power_w=5321.5,
    gpu_sm_clock_mhz=1980,
    gpu_throttle=[],
    slow_ranks=[],
)
EVAL = EvalRecord(
    step=10000,
    mlm_loss=2.2012,
    mlm_accuracy=0.5312,
    rtd_loss=0.1502,
    auc=0.93412,
    accuracy=0.9511,
    precision=0.8012,
    recall=0.4021,
    rows=2048,
)


def step_with_loss(step: int, loss: float, **fields: Any) -> StepRecord:
    """Return a step record whose losses and gradient norm are all `loss`, and whose receipt is the step's own."""
    losses = dict.fromkeys(("loss", "mlm_loss", "rtd_loss", "grad_norm"), loss)
    return STEP.model_copy(update={"step": step, **losses, "receipt": f"{step:016x}", **fields})


def ledger_event(name: str, step: int = 0, **details: Any) -> LedgerEvent:
    """Return an event of the ledger; its time does not matter."""
    return LedgerEvent(**{"time": "2026-01-01T00:00:00+00:00", "event": name, "step": step, **details})


@pytest.fixture(scope="session")
def step_record() -> Callable[..., StepRecord]:
    """A function that returns a step record; keyword arguments replace its fields."""

    def make(**changes: Any) -> StepRecord:
        return STEP.model_copy(update=changes)

    return make


@pytest.fixture(scope="session")
def eval_record() -> Callable[..., EvalRecord]:
    """A function that returns an evaluation record; keyword arguments replace its fields."""

    def make(**changes: Any) -> EvalRecord:
        return EVAL.model_copy(update=changes)

    return make

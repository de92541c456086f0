"""Read everything that the reports show of a run from the files of its folder, without importing torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_dist.config import Config
from electra_dist.config.load import read_yaml
from electra_dist.config.secrets import without_secrets
from electra_dist.errors import UserError
from electra_dist.model.counts import ParameterCounts, parameter_counts
from electra_dist.report.panels import MetricColumns, RunCurves, columns_of
from electra_dist.run.environment_record import read_environment
from electra_dist.run.folder import CONFIG_FILE, LEDGER_FILE, METRICS_FILE, no_run, open_run, read_identity
from electra_dist.run.goodput import Goodput, goodput
from electra_dist.run.history import newest_ending
from electra_dist.run.ledger import LedgerEvent, read_jobs, read_ledger
from electra_dist.run.metrics import (
    EvalRecord,
    Metric,
    Samples,
    StepRecord,
    metrics_are_lost,
    newest_samples,
    parse_metric,
)
from electra_dist.run.records import read_records

RECENT_RECORDS = 20  # newest training records that are kept whole; the report averages over them
_FURTHER_FIELDS = ("mfu", "data_wait", "step_s")  # of training records, besides those of the diagrams


def run_title(run_dir: Path) -> str:
    """Return the name of a run for readers: that of its folder, or that of the folder's parent if it is only "run".

    `electra-dist init NAME` makes a config whose run is in the folder NAME/run.
    """
    folder = run_dir.resolve()
    return folder.parent.name if folder.name == "run" else folder.name


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Estimated energy of the GPUs of a run, without processors, network and cooling.

    Only the power of the first rank's node is known; the other nodes are assumed to need as much.
    """

    mean_power_w: float  # of all GPUs of one node
    num_nodes: int
    seconds: float  # in which the run's processes existed

    @property
    def kwh(self) -> float:
        """Return the energy in kilowatt-hours."""
        return self.mean_power_w * self.num_nodes * self.seconds / 3.6e6


class PowerReading(NamedTuple):
    """Power of a node's GPUs at a logged step of training."""

    step: int
    step_s: float  # mean seconds of a step since the reading before
    power_w: float | None  # of all GPUs of one node; None if it is not known


@dataclass(frozen=True, kw_only=True)
class MetricsHistory:
    """Content of metrics.jsonl: numbers of all records as columns, and the few records that reports need whole."""

    columns: Mapping[str, MetricColumns]  # numbers of the records, by their kind
    first: StepRecord | None  # oldest record of a training step; None without any
    recent: Sequence[StepRecord]  # the newest records of training steps, at most `RECENT_RECORDS`, oldest first
    evals: Sequence[EvalRecord]  # records of evaluations on held-out rows, oldest first

    @property
    def newest(self) -> StepRecord | None:
        """Return the newest record of a training step, or None if there is none."""
        return self.recent[-1] if self.recent else None

    def mean(self, field: str) -> float:
        """Return the mean of a field over all records of training steps, each of which must have the field."""
        return statistics.fmean(self.columns["train"].column(field))

    def median(self, field: str) -> float | None:
        """Return the median of a field over the records of training steps that have it; None if none has."""
        values = self.columns["train"].curve(field).values
        return float(np.median(values)) if len(values) else None

    def power_readings(self) -> Iterator[PowerReading]:
        """Yield a reading for each logged step; nothing if no step has recorded the power of the GPUs."""
        train = self.columns["train"]
        power_w = train.column("gpu_power_w")
        if np.isfinite(power_w).any():
            for step, step_s, power in zip(train.column("step"), train.column("step_s"), power_w, strict=True):
                yield PowerReading(step, step_s, None if math.isnan(power) else power)


def read_history(run_dir: Path) -> MetricsHistory:
    """Read metrics.jsonl of a run folder, record by record, so that it is never in memory as a whole."""
    first: list[StepRecord] = []
    recent: deque[StepRecord] = deque(maxlen=RECENT_RECORDS)
    evals: list[EvalRecord] = []

    def observed() -> Iterator[Metric]:
        """Yield all records for the columns, and note on the way those that are kept as a whole."""
        for record in read_records(run_dir / METRICS_FILE, parse_metric):
            if isinstance(record, EvalRecord):
                evals.append(record)
            elif isinstance(record, StepRecord):
                recent.append(record)
                if not first:
                    first.append(record)
            yield record

    columns = columns_of(observed(), _FURTHER_FIELDS)
    return MetricsHistory(columns=columns, first=first[0] if first else None, recent=list(recent), evals=evals)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that the reports show of a run, read from its folder; fields of missing files are empty or None."""

    name: str  # for readers (`run_title`)
    metrics: MetricsHistory  # records of training steps and of evaluations on held-out rows in metrics.jsonl
    ledger: Sequence[LedgerEvent]  # all events of ledger.jsonl (starts, checkpoints, ends, ...), oldest first
    account: Goodput  # the run's wall-clock seconds, split by activity
    environment: dict[str, Any]  # environment.json
    identity: dict[str, Any]  # identity.json
    config_tree: dict[str, Any]  # config.yaml, with `cluster.notify` hidden
    config: Config | None  # config.yaml, validated; None if it is missing or of a version with other keys
    has_lost_metrics: bool  # metrics.jsonl is missing, although the run has begun
    samples: Samples | None  # replaced words of the newest evaluation, a record of samples.jsonl

    @property
    def num_steps(self) -> int | None:
        """Return `train.num_steps` of the config; None if it is not known."""
        train = self.config_tree.get("train") or {}
        return train.get("num_steps")

    @property
    def step(self) -> int:
        """Return the newest training step in metrics.jsonl, or of the last event if that file is lost; 0 if none."""
        if self.has_lost_metrics:
            return self.ledger[-1].step
        return self.metrics.newest.step if self.metrics.newest else 0

    @property
    def parameters(self) -> ParameterCounts | None:
        """Return the numbers of trainable parameters of both towers; None if the config is not known."""
        if self.config is None:
            return None
        return parameter_counts(self.config.model, self.config.objective)

    @property
    def corpus_fingerprint(self) -> str:
        """Return the digest of the training corpus; "" if identity.json is missing."""
        return str(self.identity.get("corpus_fingerprint", ""))

    @cached_property
    def energy(self) -> Energy | None:
        """Return the estimated energy of the run; None if no power was recorded."""
        return energy_of(self.metrics.power_readings(), self.account, self.environment)

    @property
    def curves(self) -> RunCurves:
        """Return the numbers that the diagrams show and, from the ledger, the steps at which the run was resumed."""
        resumes = [event.step for event in self.ledger if event.event == "resume"]
        return RunCurves(name=self.name, columns=self.metrics.columns, resumes=resumes)

    def state(self) -> tuple[str, str]:
        """Return the state of the run as (CSS class, text for the reader with the steps done).

        The class is "done"; "stop" if the run was stopped by a request or by full or lost storage; "crash" after an
        error or on an unhealthy node; and "open" if no end is recorded: the run goes on, or it was killed.
        """
        of_total = f" of {self.num_steps:,}" if self.num_steps else ""
        ending = newest_ending(self.ledger)
        if ending == "done":
            return "done", f"finished: step {self.step:,}{of_total}"
        if ending == "stop":
            return "stop", f"stopped on purpose after step {self.ledger[-1].step:,}{of_total}"
        if ending == "storage":
            return "stop", f"stopped after step {self.step:,}{of_total}, because storage stayed full or away"
        if ending == "crash":
            return "crash", f"crashed after step {self.step:,}{of_total}"
        if ending == "unhealthy":
            return "crash", f"stopped after step {self.step:,}{of_total}, because a node is unhealthy"
        return "open", f"under way or cut off: last record of step {self.step:,}{of_total}"


def read_run(run_dir: Path) -> RunRecord:
    """Read the files of a run folder; what is not written yet stays empty.

    Raises UserError if it is no run folder or a file is damaged.
    """
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, LEDGER_FILE)):
        raise no_run(run_dir)
    ledger = read_ledger(run_dir)
    return RunRecord(
        name=run_title(run_dir),
        metrics=read_history(run_dir),
        ledger=ledger,
        account=goodput(ledger, read_jobs(run_dir)),
        environment=read_environment(run_dir),
        identity=read_identity(run_dir),
        config_tree=_config_tree(run_dir),
        config=_config(run_dir),
        has_lost_metrics=metrics_are_lost(run_dir, ledger),
        samples=newest_samples(run_dir),
    )


def _config_tree(run_dir: Path) -> dict[str, Any]:
    """Return config.yaml as nested dictionaries; {} if the file is missing.

    The command `cluster.notify` is hidden, because it may hold a secret address and reports may be passed on.
    """
    file = run_dir / CONFIG_FILE
    if not file.exists():
        return {}
    tree: dict[str, Any] = without_secrets(read_yaml(file))
    return tree


def _config(run_dir: Path) -> Config | None:
    """Return the validated config of a run; None if it is missing, or was written by a program with other keys."""
    try:
        return open_run(run_dir)
    except UserError:
        return None


def energy_of(readings: Iterable[PowerReading], account: Goodput, environment: dict[str, Any]) -> Energy | None:
    """Return the estimated energy of a run; None if no GPU power or no running time was recorded.

    It is the product of the mean recorded power, the time in which the run's processes existed, and the number of
    nodes. Evaluations, saves, restores and repeated steps thus count as training does; time in the queue does not.
    `readings` come oldest first; `environment` is the content of environment.json.
    """
    weighted_power = 0.0
    weight_s = 0.0
    step_before = 0
    for step, step_s, power_w in readings:
        if power_w is not None:
            stands_for_s = step_s * (step - step_before)
            weighted_power += power_w * stands_for_s
            weight_s += stands_for_s
        step_before = step
    seconds = account.wall - account.queue - account.boot - account.down
    if weight_s <= 0 or seconds <= 0:
        return None
    return Energy(
        mean_power_w=weighted_power / weight_s,
        num_nodes=max(1, len(environment.get("hosts", {}))),
        seconds=seconds,
    )

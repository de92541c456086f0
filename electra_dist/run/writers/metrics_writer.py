"""Write and read the metrics of a run: metrics.jsonl for reports and commands, and a copy for TensorBoard.

Guarantee: each logged step or evaluation is one strict-JSON record of `kind` "train" or "eval", with floats that are
read back bit for bit. After `truncate_after(t)` at a resume the file holds exactly the records of steps <= t, so the
file of a run that was interrupted any number of times has each step once; the same holds for samples.jsonl, the text
samples of evaluations. `sync` before the checkpoint of step t is committed makes the records of steps <= t survive a
crash of the machine; an evaluation of step t must therefore be written before that.

Beside metrics.jsonl the writer keeps a summary of it (`run/metrics_summary.py`). With it a resume cuts the file, and
`electra-dist status` finds the newest records, without reading the whole file.

Limits: one writer (rank 0). TensorBoard is a copy for people (`tensorboard_writer.py`); nothing is read back from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from electra_dist.errors import StoreAway, UserError
from electra_dist.run.folder import METRICS_FILE, SAMPLES_FILE, TENSORBOARD_DIR
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.metrics_summary import (
    SAVE_EVERY_RECORDS,
    MetricsSummary,
    extended,
    read_summary,
    shortened,
    write_summary,
)
from electra_dist.run.record_checks import metrics_fault
from electra_dist.run.step_records import EvalRecord, StepRecord
from electra_dist.run.writers.tensorboard_writer import TensorBoardWriter
from electra_dist.run.writers.text_samples import SampleFile, TextSample, has_samples


class MetricsWriter:
    """Writer of metrics.jsonl in a run folder and, if wanted, of TensorBoard event files. Only rank 0 has one."""

    def __init__(
        self, run_dir: Path, tensorboard: bool, settings: Mapping[str, str | float | bool] | None = None
    ) -> None:
        """Open metrics.jsonl; `settings` are dotted keys of the config for TensorBoard's table of hyperparameters."""
        self._run_dir = Path(run_dir)
        self._file = JsonlFile(self._run_dir / METRICS_FILE)
        self._summary = extended(read_summary(self._file.path) or MetricsSummary(), self._file.path)
        self._num_unsaved = 0  # records since the summary was saved
        self._samples: SampleFile | None = None  # opened by the first samples
        self._settings = settings or {}
        self._tensorboard_dir = self._run_dir / TENSORBOARD_DIR if tensorboard else None
        self._tensorboard: TensorBoardWriter | None = None  # opened by the first `write`
        self._lock = threading.Lock()  # the step loop writes, and the thread that saves checkpoints syncs
        self._refused: set[Path] = set()  # files whose disk has refused the newest record
        self._problems: list[str] = []
        self._purge_step: int | None = None  # TensorBoard hides older curves from this step on; None: it hides nothing

    def truncate_after(self, step: int) -> int:
        """Drop the records of steps > `step`, which the run will repeat; return the last step recorded before that.

        Call it at every resume, before `write`. The result is at least `step`.
        """
        before = extended(self._summary, self._file.path)
        if before.in_order:
            last_recorded_step = before.last_step
            self._summary = shortened(before, self._file.path, step)
            if self._summary.size_bytes < before.size_bytes:
                self._file.cut(self._summary.size_bytes)
        else:
            last_recorded_step = self._rewrite_in_order(step)
        self._save_summary()
        if has_samples(self._run_dir):
            self._sample_file().truncate_after(step)
        self._purge_step = step + 1
        return step if last_recorded_step is None else max(step, last_recorded_step)

    def _rewrite_in_order(self, step: int) -> int | None:
        """Write each kind and step <= `step` once, in order, into a file to which two processes have written.

        Of equal kinds and steps, which have the same losses, the newest remains. Returns the highest step before; None
        without records.
        """
        records = read_records(self._file.path, metrics_fault)
        newest = {(record["step"], record["kind"]): record for record in records if record["step"] <= step}
        self._file.replace(sorted(newest.values(), key=lambda record: record["step"]))
        self._summary = extended(MetricsSummary(), self._file.path)
        return max((record["step"] for record in records), default=None)

    def _save_summary(self) -> None:
        """Add the new records to the summary of the metrics, and write it; readers can do without it."""
        self._num_unsaved = 0
        with contextlib.suppress(OSError, UserError, ValueError):
            self._summary = extended(self._summary, self._file.path)
            write_summary(self._file.path, self._summary)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append the record of a step or of an evaluation to metrics.jsonl and, if it is switched on, to TensorBoard.

        The record survives a crash of the machine only after `sync`. A record that a full or silent disk refuses is
        kept in memory and written later; `problems` has a line about it.
        """
        kind = "train" if isinstance(record, StepRecord) else "eval"
        fields = dataclasses.asdict(record)
        with self._noted(self._file.path):
            self._file.append({"kind": kind, **fields})
            self._num_unsaved += 1
            if self._num_unsaved >= SAVE_EVERY_RECORDS:
                self._save_summary()
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write(kind, fields)

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Append the text samples of an evaluation to samples.jsonl and, if it is switched on, to TensorBoard."""
        with self._noted(self._run_dir / SAMPLES_FILE):
            self._sample_file().write(step, samples)
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write_samples(step, samples)

    def sync(self) -> None:
        """Wait until all records of metrics.jsonl are on the disk (fsync); call it before a checkpoint is committed.

        Any thread may call it while another one calls `write`. After StoreAway, call it again later.
        """
        with self._lock:
            self._file.sync()
            self._save_summary()

    def flush_tensorboard(self) -> None:
        """Write to the files what TensorBoard has buffered."""
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def problems(self) -> list[str]:
        """Return one line for each file whose disk has begun to refuse records since the last call; usually none."""
        lines = self._problems
        self._problems = []
        problem_of_tensorboard = self._tensorboard.take_problem() if self._tensorboard else ""
        return [*lines, problem_of_tensorboard] if problem_of_tensorboard else lines

    def close(self) -> None:
        """Sync and close all files; after StoreAway, metrics.jsonl stays open, and a later call tries again."""
        if self._samples is not None:
            self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._file.close()
        if self._num_unsaved > 0:
            self._save_summary()

    def discard(self) -> None:
        """Close metrics.jsonl without the records that its disk refuses. Calling it twice is fine."""
        self._file.discard()

    @contextlib.contextmanager
    def _noted(self, path: Path) -> Iterator[None]:
        """Write to a file in the `with` block, one thread at a time; note once if its disk is full or away."""
        with self._lock:
            try:
                yield
                self._refused.discard(path)
            except StoreAway as error:
                if path not in self._refused:
                    self._refused.add(path)
                    self._problems.append(
                        f"waiting for storage: {error}; the records are kept in memory and written later"
                    )

    def _sample_file(self) -> SampleFile:
        if self._samples is None:
            self._samples = SampleFile(self._run_dir)
        return self._samples

    def _open_tensorboard(self) -> TensorBoardWriter | None:
        if self._tensorboard is None and self._tensorboard_dir is not None:
            self._tensorboard = TensorBoardWriter(self._tensorboard_dir, self._settings, self._purge_step)
        return self._tensorboard


def read_metrics(path: Path, fault_of: Callable[[Record], str] = metrics_fault) -> list[Record]:
    """Return the records of a metrics.jsonl, or of that in a run folder, oldest first; [] if there is no file.

    Each has "kind" and the fields of StepRecord ("train") or EvalRecord ("eval"); those of an older version may lack
    some. Pass `whole_metrics_fault` if you use all fields.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    return read_records(file, fault_of)

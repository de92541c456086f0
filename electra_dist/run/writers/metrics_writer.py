"""Write and read the metrics of a run: metrics.jsonl for reports and commands, and a copy for TensorBoard.

Guarantee: each logged step or evaluation is one strict-JSON record of `kind` "train" or "eval", with floats that are
read back bit for bit. After `truncate_after(t)` at a resume the file holds exactly the records of steps <= t, so the
file of a run that was interrupted any number of times has each step once; the same holds for samples.jsonl, the text
samples of evaluations. `sync` before the checkpoint of step t is committed makes the records of steps <= t survive a
crash of the machine; an evaluation of step t must therefore be written before that.

`electra-dist status` reads the end of metrics.jsonl only, however long it is, and a resume parses the end only. If a
process that had been suspended wrote beside its successor, until it noticed that it had lost the lease, the next
resume puts the file in order.

Limits: one writer (rank 0). TensorBoard is a copy for people (`tensorboard_writer.py`); nothing is read back from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from electra_dist.errors import StoreAway
from electra_dist.run.folder import METRICS_FILE, SAMPLES_FILE, TENSORBOARD_DIR
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.record_checks import metrics_fault
from electra_dist.run.record_stream import iter_lines, lines_backwards, record_of_line
from electra_dist.run.step_records import EvalRecord, StepRecord
from electra_dist.run.writers.tensorboard_writer import TensorBoardWriter
from electra_dist.run.writers.text_samples import SampleFile, TextSample, has_samples

_KINDS = ("train", "eval")
_BEGIN_OF_RECORD = re.compile(rb'\{"kind": "(\w+)", "step": (\d+),')


class MetricsWriter:
    """Writer of metrics.jsonl in a run folder and, if wanted, of TensorBoard event files. Only rank 0 has one."""

    def __init__(
        self, run_dir: Path, tensorboard: bool, settings: Mapping[str, str | float | bool] | None = None
    ) -> None:
        """Open metrics.jsonl; TensorBoard shows `settings` (dotted config key -> value) as hyperparameters."""
        self._run_dir = Path(run_dir)
        self._file = JsonlFile(self._run_dir / METRICS_FILE)
        self._samples: SampleFile | None = None  # opened by the first samples
        self._settings = settings or {}
        self._tensorboard_dir = self._run_dir / TENSORBOARD_DIR if tensorboard else None
        self._tensorboard: TensorBoardWriter | None = None  # opened by the first `write`
        self._lock = threading.Lock()  # the step loop writes, and the thread that saves checkpoints syncs
        self._refused: set[Path] = set()  # files whose disk has refused the newest record
        self._problems: list[str] = []
        self._purge_step: int | None = None  # TensorBoard hides older curves from this step on; None: it hides nothing

    def truncate_after(self, step: int) -> int:
        """Drop the records of steps > `step`, which the run will repeat; return the last step that was recorded.

        The result is at least `step`. Call this at every resume, before `write`.
        """
        newest_step = step
        if _is_in_order(self._file.path):
            end = None  # offset of the first record to drop
            for offset, line in lines_backwards(self._file.path):
                recorded_step = record_of_line(self._file.path, offset, line, metrics_fault)["step"]
                newest_step = max(newest_step, recorded_step)
                if recorded_step <= step:
                    break
                end = offset
            if end is not None:
                self._file.cut(end)
        else:
            records = read_records(self._file.path, metrics_fault)
            newest_step = max([step, *(record["step"] for record in records)])
            # Of equal kinds and steps, which have the same losses, the newest remains.
            kept = {(record["step"], record["kind"]): record for record in records if record["step"] <= step}
            self._file.replace(sorted(kept.values(), key=lambda record: record["step"]))
        if has_samples(self._run_dir):
            self._sample_file().truncate_after(step)
        self._purge_step = step + 1
        return newest_step

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append the record of a step or an evaluation to metrics.jsonl and, if wanted, to TensorBoard.

        The record survives a crash of the machine only after `sync`. A record that a full or silent disk refuses is
        kept in memory and written later; `problems` has a line about it.
        """
        kind = "train" if isinstance(record, StepRecord) else "eval"
        fields = dataclasses.asdict(record)
        with self._noted(self._file.path):
            self._file.append({"kind": kind, **fields})
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write(kind, fields)

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Append the text samples of an evaluation to samples.jsonl and, if wanted, to TensorBoard."""
        with self._noted(self._run_dir / SAMPLES_FILE):
            self._sample_file().write(step, samples)
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write_samples(step, samples)

    def sync(self) -> None:
        """Wait until all records of metrics.jsonl are on the disk (fsync); call it before a checkpoint is committed.

        Any thread may call this while another thread calls `write`. After StoreAway, call it again later.
        """
        with self._lock:
            self._file.sync()

    def flush_tensorboard(self) -> None:
        """Write TensorBoard's buffered values to its files."""
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

    def discard(self) -> None:
        """Close metrics.jsonl without the records that its disk refuses. Calling it twice is fine."""
        self._file.discard()

    @contextlib.contextmanager
    def _noted(self, path: Path) -> Iterator[None]:
        """Guard a `with` block that writes to `path`: lock out other threads, and note if the disk refuses."""
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
    """Return the records of metrics.jsonl, oldest first; [] without the file. `path` is the file or its run folder.

    Each record has "kind" and the fields of StepRecord ("train") or EvalRecord ("eval"). Records of an older version
    may lack some fields; pass `whole_metrics_fault` to refuse these.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    return read_records(file, fault_of)


def newest_metrics(run_dir: Path, kinds: Sequence[str] = _KINDS) -> dict[str, Record]:
    """Return the newest record of each of these kinds in a run's metrics.jsonl, without those that it lacks.

    The file is read from its end, as far as necessary: to its beginning if a kind is missing. A damaged line that is
    read is a UserError.
    """
    file = run_dir / METRICS_FILE
    newest: dict[str, Record] = {}
    for offset, line in lines_backwards(file):
        missing_kinds = [kind for kind in kinds if kind not in newest]
        if not missing_kinds:
            break
        # Evaluations are few: once the newest training record is found, other training records are not parsed.
        if newest and not any(b'"%s"' % kind.encode() in line for kind in missing_kinds):
            continue
        record = record_of_line(file, offset, line, metrics_fault)
        newest.setdefault(record["kind"], record)
    return newest


def _is_in_order(file: Path) -> bool:
    """Return whether no step is lower than the one before it and no kind has a step twice; parse no line as JSON."""
    last_step = -1
    kinds: set[bytes] = set()  # of the records of the last step
    for _, line in iter_lines(file):
        begin = _BEGIN_OF_RECORD.match(line)
        if begin is None:
            return False
        kind, step = begin[1], int(begin[2])
        if step < last_step or (step == last_step and kind in kinds):
            return False
        kinds = {*kinds, kind} if step == last_step else {kind}
        last_step = step
    return True

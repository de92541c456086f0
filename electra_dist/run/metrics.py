"""metrics.jsonl, the source of truth about a run, and TensorBoard beside it.

Guarantees: one strict-JSON record a logged step or evaluation, `kind` "train" or "eval", floats bit for bit. After
`truncate_after(t)` at a resume the file holds exactly the records of steps <= t, so the file of a run that was cut any
number of times has each step once. `sync` before a checkpoint of step t is committed makes sure that the records of
steps <= t outlive the machine, too; an evaluation of step t therefore belongs before the checkpoint of step t.

Cost: 20 us a record; TensorBoard's import 1 to 3 s once, only where it is switched on.

Where it stops: one writer (rank 0). TensorBoard is a copy for looking at; nothing is read back from it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from electra_dist.run.folder import METRICS_FILE, TENSORBOARD_DIR
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.records import EvalRecord, StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_TAGS = {
    "train": {
        "mlm_loss": "loss/mlm",
        "rtd_loss": "loss/rtd",
        "loss": "loss/total",
        "mlm_accuracy": "accuracy/mlm",
        "replaced_accuracy": "accuracy/rtd_replaced",
        "original_accuracy": "accuracy/rtd_original",
        "replaced_fraction": "batch/replaced_fraction",
        "tokens_seen": "batch/tokens_seen",
        "lr": "optimizer/lr",
        "grad_norm": "optimizer/grad_norm",
        "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu",
        "data_wait": "speed/data_wait",
        "step_s": "speed/step_s",
        "memory_gb": "speed/memory_gb",
        "store_retries": "store/retries",
        "store_wait_s": "store/wait_s",
        "refetches": "store/refetches",
        "gpu_temperature_c": "gpu/temperature_c",
        "gpu_power_w": "gpu/power_w",
        "gpu_sm_clock_mhz": "gpu/sm_clock_mhz",
    },
    "eval": {
        "mlm_loss": "eval/mlm_loss",
        "mlm_accuracy": "eval/mlm_accuracy",
        "rtd_loss": "eval/rtd_loss",
        "auc": "eval/auc",
        "accuracy": "eval/accuracy",
        "precision": "eval/precision",
        "recall": "eval/recall",
    },
}


class MetricsWriter:
    """Appends records to `run_dir`/metrics.jsonl and, if wanted, to `run_dir`/tensorboard."""

    def __init__(self, run_dir: Path, tensorboard: bool) -> None:
        self._file = JsonlFile(Path(run_dir) / METRICS_FILE)
        self._tensorboard_dir = Path(run_dir) / TENSORBOARD_DIR if tensorboard else None
        self._tensorboard: SummaryWriter | None = None
        self._purge_step: int | None = None

    def truncate_after(self, step: int) -> int:
        """Drop records of steps > `step`: they will be repeated. Call it at every resume, before `write`.

        Returns:
            The furthest step that had been recorded (`step` if there is none beyond it): what the cut has cost.
        """
        records = read_records(self._file.path)
        kept = [record for record in records if record["step"] <= step]
        if len(kept) != len(records):
            self._file.replace(kept)
        self._purge_step = step + 1
        return max([step, *(record["step"] for record in records)])

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append one record."""
        kind = "train" if isinstance(record, StepRecord) else "eval"
        fields = dataclasses.asdict(record)
        self._file.append({"kind": kind, **fields})
        if self._tensorboard_dir is not None:
            self._write_scalars(self._tensorboard_dir, kind, fields)

    def sync(self) -> None:
        """Return when all records are on the disk: call it before a checkpoint is committed."""
        self._file.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Sync and close both. Calling it twice is fine."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _write_scalars(self, directory: Path, kind: str, fields: Record) -> None:
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import; only where wanted

            self._tensorboard = SummaryWriter(str(directory), purge_step=self._purge_step)
        for name, tag in _TAGS[kind].items():
            value = fields[name]
            if value is not None and math.isfinite(value):
                self._tensorboard.add_scalar(tag, value, fields["step"])


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl (or of the run folder that holds it), oldest first.

    Each has "kind" ("train" or "eval") and the fields of StepRecord or EvalRecord of the version that wrote it.
    """
    path = Path(path)
    return read_records(path / METRICS_FILE if path.is_dir() else path)

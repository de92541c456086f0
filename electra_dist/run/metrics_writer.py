"""Write and read the metrics of a run: metrics.jsonl for reports and commands, and a copy for TensorBoard.

Guarantee: each logged step or evaluation is one strict-JSON record of `kind` "train" or "eval", with floats that are
read back bit for bit. After `truncate_after(t)` at a resume the file holds exactly the records of steps <= t, so the
file of a run that was interrupted any number of times has each step once. `sync` before the checkpoint of step t is
committed makes the records of steps <= t survive a crash of the machine; an evaluation of step t must therefore be
written before that.

Cost: 20 us a record; importing TensorBoard takes 1 to 3 s once, only where it is switched on.

Limits: one writer (rank 0). TensorBoard is a copy for people; nothing is read back from it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from electra_dist.run.folder import METRICS_FILE, TENSORBOARD_DIR
from electra_dist.run.jsonl import JsonlFile, Record, read_records
from electra_dist.run.step_records import EvalRecord, StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# For each kind of record: field -> tag of the TensorBoard curve. Other fields are only in metrics.jsonl.
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
        "generator_lr": "optimizer/generator_lr",
        "grad_norm": "optimizer/grad_norm",
        "loss_scale": "optimizer/loss_scale",
        "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu",
        "data_wait": "speed/data_wait",
        "step_s": "speed/step_s",
        "memory_gb": "speed/memory_gb",
        "store_retries": "store/retries",
        "store_wait_s": "store/wait_s",
        "refetches": "store/refetches",
        "temperature": "schedule/temperature",
        "mask_prob": "schedule/mask_prob",
        "mlm_weight": "schedule/mlm_weight",
        "rtd_weight": "schedule/rtd_weight",
        "random_share": "schedule/random_share",
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
        "context_auc": "eval/context_auc",
        "generator_entropy": "eval/generator_entropy",
        "sampled_correct": "eval/sampled_correct",
    },
}


class MetricsWriter:
    """Writer of metrics.jsonl in a run folder and, if wanted, of TensorBoard event files. Only rank 0 has one."""

    def __init__(self, run_dir: Path, tensorboard: bool) -> None:
        """Open metrics.jsonl for appending.

        Args:
            run_dir: folder of the run.
            tensorboard: whether records are also written to `run_dir`/tensorboard.

        Raises:
            UserError: metrics.jsonl cannot be written.
        """
        self._file = JsonlFile(Path(run_dir) / METRICS_FILE)
        self._tensorboard_dir = Path(run_dir) / TENSORBOARD_DIR if tensorboard else None
        self._tensorboard: SummaryWriter | None = None  # opened by the first `write`
        self._purge_step: int | None = None  # TensorBoard hides older curves from this step on; None: it hides nothing

    def truncate_after(self, step: int) -> int:
        """Drop the records of steps > `step`, which the run will repeat. Call it at every resume, before `write`.

        TensorBoard is asked to hide the points of its curves after `step`, too.

        Args:
            step: the step from which the run resumes.

        Returns:
            The last step that was recorded before the records were dropped, or `step` if that is higher. The run
            repeats the steps after `step` up to the returned one.
        """
        records = read_records(self._file.path)
        kept_records = [record for record in records if record["step"] <= step]
        if len(kept_records) < len(records):
            self._file.replace(kept_records)
        self._purge_step = step + 1
        last_recorded_step = max((record["step"] for record in records), default=step)
        return max(step, last_recorded_step)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append the record of a step or of an evaluation to metrics.jsonl and, if it is switched on, to TensorBoard.

        The record survives a crash of the machine only after `sync`.
        """
        kind = "train" if isinstance(record, StepRecord) else "eval"
        fields = dataclasses.asdict(record)
        self._file.append({"kind": kind, **fields})
        if self._tensorboard_dir is not None:
            self._write_scalars(self._tensorboard_dir, kind, fields)

    def sync(self) -> None:
        """Wait until all records of metrics.jsonl are on the disk (fsync). Call it before a checkpoint is committed.

        Otherwise a crash of the machine could lose records of steps that the run does not repeat.
        """
        self._file.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Sync and close metrics.jsonl and TensorBoard's file. Calling it twice is fine."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _write_scalars(self, directory: Path, kind: str, fields: Record) -> None:
        """Write the finite values of a record to TensorBoard, and open its file at the first call.

        Args:
            directory: folder of the event files.
            kind: "train" or "eval", which selects the fields that are written.
            fields: the record; "step" is the position on the curves.
        """
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is wanted

            self._tensorboard = SummaryWriter(str(directory), purge_step=self._purge_step)
        for name, tag in _TAGS[kind].items():
            value = fields[name]
            if value is not None and math.isfinite(value):
                self._tensorboard.add_scalar(tag, value, fields["step"])


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a metrics.jsonl, oldest first; an empty list if there is no file.

    Each record has "kind" and the fields of StepRecord ("train") or EvalRecord ("eval"). A record that an older
    version wrote may lack some fields.

    Args:
        path: a metrics.jsonl, or the run folder that holds it.

    Raises:
        UserError: the file is damaged; names the line.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    return read_records(file)

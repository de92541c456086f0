"""Write a run's metrics, config and text samples as TensorBoard event files into the run folder.

How: values of training steps go into tensorboard/. Values of evaluations go into tensorboard/heldout/, under the tag
of the same quantity in training: TensorBoard shows the folders as two runs, and draws both curves into one chart.
Values that only evaluations have are in tensorboard/ under `eval/`.

Limits: one writer (rank 0). The files are a copy for people; nothing is read back from them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_dist.store.failure_kinds import os_failure

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HELDOUT_DIR = "heldout"  # inside the TensorBoard folder
# Field of a record -> tag of its curve. Other fields are only in metrics.jsonl.
TRAIN_TAGS = {
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
}
# Field of an evaluation -> tag of the curve of training steps that shows the same quantity.
SHARED_TAGS = {
    "mlm_loss": "loss/mlm",
    "mlm_accuracy": "accuracy/mlm",
    "rtd_loss": "loss/rtd",
    "recall": "accuracy/rtd_replaced",
}
EVAL_TAGS = {
    "auc": "eval/auc",
    "accuracy": "eval/accuracy",
    "precision": "eval/precision",
    "context_auc": "eval/context_auc",
    "generator_entropy": "eval/generator_entropy",
    "sampled_correct": "eval/sampled_correct",
}
_HPARAM_METRICS = ("loss/mlm", "loss/rtd", "eval/auc", "eval/context_auc")  # columns of TensorBoard's table of runs


def scalars(fields: Mapping[str, float | None], tags: Mapping[str, str]) -> dict[str, float]:
    """Return a record's finite values by TensorBoard tag (`tags`: field -> tag), without None and NaN."""
    tagged = {}
    for name, tag in tags.items():
        value = fields[name]
        if value is not None and math.isfinite(value):
            tagged[tag] = value
    return tagged


class TensorBoardWriter:
    """Writer of the TensorBoard event files of one start of a run.

    At the first error of the disk it stops writing for good, because a run must not end for a copy of its metrics.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str | float | bool], purge_step: int | None) -> None:
        """Open the files and write `settings`.

        Points that earlier starts wrote for steps from `purge_step` on are hidden; None hides none.
        """
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is wanted

        self._directory = directory
        self._problem = ""  # the line about the error after which nothing is written, until `take_problem`
        self._is_dropped = False
        _silence_writer_threads()
        with self._dropped_at_an_error():
            self._train: SummaryWriter = SummaryWriter(str(directory), purge_step=purge_step)
            self._heldout: SummaryWriter = SummaryWriter(str(directory / HELDOUT_DIR), purge_step=purge_step)
            if settings:
                self._write_settings(settings)

    def take_problem(self) -> str:
        """Return a line about the error that stopped all writing; "" if there is none or it was returned before."""
        problem = self._problem
        self._problem = ""
        return problem

    @contextlib.contextmanager
    def _dropped_at_an_error(self) -> Iterator[None]:
        """Stop writing for good if the `with` block raises an OSError, for example because the disk is full."""
        try:
            yield
        except OSError as error:
            # The files are not closed, because closing them would try to write again.
            self._is_dropped = True
            self._problem = (
                f"{self._directory}: {os_failure(error).reason}; TensorBoard gets no more records in this start, "
                f"metrics.jsonl has all of them"
            )

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write the finite values of a record of kind "train" (training step) or "eval" (evaluation)."""
        if self._is_dropped:
            return
        step = fields["step"]
        in_train_folder = TRAIN_TAGS if kind == "train" else EVAL_TAGS
        with self._dropped_at_an_error():
            for tag, value in scalars(fields, in_train_folder).items():
                self._train.add_scalar(tag, value, step)
            if kind == "eval":
                for tag, value in scalars(fields, SHARED_TAGS).items():
                    self._heldout.add_scalar(tag, value, step)

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text in Markdown about held-out rows, for TensorBoard's text tab."""
        if self._is_dropped:
            return
        with self._dropped_at_an_error():
            self._heldout.add_text(tag, text, step)

    def flush(self) -> None:
        """Write the buffered values to the files."""
        if self._is_dropped:
            return
        with self._dropped_at_an_error():
            self._train.flush()
            self._heldout.flush()

    def close(self) -> None:
        """Write the buffered values, and close the files."""
        if self._is_dropped:
            return
        with self._dropped_at_an_error():
            self._train.close()
            self._heldout.close()

    def _write_settings(self, settings: Mapping[str, str | float | bool]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # SummaryWriter.add_hparams would put them into a folder of its own, which TensorBoard shows as another run.
        metrics = dict.fromkeys(_HPARAM_METRICS, 0.0)  # only the names count
        file_writer = self._train.file_writer
        assert file_writer is not None  # until `close`
        for summary in hparams(dict(settings), metrics):
            file_writer.add_summary(summary)


def _silence_writer_threads() -> None:
    """Let TensorBoard's writing threads end without a traceback at an error of the disk."""
    # The next call of the writer raises that error again, and then one line about it is logged.
    previous_hook = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        is_writer_thread = type(args.thread).__name__ == "_AsyncWriterThread"
        if not (is_writer_thread and issubclass(args.exc_type, OSError)):
            previous_hook(args)

    threading.excepthook = hook

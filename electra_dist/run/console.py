"""What a person sees while a run goes on: one dense line every N steps, a progress bar below them on a terminal.

Guarantees: a line is a pure function of a StepRecord and the number of steps (`format_line`), in fixed columns of
fixed width, so lines stand under one another and a golden file can hold one. log.txt gets every line and note with
the time of day (UTC), on a terminal or not, appended to what earlier starts wrote. Where stdout is no terminal the
same lines are printed plain and flushed: no bar, no colour, no carriage returns.

Cost: some 50 us a line; rich redraws the bar ten times a second in a thread of its own.

Where it stops: rank 0 only. Output that other processes write to the same terminal may break the bar's line.
"""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from electra_dist.errors import UserError
from electra_dist.run.folder import LOG_FILE
from electra_dist.run.formats import format_count, format_duration
from electra_dist.run.records import EvalRecord, StepRecord


class Console:
    """Lines, notes and the bar of one start of a run; `close` ends them."""

    def __init__(self, run_dir: Path, total_steps: int, start_step: int, stream: TextIO | None = None) -> None:
        """Open the log for appending.

        Args:
            run_dir: folder of the run.
            total_steps: steps of the whole run.
            start_step: steps that are already done.
            stream: where a person looks; default stdout.
        """
        self.total_steps = total_steps
        path = Path(run_dir) / LOG_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115  (owned until close)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); mend run_dir or its permissions") from None
        self._stream = stream or sys.stdout
        self._progress = _progress_bar(self._stream) if self._stream.isatty() else None
        if self._progress is not None:
            self._task = self._progress.add_task("", total=total_steps, completed=start_step, eta="")
            self._progress.start()

    def line(self, record: StepRecord) -> None:
        """Show a logged step."""
        self._show(format_line(record, self.total_steps))
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, eta=f"eta {format_duration(record.eta_s)}")

    def evaluation(self, record: EvalRecord) -> None:
        """Show an evaluation."""
        self._show(format_evaluation(record, self.total_steps))

    def note(self, text: str) -> None:
        """Show a line of text: a start, a checkpoint, a warning."""
        self._show(text)

    def close(self) -> None:
        """Take the bar away and close the log. Calling it twice is fine."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._log.close()

    def _show(self, text: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        self._log.write(f"{now}  {text}\n")
        self._log.flush()
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def _progress_bar(stream: TextIO) -> Progress:
    return Progress(
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}"),
        console=Terminal(file=stream),
        transient=True,
        expand=True,
    )


def format_line(record: StepRecord, total_steps: int) -> str:
    """The line of a logged step: the same columns, each of the same width, in every line of a run."""
    digits = len(str(total_steps))
    columns = [
        f"{record.step:>{digits}}/{total_steps} {_percent(record.step / total_steps)}",
        f"mlm {record.mlm_loss:6.3f}",
        f"rtd {record.rtd_loss:6.4f}",
        f"repl {_percent(record.replaced_accuracy)} orig {_percent(record.original_accuracy)}",
        f"lr {record.lr:.2e}",
        f"gnorm {_norm(record.grad_norm)}",
        f"{format_count(record.tokens_per_s):>5} tok/s",
        f"mfu {_percent(record.mfu)}",
        f"wait {_percent(record.data_wait)}",
        f"mem {_gigabytes(record.memory_gb)}",
        f"eta {format_duration(record.eta_s):>6}",
    ]
    return "  ".join(columns)


def format_evaluation(record: EvalRecord, total_steps: int) -> str:
    """The line of an evaluation."""
    digits = len(str(total_steps))
    return (
        f"{record.step:>{digits}}/{total_steps}  eval  mlm {record.mlm_loss:.3f} acc {_percent(record.mlm_accuracy)}  "
        f"rtd {record.rtd_loss:.4f}  auc {record.auc:.4f}  acc {_percent(record.accuracy)}  "
        f"precision {_percent(record.precision)}  recall {_percent(record.recall)}  on {record.rows} held-out rows"
    )


def _percent(fraction: float | None) -> str:
    if fraction is None or not math.isfinite(fraction):
        return "    -"
    return f"{100 * fraction:4.1f}%" if abs(fraction) < 0.9995 else f"{100 * fraction:4.0f}%"


def _norm(norm: float) -> str:
    return f"{norm:6.3f}" if norm < 99.9995 else f"{norm:6.1f}" if norm < 9999.95 else f"{norm:6.0e}"


def _gigabytes(size_gb: float | None) -> str:
    return "     -" if size_gb is None else f"{size_gb:5.1f}G"

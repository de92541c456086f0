"""Print a line for each logged step of a run, write it to log.txt, and show a progress bar on a terminal.

Guarantee: a line is a pure function of a StepRecord and the number of steps (`format_line`), in fixed columns of fixed
width, so that lines align below the names of the columns (`format_header`), which are printed again every 40 lines. In
each start of the run, a legend of the columns comes first. Lines of steps and evaluations have at most 100 characters
in runs of fewer than ten million steps. log.txt receives every line and note with date and time (UTC), on a terminal
or not, appended to the lines of earlier starts. If stdout is no terminal, the same lines are printed plain and
flushed: no bar, no colour, no carriage returns.

Limits: rank 0 only. Output that other processes write to the same terminal may break the line of the bar.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from electra_dist.console import Console as Terminal
from electra_dist.escapes import printable
from electra_dist.run.folder import LOG_FILE
from electra_dist.run.metrics import EvalRecord, StepRecord
from electra_dist.run.number_formats import format_count, format_duration
from electra_dist.store.atomic_files import writable

LINES_PER_HEADER = 40
LEGEND = (
    "mlm, rtd: losses (nats per token); rtd: of predicted tokens if the objective detects none",
    "repl, orig: replaced and original tokens classified rightly | lr: learning rate",
    "gnorm: gradient norm before clipping | tok/s: of all ranks | mfu: of the peak",
    "wait: share of time waiting for rows | mem: memory of rank 0 (GPU: peak) | eta: until the last step",
)


class Console:
    """Writer of the console output and log.txt of one start of a run. Only rank 0 has one; call `close` at the end."""

    def __init__(self, run_dir: Path, total_steps: int, start_step: int, stream: TextIO | None = None) -> None:
        """Open log.txt, and print to `stream` (None: stdout).

        Raises StoreAway if the disk refuses now but may recover, otherwise UserError.
        """
        self.total_steps = total_steps
        self._num_lines = 0  # of logged steps, in this start
        self._num_lost = 0  # lines that log.txt lacks, because its disk has refused them
        path = Path(run_dir) / LOG_FILE
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(path, "ab", buffering=0)  # noqa: SIM115  (owned until close)
        self._stream = sys.stdout if stream is None else stream
        self._progress: Progress | None = None  # only on a terminal
        if self._stream.isatty():
            self._progress = _progress_bar(self._stream)
            self._task = self._progress.add_task("", total=total_steps, completed=start_step, eta="")
            self._progress.start()

    def line(self, record: StepRecord) -> None:
        """Print the line of a logged step, write it to log.txt, and move the progress bar to that step."""
        if self._num_lines == 0:
            for text in LEGEND:
                self.note(text)
        if self._num_lines % LINES_PER_HEADER == 0:
            self.note(format_header(self.total_steps))
        self._num_lines += 1
        self.note(format_line(record, self.total_steps))
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, eta=f"eta {format_duration(record.eta_s)}")

    def evaluation(self, record: EvalRecord) -> None:
        """Print the lines of an evaluation on held-out rows, and write them to log.txt."""
        for text in format_evaluation(record, self.total_steps):
            self.note(text)

    def close(self) -> None:
        """Remove the progress bar and close log.txt. Calling it twice is fine."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._log.close()

    def note(self, text: str) -> None:
        """Print a line of text, such as a warning, and write it to log.txt with the UTC time.

        A line that a full disk refuses is lost, and the run goes on.
        """
        self._write_to_log(printable(text))
        with contextlib.suppress(OSError):
            if self._progress is not None:
                self._progress.console.print(text, soft_wrap=True)
            else:
                print(printable(text), file=self._stream, flush=True)

    def _write_to_log(self, text: str) -> None:
        """Write a line to log.txt; if the disk has refused earlier lines, first write how many are missing."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines = f"{now}  {text}\n"
        if self._num_lost:
            lines = f"{now}  {self._num_lost} lines are missing above, because the disk refused them\n{lines}"
        data = lines.encode()
        try:
            num_written = self._log.write(data)
        except OSError:
            num_written = 0
        if num_written == len(data):
            self._num_lost = 0
            return
        self._num_lost += 1
        with contextlib.suppress(OSError):  # no half line
            self._log.truncate(os.fstat(self._log.fileno()).st_size - num_written)


def _progress_bar(stream: TextIO) -> Progress:
    """Create a progress bar that shows its task's text field `eta`, and disappears when it is stopped."""
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


def format_header(total_steps: int) -> str:
    """Return a line with the names of the columns of `format_line`, each aligned to the right of its column."""
    names = ("mlm", "rtd", "repl", "orig", "lr", "gnorm", "tok/s", "mfu", "wait", "mem", "eta")
    widths = (6, 6, 5, 5, 8, 6, 5, 5, 5, 6, 6)
    cells = [f"{name:>{width}}" for name, width in zip(names, widths, strict=True)]
    return " ".join([f"{_step_column('step', total_steps)}  done", *cells])


def format_line(record: StepRecord, total_steps: int) -> str:
    """Return the line of a logged step, in columns that `LEGEND` explains; "-" for values that are not known."""
    columns = [
        f"{_step_column(f'{record.step}/{total_steps}', total_steps)} {_percent(record.step / total_steps)}",
        f"{record.mlm_loss:6.3f}" if record.mlm_loss else "     -",
        f"{record.rtd_loss or record.token_loss:6.4f}" if record.rtd_loss or record.token_loss else "     -",
        _percent(record.replaced_accuracy),
        _percent(record.original_accuracy),
        f"{record.lr:.2e}",
        _norm(record.grad_norm),
        f"{format_count(record.tokens_per_s):>5}",
        _percent(record.mfu),
        _percent(record.data_wait),
        "     -" if record.memory_gb is None else f"{record.memory_gb:5.1f}G",
        f"{format_duration(record.eta_s):>6}",
    ]
    return " ".join(columns)


def format_evaluation(record: EvalRecord, total_steps: int) -> list[str]:
    """Return the two lines of an evaluation on held-out rows, without the losses and scores that a run lacks."""
    begin = f"{_step_column(f'{record.step}/{total_steps}', total_steps)} eval:"
    losses = []
    if record.mlm_loss:
        losses.append(f"mlm {record.mlm_loss:.3f} acc {_percent(record.mlm_accuracy)}")
    if record.rtd_loss:
        losses.append(
            f"rtd {record.rtd_loss:.4f} acc {_percent(record.accuracy)} prec {_percent(record.precision)} "
            f"recall {_percent(record.recall)} auc {record.auc:.4f}"
        )
    if record.token_loss:
        losses.append(f"tokens {record.token_loss:.4f}")
    parts = []
    if math.isfinite(record.context_auc):
        parts.append(f"context auc {record.context_auc:.4f} +-{record.context_auc_se:.4f}")
    if math.isfinite(record.generator_entropy):
        parts.append(f"entropy {record.generator_entropy:.3f}, samples right {_percent(record.sampled_correct)}")
    parts.append(f"{record.rows} rows")
    return [f"{begin} {' | '.join(losses)}", f"{begin} {' | '.join(parts)}"]


def _step_column(text: str, total_steps: int) -> str:
    """Align a text to the right in the first column, which has room for "STEP/STEPS" at the last step."""
    width = max(len("step"), 2 * len(str(total_steps)) + 1)
    return f"{text:>{width}}"


def _percent(fraction: float | None) -> str:
    """Return a fraction as a percentage of five characters; "-" if it is None, NaN or infinite."""
    if fraction is None or not math.isfinite(fraction):
        return "    -"
    has_room_for_decimal = abs(fraction) < 0.9995  # A larger fraction would be rounded to 100.0, which is too wide.
    if has_room_for_decimal:
        return f"{100 * fraction:4.1f}%"
    return f"{100 * fraction:4.0f}%"


def _norm(norm: float) -> str:
    """Return a gradient norm as text of six characters: three decimals below 100, one below 10,000, then 1e+04."""
    if norm < 99.9995:  # From here on, three decimals would be rounded to 100.000, which is too wide.
        return f"{norm:6.3f}"
    if norm < 9999.95:  # From here on, one decimal would be rounded to 10000.0, which is too wide.
        return f"{norm:6.1f}"
    return f"{norm:6.0e}"

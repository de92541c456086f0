"""The log lines of a run, against a golden file; plain lines without a terminal, a progress bar with one."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.supervise.messages import Log
from support.hostile_text import HOSTILE, SHOWN

from electra_dist.errors import UserError
from electra_dist.run.log_lines import (
    LEGEND,
    LINES_PER_HEADER,
    Console,
    format_evaluation,
    format_header,
    format_line,
)
from electra_dist.run.metrics import EvalRecord, StepRecord

GOLDEN_LINES = Path(__file__).parent / "golden" / "lines.txt"
TOTAL_STEPS = 400_000


def test_log_lines_of_usual_and_extreme_values_equal_the_golden_file(
    step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    """The lines of training steps have one length, so that their columns stand below each other."""
    nan = float("nan")
    inf = float("inf")
    step_records = [
        step_record(),
        step_record(step=TOTAL_STEPS, eta_s=0.0, original_accuracy=1.0, data_wait=1.0),
        step_record(step=20, mlm_loss=10.3261, rtd_loss=0.69315, grad_norm=123.4567, lr=4e-7),
        step_record(step=40, tokens_per_s=3234.0, mfu=None, memory_gb=None, eta_s=None),
        step_record(step=60, mlm_loss=nan, grad_norm=inf, replaced_accuracy=nan, eta_s=59.6),
        step_record(step=80, rtd_loss=0.0, replaced_accuracy=nan, original_accuracy=nan),  # without detection
        step_record(step=99, rtd_loss=0.0, token_loss=2.5, replaced_accuracy=nan, original_accuracy=nan),
    ]
    eval_records = [
        eval_record(),
        eval_record(auc=nan),
        eval_record(context_auc=0.5712, context_auc_se=0.00413, generator_entropy=4.1234, sampled_correct=0.123),
        eval_record(rtd_loss=0.0, auc=nan, accuracy=nan, precision=nan, recall=nan),  # without detection
        eval_record(rtd_loss=0.0, token_loss=2.5, auc=nan, accuracy=nan, precision=nan, recall=nan),
    ]

    header = format_header(TOTAL_STEPS)
    step_lines = [format_line(record, TOTAL_STEPS) for record in step_records]
    eval_lines = [line for record in eval_records for line in format_evaluation(record, TOTAL_STEPS)]

    assert "\n".join([header, *step_lines, *eval_lines]) + "\n" == GOLDEN_LINES.read_text()
    assert len({len(line) for line in [header, *step_lines]}) == 1


@pytest.mark.parametrize("total_steps", [1, 20, 1_000_000])
def test_every_line_of_numbers_fits_100_columns_and_stands_below_its_header(
    total_steps: int, step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    record = step_record(step=total_steps, mlm_loss=10.3261, grad_norm=1e6, replaced_accuracy=1.0)
    diagnostics = {
        "context_auc": 0.5712,
        "context_auc_se": 0.00413,
        "generator_entropy": 10.1234,
        "sampled_correct": 1,
    }
    evaluation = eval_record(step=total_steps, mlm_loss=10.3261, rows=8192, **diagnostics)

    header = format_header(total_steps)
    line = format_line(record, total_steps)

    assert max(map(len, [header, line, *LEGEND, *format_evaluation(evaluation, total_steps)])) <= 100
    # Every name ends where a value ends.
    ends_of_names = {match.end() for match in re.finditer(r"\S+", header)}
    ends_of_values = {match.end() for match in re.finditer(r"\S+", line)}
    assert ends_of_names == ends_of_values


def test_the_columns_are_explained_at_the_first_line_and_named_again_every_40_lines(
    tmp_path: Path, step_record: Callable[..., StepRecord]
):
    stream = io.StringIO()
    console = Console(tmp_path, total_steps=100, start_step=0, stream=stream)
    for step in range(1, 82):
        console.line(step_record(step=step))
    console.close()

    lines = stream.getvalue().splitlines()
    assert tuple(lines[: len(LEGEND)]) == LEGEND
    numbers_of_headers = [number for number, line in enumerate(lines) if line == format_header(100)]
    assert numbers_of_headers == [len(LEGEND) + number * (LINES_PER_HEADER + 1) for number in range(3)]
    names = set(format_header(100).split()) - {"step", "done"}
    assert names <= set(re.findall(r"[\w/]+", " ".join(LEGEND)))


def test_without_a_terminal_lines_are_printed_plain_and_the_log_keeps_those_of_all_starts(
    tmp_path: Path, step_record: Callable[..., StepRecord]
):
    """The log has the lines of both starts, each with its time; the output of a start has its own lines only."""
    total_steps = 40
    for start_step in (0, 20):
        record = step_record(step=start_step + 20)
        stream = io.StringIO()
        console = Console(tmp_path, total_steps=total_steps, start_step=start_step, stream=stream)
        console.note("optimizer: foreach [ours]")
        console.line(record)
        console.close()
        console.close()  # a second close does nothing
        above_the_line = ["optimizer: foreach [ours]", *LEGEND, format_header(total_steps)]
        assert stream.getvalue().splitlines() == [*above_the_line, format_line(record, total_steps)]

    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 2 * len(above_the_line) + 2
    for line in log:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line)
    last_line = format_line(step_record(step=40), total_steps)
    assert log[-1].endswith(last_line)


class TerminalStream(io.StringIO):
    """A stream in memory that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_unbroken_lines_and_a_progress_bar_and_the_log_stays_plain(
    tmp_path: Path,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
    monkeypatch: pytest.MonkeyPatch,
):
    """The terminal is narrower than a line, which is left to the terminal to wrap."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = TerminalStream()
    console = Console(tmp_path, total_steps=TOTAL_STEPS, start_step=0, stream=stream)

    console.line(step_record())
    console.evaluation(eval_record())
    console.note("[bold]not markup[/bold]")
    console.close()

    text = stream.getvalue()
    assert format_line(step_record(), TOTAL_STEPS) in text
    assert "[bold]not markup[/bold]" in text
    assert "12340/400000" in text
    assert "eta 3d19h" in text
    escape = "\x1b"
    assert f"{escape}[" in text
    assert escape not in (tmp_path / "log.txt").read_text()


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path):
    (tmp_path / "log.txt").mkdir()

    with pytest.raises(UserError, match=r"log\.txt: is a folder, not a file"):
        Console(tmp_path, total_steps=1, start_step=0, stream=io.StringIO())


def test_a_line_with_text_of_others_is_one_line_without_controls_in_the_log_and_on_the_terminal(
    tmp_path: Path,
) -> None:
    name = os.fsdecode(b"shard-\xff.tar")
    stream = io.StringIO()
    console = Console(tmp_path, TOTAL_STEPS, 0, stream)
    console.note(f"{name}: {HOSTILE}")
    console.close()
    log = Log(tmp_path, 0)
    log(f"{name}: {HOSTILE}")

    assert stream.getvalue() == f"shard-\\udcff.tar: {SHOWN}\n"
    for file in ("log.txt", "supervise-0.log"):
        [line] = (tmp_path / file).read_text().splitlines()
        assert line.endswith(f"shard-\\udcff.tar: {SHOWN}")

"""Lines against a golden file; plain where there is no terminal, a bar where there is one; the log always."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.run.log_console import Console, format_evaluation, format_line
from electra_dist.run.step_records import EvalRecord, StepRecord

GOLDEN = Path(__file__).parent / "golden" / "lines.txt"


def test_lines_are_those_of_the_golden_file(
    step_record: Callable[..., StepRecord], eval_record: Callable[..., EvalRecord]
):
    nan, inf = float("nan"), float("inf")
    lines = [
        format_line(step_record(), 400_000),
        format_line(step_record(step=400_000, eta_s=0.0, original_accuracy=1.0, data_wait=1.0), 400_000),
        format_line(step_record(step=20, mlm_loss=10.3261, rtd_loss=0.69315, grad_norm=123.4567, lr=4e-7), 400_000),
        format_line(step_record(step=40, tokens_per_s=3234.0, mfu=None, memory_gb=None, eta_s=None), 400_000),
        format_line(step_record(step=60, mlm_loss=nan, grad_norm=inf, replaced_accuracy=nan, eta_s=59.6), 400_000),
        format_evaluation(eval_record(), 400_000),
        format_evaluation(eval_record(auc=nan), 400_000),
    ]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()
    assert len({len(line) for line in lines[:5]}) == 1  # columns stand under one another


def test_plain_output_and_log_of_two_starts(tmp_path: Path, step_record: Callable[..., StepRecord]):
    for start in (0, 20):
        stream = io.StringIO()
        console = Console(tmp_path, total_steps=40, start_step=start, stream=stream)
        console.note("optimizer: foreach [ours]")
        console.line(step_record(step=start + 20))
        console.close()
        console.close()
        assert stream.getvalue().splitlines() == [
            "optimizer: foreach [ours]",
            format_line(step_record(step=start + 20), 40),
        ]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 4
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in log)
    assert log[3].endswith(format_line(step_record(step=40), 40))


class _TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_whole_lines_above_a_bar_and_the_log_stays_plain(
    tmp_path: Path,
    step_record: Callable[..., StepRecord],
    eval_record: Callable[..., EvalRecord],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = _TerminalStream()
    console = Console(tmp_path, total_steps=400_000, start_step=0, stream=stream)
    console.line(step_record())
    console.evaluation(eval_record())
    console.note("[bold]not markup[/bold]")
    console.close()
    text = stream.getvalue()
    assert format_line(step_record(), 400_000) in text  # wider than the terminal, yet not broken by us
    assert "[bold]not markup[/bold]" in text
    assert "12340/400000" in text
    assert "eta 3d19h" in text
    assert "\x1b[" in text
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_an_unwritable_log_is_a_user_error(tmp_path: Path):
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(UserError, match=r"log\.txt: cannot be written"):
        Console(tmp_path, total_steps=1, start_step=0, stream=io.StringIO())

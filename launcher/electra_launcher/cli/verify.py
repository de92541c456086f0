"""`electra-dist verify RUN`: check that a run was trained on exactly the corpus rows that it should have used.

The seed fixes an order of the rows. A run records receipts: the number of rows used so far and a digest of their ids.
The command computes the receipts that this order gives and compares them with the recorded ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.stored_copies import checkpoints, open_targets, owner_of
from electra_dist.config import Config
from electra_dist.console import Console
from electra_dist.data.corpora import Corpora, open_corpora, steps_of_phases
from electra_dist.data.receipt import Receipt
from electra_dist.data.row_audit import AuditResult, Expected, Mark, verify
from electra_dist.errors import EXIT_CRASH, TornCheckpoint, UserError
from electra_dist.run.folder import METRICS_FILE, open_run, read_identity
from electra_dist.run.history import starts
from electra_dist.run.ledger import read_ledger
from electra_dist.run.metrics import iter_steps, metrics_are_lost
from electra_dist.train.guard import SkipList
from electra_launcher.cli.command_output import open_console, print_json, progress_bar

_MAX_STEPS_SHOWN = 20  # skipped steps that the output lists


def verify_rows(run: Path, as_json: bool) -> None:
    """Compare the receipts of a run with those that the prescribed rows give, and print what was found."""
    config = open_run(run)
    out = open_console()
    corpora = open_corpora(config.data)
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, config.train.global_batch)
    states, damaged = _read_checkpoint_states(config)
    skipped_steps = SkipList(run, config.train.skip_steps).steps | _overflowed_steps(run, states)
    marks = read_marks(run, states)
    if not marks:
        raise UserError(
            f"{run}: nothing to verify: no step was logged and no checkpoint exists; train some steps first"
        )
    expected = Expected(order, config.train.global_batch, skipped_steps)
    if not as_json:
        for line in damaged:
            out.print(line)
    with progress_bar(Console(stderr=True)) as progress:
        result = verify(marks, expected, corpora, lambda done, total: progress("receipts", done, total))
    if as_json:
        print_json(_json_tree(run, result, expected, damaged, corpora))
    else:
        _print_result(run, result, expected, corpora, out)
    if result.deviation:
        raise typer.Exit(EXIT_CRASH)


def _json_tree(
    run: Path, result: AuditResult, expected: Expected, damaged: list[str], corpora: Corpora
) -> dict[str, Any]:
    """Return the result of the command as a JSON object; `deviation` is null if the run used the prescribed rows."""
    last = result.last
    assert last is not None
    phases = []
    if len(corpora.phases) > 1:
        phases = [
            {"corpus": phase.url, "from_step": phase.from_step, "rows_used": used, "rows": phase.manifest.num_rows}
            for phase, used in zip(corpora.phases, _rows_used(last.step, expected, corpora), strict=True)
        ]
    return {
        "run": str(run),
        "good": result.deviation is None,
        "receipts": result.num_marks,
        "starts": _num_starts(run),
        "step": last.step,
        "rows": last.receipt.rows,
        "receipt": last.receipt.hex,
        "rows_per_epoch": corpora.phases[0].manifest.num_rows,
        "phases": phases,
        "skipped_steps": [step for step in expected.skipped if step < last.step],
        "deviation": asdict(result.deviation) if result.deviation else None,
        "damaged_checkpoints": damaged,
    }


def _num_starts(run: Path) -> int:
    return len(starts(read_ledger(run)))


def _read_checkpoint_states(config: Config) -> tuple[list[tuple[str, RunState]], list[str]]:
    """Return (URL, run state) of each complete checkpoint of the run, and a line of text for each damaged one."""
    owner = owner_of(config, read_identity(Path(config.run_dir)))
    states = []
    damaged = []
    for checkpoint in checkpoints(open_targets(config)):
        try:
            state = checkpoint.manifest().state
            if owner is not None:
                owner.check(state, checkpoint.store.url)
            states.append((checkpoint.url, state))
        except TornCheckpoint as error:
            advice = f"run `electra-dist checkpoint repair {shlex.quote(config.run_dir)}`"
            damaged.append(f"checkpoint {checkpoint.url} is damaged ({error}); {advice}")
    return states, damaged


def _overflowed_steps(run_dir: Path, states: Iterable[tuple[str, RunState]]) -> set[int]:
    """Return the numbers (from 0) of the steps that made no update because their gradients overflowed fp16.

    They are those in the run's metrics and in `states`, pairs of a checkpoint's name and its state.
    """
    # A record has the number of steps done, which is one more than the number of its step.
    steps = {record.step - 1 for record in iter_steps(run_dir, containing=b"true") if record.overflow}
    for _, state in states:
        steps.update(state.overflowed)
    return steps


def _print_result(run: Path, result: AuditResult, expected: Expected, corpora: Corpora, out: Console) -> None:
    """Print how many receipts were checked, the skipped steps, and how often rows were used or what is wrong."""
    last = result.last
    assert last is not None
    num_starts = _num_starts(run)
    starts_text = "1 start" if num_starts == 1 else f"{num_starts:,} starts"
    out.print(f"{run}: {result.num_marks:,} receipts checked, {starts_text}, step {last.step:,}")
    if metrics_are_lost(run, read_ledger(run)):
        out.print(f"{METRICS_FILE} is missing, so only the receipts in checkpoints were checked")
    skipped_steps = [step for step in expected.skipped if step < last.step]
    if skipped_steps:
        shown = ", ".join(map(str, skipped_steps[:_MAX_STEPS_SHOWN]))
        if len(skipped_steps) > _MAX_STEPS_SHOWN:
            shown += ", ..."
        steps_were = "step was" if len(skipped_steps) == 1 else "steps were"
        out.print(
            f"{len(skipped_steps)} {steps_were} skipped (by train.skip_steps, by the loss guard or by an overflow in "
            f"fp16; see ledger.jsonl and metrics.jsonl): {shown}"
        )
    deviation = result.deviation
    if deviation is not None:
        steps = f"steps {deviation.first_step:,} to {deviation.end_step - 1:,} ({deviation.source})"
        out.print(f"BAD: {steps}: {deviation.text}; everything before is good")
        return
    use_of_rows = _use_of_corpora(last.step, expected, corpora)
    if skipped_steps:
        use_of_rows += ", less those of the skipped steps"
    out.print(f"good: exactly the planned rows were used: {use_of_rows}; receipt {last.receipt.hex}")


def _use_of_corpora(num_steps: int, expected: Expected, corpora: Corpora) -> str:
    """Return in words how often each row of each corpus was used in the first `num_steps` steps."""
    rows_used = _rows_used(num_steps, expected, corpora)
    if len(rows_used) == 1:
        return _use_of_rows(rows_used[0], corpora.num_rows)
    uses = [
        f"{used:,} rows of {phase.url} from step {phase.from_step:,} on "
        f"({_use_of_rows(used, phase.manifest.num_rows)})"
        for phase, used in zip(corpora.phases, rows_used, strict=True)
        if used
    ]
    return "; ".join(uses)


def _rows_used(num_steps: int, expected: Expected, corpora: Corpora) -> list[int]:
    """Return how many rows of each phase the first `num_steps` steps use, skipped steps included."""
    steps = steps_of_phases([phase.from_step for phase in corpora.phases], num_steps)
    return [num_steps_of_phase * expected.global_batch for num_steps_of_phase in steps]


def _use_of_rows(num_used: int, rows_per_epoch: int) -> str:
    """Return in words how often each row of a corpus was used, if `num_used` rows were used, epoch after epoch.

    For example: "80 of the 640 rows of the corpus 4 times, the other 560 rows 3 times".
    """
    if num_used == 0:
        return "none yet"
    num_epochs, num_further_rows = divmod(num_used, rows_per_epoch)
    if num_further_rows == 0:
        return f"each of the {rows_per_epoch:,} rows of the corpus {_times(num_epochs)}"
    some_rows = f"{num_further_rows:,} of the {rows_per_epoch:,} rows of the corpus"
    if num_epochs == 0:
        return f"{some_rows}, each once"
    num_other_rows = rows_per_epoch - num_further_rows
    return f"{some_rows} {_times(num_epochs + 1)}, the other {num_other_rows:,} rows {_times(num_epochs)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def read_marks(run_dir: Path, states: Iterable[tuple[str, RunState]]) -> list[Mark]:
    """Return every receipt in a run's metrics and in `states`, pairs of a checkpoint's name and its state, by step.

    A receipt is the number of rows used so far and a digest of their ids. Each comes with the name of its source.
    """
    marks = []
    for record in iter_steps(run_dir):
        receipt = Receipt(rows=record.rows_seen, digest=int(record.receipt, base=16))
        marks.append(Mark(step=record.step, source=METRICS_FILE, receipt=receipt))
    for name, state in states:
        receipt = Receipt(rows=state.rows_seen, digest=state.rows_digest)
        marks.append(Mark(step=state.step, source=f"checkpoint {name}", receipt=receipt))
    return sorted(marks)

"""`electra-dist verify RUN`: check that a run was trained on exactly the rows that its row order prescribes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from electra_dist.analysis.row_audit import AuditResult, Expected, Mark, verify
from electra_dist.checkpoint.checkpoint_manifest import RunState, committed, read_manifest
from electra_dist.checkpoint.checkpoint_stores import open_targets
from electra_dist.config import Config
from electra_dist.data.corpus_manifest import read_manifest as read_corpus
from electra_dist.data.row_order import RowOrder
from electra_dist.data.row_receipt import Receipt
from electra_dist.errors import EXIT_CRASH, TornCheckpoint, UserError
from electra_dist.run.folder import METRICS_FILE, open_run
from electra_dist.run.ledger import read_ledger
from electra_dist.run.metrics_writer import read_metrics
from electra_dist.store.open_store import open_store
from electra_dist.train.skipped_steps import SkipList


def verify_command(run: Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")]) -> None:
    """Verify which corpus rows the run was trained on, up to the step reached.

    The receipts (row count and digest of the row ids) in the metrics and in the checkpoints are compared with those of
    the run's row order. Exit codes: 0 all agree, 1 they deviate at some step, 78 there is nothing to verify.
    """
    config = open_run(run)
    out = Console(highlight=False, soft_wrap=True)
    corpus = read_corpus(open_store(config.data.corpus, config.data.endpoint_url))
    rows_per_shard = [shard.rows for shard in corpus.shards]
    order = RowOrder(rows_per_shard, config.seed, config.data.shuffle_window_shards)
    skips = SkipList(run, config.train.skip_steps)
    marks = read_marks(run, _checkpoints(config, out))
    if not marks:
        raise UserError(
            f"{run}: nothing to verify: no step was logged and no checkpoint exists; train some steps first"
        )
    expected = Expected(order, rows_per_shard, config.train.global_batch, skips.steps)
    with Progress(transient=True) as progress:
        task = progress.add_task("receipts", total=None)
        verdict = verify(
            marks, expected, corpus, lambda done, total: progress.update(task, completed=done, total=total)
        )
    _print(run, verdict, expected, out)
    if verdict.deviation:
        raise typer.Exit(EXIT_CRASH)


def _checkpoints(config: Config, out: Console) -> list[tuple[str, RunState]]:
    """Return (name, state) of every committed checkpoint whose manifest can be read; print a line for the others."""
    checkpoints = []
    for store in open_targets(config):
        for _, _, folder in committed(store):
            try:
                checkpoints.append((f"{store.url}/{folder}", read_manifest(store, folder).state))
            except TornCheckpoint as error:
                advice = f"run `electra-dist checkpoint repair {config.run_dir}`"
                out.print(f"checkpoint {store.url}/{folder} is damaged ({error}); {advice}")
    return checkpoints


def _print(run: Path, verdict: AuditResult, expected: Expected, out: Console) -> None:
    """Print the verdict: the receipts checked, the skipped steps, and either the rows seen or the first deviation."""
    last = verdict.last
    rows_per_epoch = expected.order.rows_per_epoch
    assert last is not None
    starts = sum(event["event"] in ("start", "resume") for event in read_ledger(run))
    skipped = [step for step in expected.skipped if step < last.step]
    out.print(f"{run}: {verdict.num_marks:,} receipts checked, {starts} starts, step {last.step:,}")
    if skipped:
        shown = ", ".join(map(str, skipped[:20]))
        if len(skipped) > 20:
            shown += ", ..."
        out.print(f"{len(skipped)} steps were skipped (config or guard, see ledger.jsonl): {shown}")
    deviation = verdict.deviation
    if deviation is not None:
        steps = f"steps {deviation.first_step:,} to {deviation.end_step - 1:,} ({deviation.source})"
        out.print(f"BAD: {steps}: {deviation.text}; everything before is good")
        return
    num_epochs, num_extra_rows = divmod(last.step * expected.global_batch, rows_per_epoch)
    times_seen = f"exactly {num_epochs} times"
    if num_extra_rows:
        times_seen += f", {num_extra_rows:,} of them once more"
    if skipped:
        times_seen += ", less those of the skipped steps"
    out.print(f"good: {last.receipt.rows:,} rows, each of {rows_per_epoch:,} {times_seen}; receipt {last.receipt.hex}")


def read_marks(run_dir: Path, checkpoints: Iterable[tuple[str, RunState]]) -> list[Mark]:
    """Return every receipt that a run recorded, with its step and its source, sorted by step.

    A receipt is the number of rows that were used up to that step and a digest of their ids.

    Args:
        run_dir: the run folder, whose training records hold one receipt each.
        checkpoints: (name, state) of each checkpoint; a state holds a receipt.
    """
    marks = [
        Mark(record["step"], METRICS_FILE, Receipt(record["rows_seen"], int(record["receipt"], 16)))
        for record in read_metrics(run_dir)
        if record["kind"] == "train"
    ]
    for name, state in checkpoints:
        marks.append(Mark(state.step, f"checkpoint {name}", Receipt(state.rows_seen, state.rows_digest)))
    return sorted(marks)

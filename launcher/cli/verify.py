"""`electra-dist verify RUN`: which rows was this run trained on?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from electra_dist.analysis.row_audit import AuditResult, Expected, Mark, verify
from electra_dist.checkpoint.manifest import RunState, committed, read_manifest
from electra_dist.checkpoint.targets import open_targets
from electra_dist.config import Config
from electra_dist.data.manifest import read_manifest as read_corpus
from electra_dist.data.order import RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.errors import EXIT_CRASH, TornCheckpoint, UserError
from electra_dist.run.folder import METRICS_FILE, open_run
from electra_dist.run.ledger import read_ledger
from electra_dist.run.metrics import read_metrics
from electra_dist.store.open import open_store
from electra_dist.train.skip_list import SkipList


def verify_command(run: Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo_cpu")]) -> None:
    """Prove which rows the run was trained on, up to the step reached; exit 1 if they are not the order's."""
    config = open_run(run)
    out = Console(highlight=False, soft_wrap=True)
    corpus = read_corpus(open_store(config.data.corpus, config.data.endpoint_url))
    rows_per_shard = [shard.rows for shard in corpus.shards]
    order = RowOrder(rows_per_shard, config.seed, config.data.shuffle_window_shards)
    skips = SkipList(run, config.train.skip_steps)
    marks = read_marks(run, _checkpoints(config, out))
    if not marks:
        raise UserError(f"{run}: nothing to verify: no step was logged and no checkpoint exists; train on")
    expected = Expected(order, rows_per_shard, config.train.global_batch, skips.steps)
    with Progress(transient=True) as progress:
        task = progress.add_task("receipts", total=None)
        verdict = verify(marks, expected, corpus, lambda done, n: progress.update(task, completed=done, total=n))
    _print(run, verdict, expected, out)
    if verdict.deviation:
        raise typer.Exit(EXIT_CRASH)


def _checkpoints(config: Config, out: Console) -> list[tuple[str, RunState]]:
    """(name, state) of every committed checkpoint whose manifest can be read; the others are named."""
    found = []
    for store in open_targets(config):
        for _, _, folder in committed(store):
            try:
                found.append((f"{store.url}/{folder}", read_manifest(store, folder).state))
            except TornCheckpoint as error:
                out.print(
                    f"checkpoint {store.url}/{folder} is damaged ({error}); see `electra-dist checkpoint verify`"
                )
    return found


def _print(run: Path, verdict: AuditResult, expected: Expected, out: Console) -> None:
    last, rows_per_epoch = verdict.last, expected.order.rows_per_epoch
    assert last is not None
    starts = sum(event["event"] in ("start", "resume") for event in read_ledger(run))
    skipped = [step for step in expected.skipped if step < last.step]
    out.print(f"{run}: {verdict.num_marks:,} receipts checked, {starts} starts, step {last.step:,}")
    if skipped:
        shown = ", ".join(map(str, skipped[:20])) + (", ..." if len(skipped) > 20 else "")
        out.print(f"{len(skipped)} steps were skipped (config or guard, see ledger.jsonl): {shown}")
    if verdict.deviation is None:
        passes, rest = divmod(last.step * expected.global_batch, rows_per_epoch)
        seen = f"exactly {passes} times" + (f", {rest:,} of them once more" if rest else "")
        seen += ", less those of the skipped steps" if skipped else ""
        out.print(f"good: {last.receipt.rows:,} rows, each of {rows_per_epoch:,} {seen}; receipt {last.receipt.hex}")
        return
    bad = verdict.deviation
    out.print(
        f"BAD: steps {bad.first_step:,} to {bad.end_step - 1:,} ({bad.source}): {bad.text}; everything before is good"
    )


def read_marks(run_dir: Path, checkpoints: Iterable[tuple[str, RunState]]) -> list[Mark]:
    """Every mark of a run, by step."""
    marks = [
        Mark(r["step"], METRICS_FILE, Receipt(r["rows_seen"], int(r["receipt"], 16)))
        for r in read_metrics(run_dir)
        if r["kind"] == "train"
    ]
    for folder, state in checkpoints:
        marks.append(Mark(state.step, f"checkpoint {folder}", Receipt(state.rows_seen, state.rows_digest)))
    return sorted(marks)

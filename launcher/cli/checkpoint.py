"""`electra-dist checkpoint`: list, verify, compare and repair the checkpoints of a run.

PATH is a run folder (whose config names the checkpoint targets), a folder of checkpoints, or an s3:// prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from electra_dist.checkpoint.checkpoint_manifest import KINDS, read_manifest
from electra_dist.errors import EXIT_CRASH, StoreMissing, TornCheckpoint, UserError
from launcher.cli.checkpoint_paths import find_checkpoint, find_targets

if TYPE_CHECKING:  # These modules import torch; only the subcommands that read tensors load them.
    from electra_dist.checkpoint.repair import Found
    from electra_dist.checkpoint.state_diff import Side

app = typer.Typer(
    help="List, verify, compare and repair the checkpoints of a run.", no_args_is_help=True, add_completion=False
)

Where = Annotated[str, typer.Argument(metavar="PATH", help="run folder, folder of checkpoints, or s3:// prefix")]
Endpoint = Annotated[str | None, typer.Option(help="endpoint of an S3 service other than AWS, for an s3:// PATH")]
_ROWS = 40  # parameters that `diff` shows at most
_WIDTH = 60  # characters of a value that `diff` shows at most


@app.command("list")
def list_checkpoints(path: Where, endpoint_url: Endpoint = None) -> None:
    """List every checkpoint in every target: step, attempt, time, ranks, ZeRO stage, size, rows seen and state.

    States: committed (complete), damaged (its manifest is wrong), set aside (a load or a repair rejected it), leftover
    (an unfinished save). Only manifests are read; `verify` reads the tensors, too.
    """
    from electra_dist.checkpoint.repair import survey

    out = Console()
    for target in find_targets(path, endpoint_url):
        table = Table(
            "step", "attempt", "saved (UTC)", "ranks", "ZeRO", "size", "rows seen", "state", title=target.url
        )
        checkpoints = survey(target)
        for checkpoint in checkpoints:
            table.add_row(*_row(checkpoint))
        out.print(table if checkpoints else f"{target.url}: no checkpoints")


def _row(checkpoint: Found) -> list[str]:
    """Return one row of the table of `list`; most cells are empty for a checkpoint without a manifest."""
    step_and_attempt = [f"{checkpoint.step:,}", str(checkpoint.attempt)]
    manifest = checkpoint.manifest
    if manifest is None:
        status = f"[red]{checkpoint.status}[/red] {checkpoint.note}".strip()
        return [*step_and_attempt, "", "", "", "", "", status]
    state = manifest.state
    return [
        *step_and_attempt,
        manifest.saved_at.removesuffix("+00:00").replace("T", " "),
        str(state.world_size),
        str(state.zero_stage),
        f"{manifest.size_bytes / 1e6:,.1f} MB",
        f"{state.rows_seen:,}",
        checkpoint.status,
    ]


@app.command()
def verify(
    path: Where,
    step: Annotated[int | None, typer.Option(help="verify only the checkpoints of this step; default: all")] = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Read every byte of every committed checkpoint and name what is wrong.

    Exit codes: 0 all checkpoints are good, 1 at least one is not, 78 there is none.
    """
    from electra_dist.checkpoint.file_reader import verify as verify_all
    from electra_dist.checkpoint.repair import survey

    checkpoints = [
        checkpoint
        for target in find_targets(path, endpoint_url)
        for checkpoint in survey(target)
        if checkpoint.status in ("committed", "damaged") and step in (None, checkpoint.step)
    ]
    if not checkpoints:
        raise UserError(
            f"{path}: no checkpoint to verify; run `electra-dist checkpoint list {path}` to see what there is"
        )
    total_bytes = sum(checkpoint.manifest.size_bytes for checkpoint in checkpoints if checkpoint.manifest)
    num_bad = 0
    with _progress_of_bytes(total_bytes) as (out, advance):
        for checkpoint in checkpoints:
            begin = time.perf_counter()
            manifest, faults = verify_all(checkpoint.target, checkpoint.folder, advance)
            size_mb = manifest.size_bytes / 1e6 if manifest else 0.0
            verdict = "[red]BAD[/red] " if faults else "[green]good[/green]"
            out.print(f"{verdict} {checkpoint.url}  {size_mb:,.1f} MB in {time.perf_counter() - begin:.1f} s")
            for fault in faults:
                out.print(f"     {fault}")
            if faults:
                num_bad += 1
    out.print(f"{len(checkpoints) - num_bad} of {len(checkpoints)} checkpoints are good")
    if num_bad:
        out.print(f"next: electra-dist checkpoint repair {path}")
        raise typer.Exit(EXIT_CRASH)


@app.command()
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="folder of a checkpoint, or a PATH, whose newest checkpoint is taken")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="the checkpoint to compare with, named like A")],
    endpoint_url: Endpoint = None,
) -> None:
    """Compare two checkpoints: the fields of their states, and the largest difference of each parameter.

    Parameters are compared as master weights and both Adam moments. The state (step, ranks, ...) is shown but does not
    make checkpoints different. Exit codes: 0 equal bit for bit, 1 different, 78 one of them is damaged.
    """
    from electra_dist.checkpoint.state_diff import parameter_differences, state_differences

    left, right = _side(a, endpoint_url), _side(b, endpoint_url)
    states = Table("field", f"A {left.folder}", f"B {right.folder}", title="state")
    for field, left_value, right_value in state_differences(left.manifest.state, right.manifest.state):
        states.add_row(field, str(left_value)[:_WIDTH], str(right_value)[:_WIDTH])
    try:
        with Progress(transient=True) as progress:
            total = len(left.manifest.state.shapes)
            compared = list(progress.track(parameter_differences(left, right), total=total, description="parameters"))
    except TornCheckpoint as error:
        raise UserError(f"{error}; run `electra-dist checkpoint verify` on A and B") from None
    different = [parameter for parameter in compared if not parameter.equal]
    different.sort(key=lambda parameter: -max(parameter.largest.values()))
    table = Table("parameter", *(f"max |difference| of {kind}" for kind in KINDS), title="parameters that differ")
    for parameter in different[:_ROWS]:
        table.add_row(parameter.name, *(f"{parameter.largest[kind]:.3e}" for kind in KINDS))
    out = Console()
    if states.row_count:
        out.print(states)
    if different:
        out.print(table)
    same_shapes = left.manifest.state.shapes == right.manifest.state.shapes
    if same_shapes and not different:
        out.print(f"equal bit for bit: {len(compared)} parameters, weights and both moments")
        return
    note = "" if same_shapes else "; the other parameters are missing or of another shape in A or B"
    out.print(f"different: {len(different)} of {len(compared)} parameters{note}")
    raise typer.Exit(EXIT_CRASH)


@app.command()
def repair(
    path: Where,
    source: Annotated[str | None, typer.Option("--from", help="another PATH that may have good copies")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done, and change nothing")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Restore damaged checkpoints from a target that has a good copy, and remove leftovers of unfinished saves.

    A damaged checkpoint without a good copy is set aside: the run no longer loads it, and its files are kept.
    """
    from electra_dist.checkpoint.repair import repair as repair_targets

    targets = find_targets(path, endpoint_url)
    donors = find_targets(source, endpoint_url) if source else []
    num_actions = 0
    with _progress_of_bytes(None) as (out, advance):
        for line in repair_targets(targets, donors, dry_run=dry_run, advance=advance):
            out.print(line)
            num_actions += 1
    if not num_actions:
        out.print("every checkpoint is good and nothing is left over; nothing to do")
    elif dry_run:
        out.print("a dry run: nothing was changed; run it again without --dry-run")


def _side(path: str, endpoint_url: str | None) -> Side:
    """Find one checkpoint to compare and read its manifest.

    Raises:
        UserError: there is no such checkpoint, or its manifest is damaged.
    """
    from electra_dist.checkpoint.state_diff import Side

    store, folder = find_checkpoint(path, endpoint_url)
    try:
        return Side(store=store, folder=folder, manifest=read_manifest(store, folder))
    except (TornCheckpoint, StoreMissing) as error:
        raise UserError(f"{store.url}/{folder}: {error}; name another checkpoint") from None


@contextmanager
def _progress_of_bytes(total: int | None) -> Iterator[tuple[Console, Callable[[int], None]]]:
    """Show a progress bar of bytes during a `with` block; yield a console to print to and a function to advance it.

    Args:
        total: bytes of a full bar; None if unknown.
    """
    out = Console(highlight=False, soft_wrap=True)
    columns = [TextColumn("verified"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, transient=True, console=out) as progress:
        task = progress.add_task("verified", total=total)
        yield out, lambda num_bytes: progress.advance(task, num_bytes)

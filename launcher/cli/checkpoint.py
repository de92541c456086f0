"""`electra-dist checkpoint`: what a run has saved, whether it is good, how two differ, and mending.

PATH is a run's folder (its config says where the checkpoints are), a folder of checkpoints, or an s3:// prefix.
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

from electra_dist.checkpoint.manifest import KINDS, read_manifest
from electra_dist.errors import EXIT_CRASH, StoreMissing, TornCheckpoint, UserError
from launcher.cli.checkpoint_paths import find_checkpoint, find_targets

if TYPE_CHECKING:  # torch is imported by the commands that read tensors
    from electra_dist.checkpoint.diff import Side
    from electra_dist.checkpoint.repair import Found

app = typer.Typer(help="What a run has saved: list, verify, diff, repair.", no_args_is_help=True, add_completion=False)

Where = Annotated[str, typer.Argument(metavar="PATH", help="run's folder, folder of checkpoints, or s3:// prefix")]
Endpoint = Annotated[str | None, typer.Option(help="S3 endpoint other than AWS's, for an s3:// PATH")]
_ROWS, _WIDTH = 40, 60


@app.command("list")
def list_checkpoints(path: Where, endpoint_url: Endpoint = None) -> None:
    """Every checkpoint in every target: step, attempt, time, ranks, stage, size, rows, state."""
    from electra_dist.checkpoint.repair import survey

    out = Console()
    for target in find_targets(path, endpoint_url):
        table = Table(
            "step", "attempt", "saved (UTC)", "ranks", "ZeRO", "size", "rows seen", "state", title=target.url
        )
        found = survey(target)
        for each in found:
            table.add_row(*_row(each))
        out.print(table if found else f"{target.url}: no checkpoints")


def _row(each: Found) -> list[str]:
    place = [f"{each.step:,}", str(each.attempt)]
    if each.manifest is None:
        return [*place, "", "", "", "", "", f"[red]{each.status}[/red] {each.note}".strip()]
    state = each.manifest.state
    size = f"{each.manifest.size_bytes / 1e6:,.1f} MB"
    saved = each.manifest.saved_at.removesuffix("+00:00").replace("T", " ")
    return [*place, saved, str(state.world_size), str(state.zero_stage), size, f"{state.rows_seen:,}", each.status]


@app.command()
def verify(
    path: Where,
    step: Annotated[int | None, typer.Option(help="only the checkpoints of this step")] = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Read every byte of every committed checkpoint; name what is wrong. Exit 0: all are good; 1: one is not."""
    from electra_dist.checkpoint.read import verify as verify_all
    from electra_dist.checkpoint.repair import survey

    chosen = [
        each
        for target in find_targets(path, endpoint_url)
        for each in survey(target)
        if each.status in ("committed", "damaged") and step in (None, each.step)
    ]
    if not chosen:
        raise UserError(f"{path}: no such checkpoint; `electra-dist checkpoint list {path}` shows what there is")
    bad = 0
    with _bytes_read(sum(each.manifest.size_bytes for each in chosen if each.manifest)) as (out, advance):
        for each in chosen:
            begin = time.perf_counter()
            manifest, faults = verify_all(each.target, each.folder, advance)
            size = manifest.size_bytes / 1e6 if manifest else 0.0
            verdict = "[red]BAD[/red] " if faults else "[green]good[/green]"
            out.print(f"{verdict} {each.url}  {size:,.1f} MB in {time.perf_counter() - begin:.1f} s")
            for fault in faults:
                out.print(f"     {fault}")
            bad += bool(faults)
    out.print(f"{len(chosen) - bad} of {len(chosen)} checkpoints are good")
    if bad:
        out.print(f"next: electra-dist checkpoint repair {path}")
        raise typer.Exit(EXIT_CRASH)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="a checkpoint's folder, or a PATH: its newest")],
    b: Annotated[str, typer.Argument(metavar="B", help="as A")],
    endpoint_url: Endpoint = None,
) -> None:
    """Two checkpoints: what their states say, and how far each parameter is apart. Exit 0: equal; 1: not."""
    from electra_dist.checkpoint.diff import parameter_differences, state_differences

    left, right = _side(a, endpoint_url), _side(b, endpoint_url)
    states = Table("field", f"A {left.folder}", f"B {right.folder}", title="state")
    for field, mine, other in state_differences(left.manifest.state, right.manifest.state):
        states.add_row(field, str(mine)[:_WIDTH], str(other)[:_WIDTH])
    try:
        with Progress(transient=True) as progress:
            total = len(left.manifest.state.shapes)
            found = list(progress.track(parameter_differences(left, right), total=total, description="parameters"))
    except TornCheckpoint as error:
        raise UserError(f"{error}; see `electra-dist checkpoint verify`") from None
    apart = sorted((d for d in found if not d.equal), key=lambda d: -max(d.largest.values()))
    table = Table("parameter", *(f"max |difference| of {kind}" for kind in KINDS), title="parameters that differ")
    for each in apart[:_ROWS]:
        table.add_row(each.name, *(f"{each.largest[kind]:.3e}" for kind in KINDS))
    out = Console()
    if states.row_count:
        out.print(states)
    if apart:
        out.print(table)
    same_shapes = left.manifest.state.shapes == right.manifest.state.shapes
    if same_shapes and not apart:
        out.print(f"equal bit for bit: {len(found)} parameters, weights and both moments")
        return
    rest = "" if same_shapes else "; others are not in both"
    out.print(f"different: {len(apart)} of {len(found)} parameters{rest}")
    raise typer.Exit(EXIT_CRASH)


@app.command()
def repair(
    path: Where,
    source: Annotated[str | None, typer.Option("--from", help="another place that may have good copies")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be done")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Restore bad checkpoints from a target that has them good, else set them aside; remove leftovers."""
    from electra_dist.checkpoint.repair import repair as mend

    targets = find_targets(path, endpoint_url)
    donors = find_targets(source, endpoint_url) if source else []
    done = 0
    with _bytes_read(None) as (out, advance):
        for line in mend(targets, donors, dry_run=dry_run, advance=advance):
            out.print(line)
            done += 1
    if not done:
        out.print("every checkpoint is good and nothing is left over; nothing to do")
    elif dry_run:
        out.print("a dry run: nothing was changed")


def _side(path: str, endpoint_url: str | None) -> Side:
    from electra_dist.checkpoint.diff import Side

    store, folder = find_checkpoint(path, endpoint_url)
    try:
        return Side(store=store, folder=folder, manifest=read_manifest(store, folder))
    except (TornCheckpoint, StoreMissing) as error:
        raise UserError(f"{store.url}/{folder}: {error}; name another checkpoint") from None


@contextmanager
def _bytes_read(total: int | None) -> Iterator[tuple[Console, Callable[[int], None]]]:
    """A bar of `total` bytes: where to print beside it, and how to move it on."""
    out = Console(highlight=False, soft_wrap=True)
    columns = TextColumn("verified"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, transient=True, console=out) as progress:
        task = progress.add_task("verified", total=total)
        yield out, lambda num_bytes: progress.advance(task, num_bytes)

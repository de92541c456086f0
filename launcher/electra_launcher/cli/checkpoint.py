"""`electra-dist checkpoint`: list, verify, compare and repair the checkpoints of a run.

PATH is a run folder, a folder of checkpoints, or an s3:// prefix. The config in a run folder names the checkpoint
targets: the folders or S3 prefixes to which the run saves its checkpoints.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from electra_dist.console import Console, styled
from electra_dist.errors import EXIT_CRASH, StoreMissing, TornCheckpoint, UserError
from electra_launcher.cli.command_output import byte_progress, open_console, print_json, progress_bar
from electra_launcher.cli.options import AsJson

if TYPE_CHECKING:  # They are loaded by the subcommands that need them, not for --help.
    from rich.table import Table
    from rich.text import Text

    from electra_dist.checkpoint.reader import CheckpointReader
    from electra_dist.checkpoint.repair import Difference, Found
    from electra_dist.checkpoint.stored_copies import Checkpoint, Owner
    from electra_dist.store.interface import Store

app = typer.Typer(
    help="List, verify, compare and repair the checkpoints of a run.", no_args_is_help=True, add_completion=False
)

Where = Annotated[str, typer.Argument(metavar="PATH", help="run folder, folder of checkpoints, or s3:// prefix")]
Endpoint = Annotated[str | None, typer.Option(help="endpoint of the S3 service of an s3:// PATH; default: AWS")]
_MAX_PARAMETERS_SHOWN = 40  # by `diff`
_MAX_VALUE_CHARS = 60  # of a field of the state, in the output of `diff`


@app.command("list")
def list_checkpoints(path: Where, endpoint_url: Endpoint = None, as_json: AsJson = False) -> None:
    """List every checkpoint: step, attempt (start of the run that saved it), time, ranks, ZeRO stage, size and state.

    All targets (folders or S3 prefixes for the checkpoints of a run) are listed. States: committed (complete), damaged
    (its manifest is wrong), of another run (than that of the run folder PATH), set aside (a load or a repair rejected
    it), leftover (an unfinished save). Only manifests are read; `verify` reads the tensors, too.
    """
    owner = find_owner(path)
    targets = find_targets(path, endpoint_url)

    from rich.table import Table

    from electra_dist.checkpoint.repair import survey

    surveys = [(target, survey(target, owner)) for target in targets]
    if as_json:
        print_json(
            [{"target": target.url, "checkpoints": [_json_tree(each) for each in found]} for target, found in surveys]
        )
        return
    out = open_console(soft_wrap=False)
    for target, found in surveys:
        if not found:
            out.print(f"{target.url}: no checkpoints")
            continue
        table = Table(
            "step", "attempt", "saved (UTC)", "ranks", "ZeRO", "size", "rows seen", "state", title=target.url
        )
        for each in found:
            table.add_row(*_table_row(each))
        out.print(table)


def _json_tree(found: Found) -> dict[str, Any]:
    """Return a checkpoint as a JSON object for `list --json`; values from a missing or damaged manifest are null."""
    manifest = found.manifest
    state = manifest.state if manifest else None
    return {
        "url": found.checkpoint.url,
        "step": found.checkpoint.step,
        "attempt": found.checkpoint.attempt,
        "status": found.status,
        "note": found.note,
        "saved_at": manifest.saved_at if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "ranks": state.world_size if state else None,
        "zero_stage": state.zero_stage if state else None,
        "rows_seen": state.rows_seen if state else None,
    }


def _table_row(found: Found) -> list[str | Text]:
    """Return a checkpoint's row in the table of `list`; cells with values from a missing manifest are empty."""
    manifest = found.manifest
    cells = [""] * 5
    if manifest is not None:
        cells = [
            manifest.saved_at.removesuffix("+00:00").replace("T", " "),
            str(manifest.state.world_size),
            str(manifest.state.zero_stage),
            f"{manifest.size_bytes / 1e6:,.1f} MB",
            f"{manifest.state.rows_seen:,}",
        ]
    status: str | Text = found.status
    if found.note or manifest is None:
        status = styled((found.status, "red"), f" {found.note}" if found.note else "")
    return [f"{found.checkpoint.step:,}", str(found.checkpoint.attempt), *cells, status]


@app.command()
def verify(
    path: Where,
    step: Annotated[int | None, typer.Option(help="verify only the checkpoints of this step; default: all")] = None,
    endpoint_url: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of every checkpoint that has a manifest, and print what is wrong in each.

    Leftovers of unfinished saves and checkpoints that were set aside are not read. Exit codes: 0 all checkpoints are
    good, 1 at least one is not, 78 there is none, or PATH is a run folder and another run has written one.
    """
    chosen = _checkpoints_to_verify(path, step, endpoint_url)
    total_bytes = sum(found.manifest.size_bytes for found in chosen if found.manifest)
    verified: list[Verified] = []
    out = Console(stderr=True) if as_json else open_console()
    with byte_progress(out, total_bytes) as advance:
        for found in chosen:
            verified.append(_verify(found.checkpoint, advance))
            if not as_json:
                _print_verified(verified[-1], out)
    num_good = sum(not one.faults for one in verified)
    if as_json:
        print_json({"good": num_good, "checkpoints": [asdict(one) for one in verified]})
    else:
        out.print(f"{num_good} of {len(chosen)} checkpoints are good")
    if num_good < len(chosen):
        if not as_json:
            out.print(f"next: electra-dist checkpoint repair {shlex.quote(path)}", soft_wrap=True)
        raise typer.Exit(EXIT_CRASH)


def _checkpoints_to_verify(path: str, step: int | None, endpoint_url: str | None) -> list[Found]:
    """Return the checkpoints below `path` that have a manifest, good or damaged; raise UserError if there is none."""
    owner = find_owner(path)
    targets = find_targets(path, endpoint_url)

    from electra_dist.checkpoint.repair import survey

    chosen = []
    for target in targets:
        for found in survey(target):
            if owner is not None and found.manifest is not None:
                owner.check(found.manifest.state, target.url)
            has_manifest = found.status in ("committed", "damaged")
            is_wanted_step = step is None or found.checkpoint.step == step
            if has_manifest and is_wanted_step:
                chosen.append(found)
    if not chosen:
        wanted = "" if step is None else f" of step {step}"
        raise UserError(f"{path}: no checkpoint{wanted} to verify; {_advice_to_list(path)}")
    return chosen


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of reading every byte of one checkpoint; the checkpoint is good if `faults` is empty."""

    url: str
    step: int
    size_bytes: int  # 0 if the manifest is damaged
    seconds: float
    faults: list[str]


def _verify(checkpoint: Checkpoint, advance: Callable[[int], None]) -> Verified:
    """Read every byte of a checkpoint; `advance` is called with the number of bytes read since its last call."""
    from electra_dist.checkpoint.reader import verify as verify_files

    begin = time.perf_counter()
    manifest, faults = verify_files(checkpoint, advance)
    elapsed_s = time.perf_counter() - begin
    return Verified(
        url=checkpoint.url,
        step=checkpoint.step,
        size_bytes=manifest.size_bytes if manifest else 0,
        seconds=elapsed_s,
        faults=list(faults),
    )


def _print_verified(verified: Verified, out: Console) -> None:
    """Print "good" or "BAD" for a checkpoint, with its size and how long reading took, and a line for each fault."""
    verdict = ("BAD ", "red") if verified.faults else ("good", "green")
    out.print(styled(verdict, f" {verified.url}  {verified.size_bytes / 1e6:,.1f} MB in {verified.seconds:.1f} s"))
    for fault in verified.faults:
        out.print(f"     {fault}")


@app.command()
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="folder of a checkpoint, or a PATH, whose newest checkpoint is taken")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="the checkpoint to compare with, named like A")],
    endpoint_url: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: the fields of their states, and the largest difference of each parameter.

    Of each parameter, the master weights and both Adam moments are compared. Differences of the state (step, ranks,
    ...) are printed but do not count. Exit codes: 0 all parameters are equal bit for bit, 1 at least one is not, 78 a
    checkpoint is damaged or missing.
    """
    left = _open_side(a, endpoint_url)
    right = _open_side(b, endpoint_url)
    compared = _Comparison(left, right, _compare_parameters(left, right))
    if as_json:
        print_json(compared.json_tree())
    else:
        _print_diff(compared)
    if not compared.equal:
        raise typer.Exit(EXIT_CRASH)


@dataclass(frozen=True)
class _Comparison:
    """Two checkpoints, and the differences of the parameters that have the same shape in both."""

    left: CheckpointReader
    right: CheckpointReader
    parameters: list[Difference]

    @property
    def different(self) -> list[Difference]:
        return [parameter for parameter in self.parameters if not parameter.equal]

    @property
    def same_shapes(self) -> bool:
        return self.left.manifest.state.shapes == self.right.manifest.state.shapes

    @property
    def equal(self) -> bool:
        return self.same_shapes and not self.different

    def json_tree(self) -> dict[str, Any]:
        """Return a JSON object with all parameters and fields of the run state that differ."""
        from electra_dist.checkpoint.repair import state_differences

        fields = state_differences(self.left.manifest.state, self.right.manifest.state)
        return {
            "a": self.left.checkpoint.url,
            "b": self.right.checkpoint.url,
            "equal": self.equal,
            "compared": len(self.parameters),
            "same_shapes": self.same_shapes,
            "state": [{"field": field, "a": a, "b": b} for field, a, b in fields],
            "parameters": [asdict(difference) for difference in self.different],
        }


def _print_diff(compared: _Comparison) -> None:
    """Print the differences of two checkpoints as tables, and a last line with the verdict."""
    out = open_console(soft_wrap=False)
    state_table = _state_table(compared.left, compared.right)
    if state_table.row_count:
        out.print(state_table)
    different, num_compared = compared.different, len(compared.parameters)
    if different:
        out.print(_parameter_table(different))
    if compared.equal:
        out.print(f"equal bit for bit: {num_compared} parameters, weights and both moments")
        return
    note = "" if compared.same_shapes else "; the other parameters are missing or of another shape in A or B"
    out.print(f"different: {len(different)} of {num_compared} parameters{note}")


def _compare_parameters(left: CheckpointReader, right: CheckpointReader) -> list[Difference]:
    """Compare the parameters that have the same shape in both checkpoints; show a progress bar on stderr."""
    from electra_dist.checkpoint.repair import parameter_differences

    num_parameters = len(left.manifest.state.shapes)
    compared: list[Difference] = []
    try:
        with progress_bar(Console(stderr=True)) as progress:
            for difference in parameter_differences(left, right):
                compared.append(difference)
                progress("parameters", len(compared), num_parameters)
    except TornCheckpoint as error:
        raise UserError(str(error)) from None
    return compared


def _state_table(left: CheckpointReader, right: CheckpointReader) -> Table:
    """Return a table of those fields of the run state, such as step and ranks, that differ between two checkpoints."""
    from rich.table import Table

    from electra_dist.checkpoint.repair import state_differences

    table = Table("field", f"A {left.checkpoint.folder}", f"B {right.checkpoint.folder}", title="state")
    for field, left_value, right_value in state_differences(left.manifest.state, right.manifest.state):
        table.add_row(field, str(left_value)[:_MAX_VALUE_CHARS], str(right_value)[:_MAX_VALUE_CHARS])
    return table


def _parameter_table(different: list[Difference]) -> Table:
    """Return a table of the parameters that differ most, with the largest absolute difference between elements."""
    from rich.table import Table

    from electra_dist.checkpoint.manifest import KINDS

    table = Table("parameter", *(f"max |difference| of {kind}" for kind in KINDS), title="parameters that differ")
    largest_first = sorted(different, key=lambda parameter: -max(parameter.largest.values()))
    for parameter in largest_first[:_MAX_PARAMETERS_SHOWN]:
        cells = [f"{parameter.largest[kind]:.3e}" for kind in KINDS]
        table.add_row(parameter.name, *cells)
    return table


@app.command()
def repair(
    path: Where,
    source: Annotated[str | None, typer.Option("--from", help="another PATH that may have good copies")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done, and change nothing")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Restore damaged checkpoints from a good copy of them, and remove leftovers of unfinished saves.

    The copy is searched in all targets (folders or S3 prefixes) of PATH and of --from. Checkpoints of another run are
    refused before anything is changed, and what the run has given up itself is not restored. A damaged checkpoint
    without a good copy is set aside: the run no longer loads it, and its files are kept.
    """
    targets = find_targets(path, endpoint_url)
    donors = find_targets(source, endpoint_url) if source else []

    from electra_dist.checkpoint.repair import repair as repair_targets

    num_actions = 0
    out = open_console()
    with byte_progress(out, None) as advance:
        for line in repair_targets(targets, donors, dry_run=dry_run, advance=advance, owner=find_owner(path)):
            out.print(line)
            num_actions += 1
    if not num_actions:
        out.print("every checkpoint is good and nothing is left over; nothing to do")
    elif dry_run:
        out.print("a dry run: nothing was changed; run it again without --dry-run")


def _open_side(path: str, endpoint_url: str | None) -> CheckpointReader:
    """Open a checkpoint that `diff` compares; raise UserError if it is missing, damaged or another run's."""
    checkpoint = find_checkpoint(path, endpoint_url)

    from electra_dist.checkpoint.reader import CheckpointReader

    try:
        reader = CheckpointReader(checkpoint)
    except (TornCheckpoint, StoreMissing) as error:
        raise UserError(f"{checkpoint.url}: {error}; give another checkpoint") from None
    owner = find_owner(path)
    if owner is not None:
        owner.check(reader.manifest.state, checkpoint.store.url)
    return reader


def _advice_to_list(path: str) -> str:
    return f"run `electra-dist checkpoint list {shlex.quote(path)}` to see what there is"


# Stores and checkpoints that PATH names


def find_targets(path: str, endpoint_url: str | None = None) -> list[Store]:
    """Return the stores in which `path` has checkpoints: for a run folder all targets of the run, otherwise `path`.

    `endpoint_url` is the S3 endpoint of an s3:// path (None: AWS). For a run folder, the run's config names it.
    """
    from electra_dist.checkpoint.stored_copies import open_targets
    from electra_dist.run.folder import is_run_folder, open_run
    from electra_dist.store.open_store import REMOTE_SCHEMES, open_store

    if path.startswith(REMOTE_SCHEMES):
        return [open_store(path, endpoint_url)]
    folder = Path(path)
    if is_run_folder(folder):
        return open_targets(open_run(folder))
    if not folder.is_dir():
        raise UserError(
            f"{path}: no such folder; give a run folder, a folder of checkpoints or an s3://, az:// or gs:// prefix"
        )
    return [open_store(path)]


def find_owner(path: str) -> Owner | None:
    """Return the run of the run folder `path`, whose checkpoints must be its own; None if `path` is no run folder."""
    from electra_dist.checkpoint.stored_copies import owner_of
    from electra_dist.run.folder import is_run_folder, open_run, read_identity
    from electra_dist.store.open_store import REMOTE_SCHEMES

    if path.startswith(REMOTE_SCHEMES) or not is_run_folder(Path(path)):
        return None
    return owner_of(open_run(Path(path)), read_identity(Path(path)))


def find_checkpoint(path: str, endpoint_url: str | None = None) -> Checkpoint:
    """Return the checkpoint whose folder is `path`, or else the newest complete checkpoint below `path`.

    A checkpoint is complete if it has a manifest; for the folder `path` itself this is not checked. If several stores
    hold the newest checkpoint, that of the first store is returned.
    """
    from electra_dist.checkpoint.stored_copies import Checkpoint, checkpoints, parse_folder
    from electra_dist.store.open_store import open_store

    parent, _, name = path.rstrip("/").rpartition("/")
    step_and_attempt = parse_folder(name)
    if step_and_attempt is not None:
        return Checkpoint(*step_and_attempt, open_store(parent or ".", endpoint_url))
    found = checkpoints(find_targets(path, endpoint_url))
    if not found:
        raise UserError(f"{path}: no committed checkpoint; {_advice_to_list(path)}")
    return found[0]

"""Commands about a run: `status`, `why`, `verify` and `report`.

Modules that a command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, print_json
from electra_launcher.cli.options import AsJson, RunFolder


def status(run: RunFolder, as_json: AsJson = False) -> None:
    """Show where a run stands, its jobs and nodes, and what to do next. Changes nothing.

    The goodput, which it also shows, is the time of useful training steps divided by all time outside Slurm's queue.
    """
    from electra_launcher.cli.run_facts import facts, first_start, gather
    from electra_launcher.cli.status import lines, lines_of_first_start

    starting = first_start(run)
    if as_json:
        print_json(starting or facts(gather(run)))
        return
    page = lines(gather(run)) if starting is None else lines_of_first_start(starting)
    out = open_console()
    for line in page:
        out.print(line)


def why(run: RunFolder, as_json: AsJson = False) -> None:
    """Say why the newest start of a run has ended, whose fault that is, whether it is started again, and what to do.

    A supervisor (`electra-dist train`, or a Slurm job) finds out and records it; what it knows no class for is called
    unknown, with the end of the rank's output.
    """
    from electra_dist.run.failures import account_of_end, read_failures
    from electra_dist.run.folder import SLURM_DIR, is_run_folder, no_run
    from electra_dist.run.lease import read_owner
    from electra_dist.run.ledger import read_ledger

    ledger, failures, lease = read_ledger(run), read_failures(run), read_owner(run)
    # A start may fail before it has written a config, and a submitted run has none.
    if not (ledger or failures or lease or is_run_folder(run) or (run / SLURM_DIR).is_dir()):
        raise no_run(run)
    known = account_of_end(run, ledger, failures, lease)
    if known["class"] is None and known["state"] in ("stopped", "done", "running or killed"):
        from electra_launcher.cli.run_facts import facts, first_start, gather

        with contextlib.suppress(UserError):  # The account needs no config that can be read.
            seen = first_start(run) or facts(gather(run))
            if known["state"] == "running or killed":
                known |= _account_of_state(seen)
            known["next"] = seen["next"]  # in the way in which the run was started: by hand or by Slurm
    if as_json:
        print_json(known)
    else:
        _print_account(known)


def _account_of_state(seen: dict[str, Any]) -> dict[str, Any]:
    """Return "state" and "what" of a run whose newest start has recorded no end, by what `status` has `seen`."""
    if seen["state"] == "dead":
        return {"state": "killed", "what": f"no end is recorded; {seen['reason']}"}
    if seen["state"] == "living":
        return {"state": "running", "what": seen["reason"] or f"the newest start goes on, at step {seen['step']:,}"}
    return {"state": seen["state"], "what": seen["reason"]}


def _print_account(known: dict[str, Any]) -> None:
    """Print what is known of the end of a run: the object of `why --json`, without what is null in it."""
    out = open_console()
    out.print(f"run {known['run']}: {known['state']}")
    for name in ("what", "line", "fault", "rows", "restart", "output"):
        value = known[name]
        if value and name == "rows":
            first, last = value
            value = f"{first:,} to {last:,} of the run's order"
        if value:
            out.print(f"  {name:<11} {value}")
    out.print("next:")
    for step in known["next"]:
        out.print(f"    {step}")


def verify(
    path: Annotated[
        str,
        typer.Argument(metavar="RUN", help="folder of a run, for example runs/demo_cpu; with --bytes also a corpus"),
    ],
    read_bytes: Annotated[
        bool,
        typer.Option("--bytes", help="read every byte of corpus, tokenizer and checkpoints again, and check digests"),
    ] = False,
    endpoint_url: Annotated[
        str | None, typer.Option(help="with --bytes: endpoint of the S3 service of an s3:// corpus; default: AWS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that the run was trained on exactly the corpus rows that its seed prescribes, up to the step reached.

    A run records receipts (number of rows used so far and digest of their ids) in its metrics and checkpoints. They
    are compared with the receipts that the prescribed rows give. Exit codes: 0 all agree, 1 they deviate at some step,
    78 there is nothing to verify, or another run has written a checkpoint.

    This proves the rows, not the losses. To compare losses, train again with `--set run_dir=OTHER` on as many ranks,
    then run `electra-dist checkpoint diff RUN OTHER`.

    With --bytes, RUN may also be a corpus (folder or s3:// prefix). All shards, vocabularies and checkpoints are read
    again and compared with the digests of their manifests. Exit codes: 0 all are good, 78 with a line for each that
    is not.
    """
    from electra_dist.data.manifest import MANIFEST_KEY
    from electra_dist.run.folder import is_run_folder, open_run
    from electra_dist.store.open_store import open_store

    # A wrong path is found before torch is imported.
    if read_bytes:
        is_run = "://" not in path and is_run_folder(Path(path))
        if not is_run and not open_store(path, endpoint_url).exists(MANIFEST_KEY):
            raise UserError(
                f"{path}: neither a run (config.yaml) nor a finished corpus ({MANIFEST_KEY}); give the folder of one"
            )
        from electra_launcher.cli.verify_bytes import verify_bytes

        verify_bytes(path, endpoint_url, as_json)
    else:
        open_run(path)
        from electra_launcher.cli.verify import verify_rows

        verify_rows(Path(path), as_json)


def _check_local_checkpoints(run: Path) -> None:
    """Raise a UserError if another run has written local checkpoints of `run`. Checkpoints on S3 are not checked."""
    from electra_dist.checkpoint.stored_copies import owner_of
    from electra_dist.run.folder import open_run, read_identity
    from electra_dist.store.open_store import REMOTE_SCHEMES, open_store

    try:
        config = open_run(run)
    except UserError:
        return  # a report is made of the records alone, also without a config that this version can read
    owner = owner_of(config, read_identity(run))
    if owner is not None:
        owner.check_all([open_store(url) for url in config.checkpoint_urls if not url.startswith(REMOTE_SCHEMES)])


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folder of the run, or of each of up to eight runs", metavar="RUN...")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="page to write; default: RUN/report.html, and ./runs_report.html for several runs"),
    ] = None,
) -> None:
    """Write a page about the course of a run, or one page that lays several runs over each other, and print its path.

    The page is one HTML file, made from the records in the run folders, so it can be written at any time. It replaces
    an older one. A run folder with checkpoints of another run is refused.
    """
    from electra_dist.console import Console
    from electra_dist.run.folder import METRICS_FILE, no_run
    from electra_dist.run.ledger import read_ledger
    from electra_dist.run.metrics import metrics_are_lost

    for run in runs:
        if not run.is_dir():
            raise no_run(run)
        _check_local_checkpoints(run)
        if metrics_are_lost(run, read_ledger(run)):
            Console(stderr=True).print(
                f"{run / METRICS_FILE} is missing, so the page has no losses, scores and curves; restore the file "
                f"from a copy, then repeat this command",
                soft_wrap=True,
            )
    from electra_dist.report.report_page import OVERLAY_FILE, write_overlay, write_report

    out = open_console()
    if len(runs) == 1:
        out.print(str(write_report(runs[0], output)))
    else:
        out.print(str(write_overlay(runs, output or Path(OVERLAY_FILE))))

"""Commands about a run: `status`, `why`, `verify`, `report` and `submit`.

Modules that a command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, print_json
from electra_launcher.cli.options import AcceptNewNumerics, AsJson, Overrides, Partition, RunFolder, SbatchOptions

if TYPE_CHECKING:
    from electra_launcher.slurm.batch_script import Submission


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


RunConfig = Annotated[Path, typer.Option(help="YAML file of the run, for example configs/large_25pct_mask.yaml")]
Nodes = Annotated[int, typer.Option(min=1, help="number of nodes")]
Each = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE,VALUE",
        help="submit one run for each value of a config key, in a run folder of its own; with several such "
        "options one for each combination",
    ),
]
GpusPerNode = Annotated[
    int, typer.Option(min=0, help="GPUs per node, one rank for each; 0: no GPU, one CPU rank per node")
]
Spares = Annotated[
    int,
    typer.Option(
        min=0,
        help="further nodes of each job; one of them takes the place of a node that dies or is unhealthy, without "
        "a new job",
    ),
]
TimeLimit = Annotated[
    str | None, typer.Option(help="time limit of one job, as for sbatch's --time; default: the partition's")
]
Chain = Annotated[
    int, typer.Option(min=0, help="number of jobs that run one after another; 0: one job that is requeued instead")
]
SignalAhead = Annotated[
    int, typer.Option(min=1, help="seconds before the time limit at which the ranks save and stop")
]
ContainerImage = Annotated[
    str | None, typer.Option(help="container image that the ranks run in; default: no container")
]
ContainerRuntime = Annotated[
    Literal["pyxis", "apptainer"],
    typer.Option(help="how to run the image: pyxis (srun's --container-image) or apptainer"),
]
Mounts = Annotated[
    list[str] | None,
    typer.Option(metavar="SOURCE[:TARGET]", help="folder to mount in the container; may be repeated"),
]
SetupFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="shell file that every node reads before the ranks start, for modules and variables of NCCL or the "
        "network",
    ),
]
StageEnvironment = Annotated[
    bool,
    typer.Option(
        "--stage-environment",
        help="copy the Python packages to the own disk of every node, so that hundreds of ranks do not import "
        "them from the shared file system",
    ),
]
DryRun = Annotated[bool, typer.Option(help="print the batch script; write and submit nothing")]


def submit(
    config: RunConfig,
    nodes: Nodes,
    overrides: Overrides = None,
    each: Each = None,
    gpus_per_node: GpusPerNode = 8,
    spares: Spares = 0,
    partition: Partition = None,
    time: TimeLimit = None,
    chain: Chain = 0,
    signal_ahead: SignalAhead = 120,
    container: ContainerImage = None,
    container_runtime: ContainerRuntime = "pyxis",
    mount: Mounts = None,
    setup: SetupFile = None,
    sbatch: SbatchOptions = None,
    accept_new_numerics: AcceptNewNumerics = False,
    stage_environment: StageEnvironment = False,
    dry_run: DryRun = False,
) -> None:
    """Submit a run to Slurm. Its jobs continue it after time limits, preemption and dead nodes until it is finished.

    The config and the batch script are written to RUN/slurm/, where RUN is the run_dir of the config. Submitting again
    with the same run_dir resumes the run from its newest checkpoint.
    """
    from electra_launcher.slurm.batch_script import Container, JobOptions, batch_script
    from electra_launcher.slurm.submit import check
    from electra_launcher.slurm.submit import submit as submit_jobs

    ranks_container = None
    if container:
        ranks_container = Container(image=container, runtime=container_runtime, mounts=tuple(mount or ()))
    options = JobOptions(
        num_nodes=nodes,
        spare_nodes=spares,
        gpus_per_node=gpus_per_node,
        partition=partition,
        time_limit=time,
        chain=chain,
        signal_ahead_s=signal_ahead,
        container=ranks_container,
        sbatch_options=tuple(sbatch or ()),
        accept_new_numerics=accept_new_numerics,
        setup_file=setup,
        stage_environment=stage_environment,
    )
    for submission in check(config, overrides or (), each or (), options, ["electra-dist", *sys.argv[1:]]):
        if dry_run:
            print(batch_script(submission), end="")
        else:
            packing = "packing the Python packages into one file" if stage_environment else "submitting"
            with open_console().status(packing):
                job_ids = submit_jobs(submission)
            _print_jobs(submission, job_ids)


def _print_jobs(submission: Submission, job_ids: Sequence[str]) -> None:
    """Print the jobs that were submitted, the path of their log, and the commands that show and stop the run."""
    from electra_launcher.slurm.slurm import job_name

    out = open_console()
    run_dir = submission.config.run_dir
    run = shlex.quote(run_dir)
    noun = "jobs" if len(job_ids) > 1 else "job"
    out.print(f"submitted {noun} {', '.join(job_ids)}: {submission.script_file}")
    out.print(f"  run        {run_dir}, {_describe_start(Path(run_dir))}")
    if not submission.options.chain:
        out.print(f"  standby    job {job_ids[-1]} takes over if job {job_ids[0]} cannot be requeued")
    if submission.excluded_nodes:
        out.print(f"  left out   {', '.join(submission.excluded_nodes)} (strikes: {run_dir}/strikes.jsonl)")
    out.print(f"  log        {run_dir}/slurm/job-{job_ids[0]}.log")
    out.print(f"  status     electra-dist status {run}")
    stop = f"scancel --name={job_name(Path(run_dir))}"
    out.print(f"  stop       touch {run}/stop   (saves a checkpoint first)   or: {stop}")


def _describe_start(run_dir: Path) -> str:
    """Return "a new run" or, if a checkpoint exists, a text such as "which goes on from step 1,000"."""
    from electra_dist.run.folder import is_run_folder
    from electra_dist.run.history import newest_checkpoint
    from electra_dist.run.ledger import read_ledger

    step = newest_checkpoint(read_ledger(run_dir))
    if step == 0 and not is_run_folder(run_dir):
        return "a new run"
    return f"which goes on from step {step:,}"

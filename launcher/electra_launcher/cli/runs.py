"""Commands about a run: `submit`, `status`, `verify`, `export` and `report`.

Modules that a command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra_dist.console import Console, styled
from electra_dist.errors import UserError
from electra_launcher.cli.console import open_console, print_json, progress_bar
from electra_launcher.cli.options import AsJson, Overrides, RunFolder

if TYPE_CHECKING:
    from electra_dist.checkpoint.chosen_weights import Choice
    from electra_launcher.slurm.batch_script import Submission

_AVERAGE = re.compile(r"last:(\d+)")


def submit(
    config: Annotated[Path, typer.Option(help="YAML file of the run, for example configs/large_25pct_mask.yaml")],
    nodes: Annotated[int, typer.Option(min=1, help="number of nodes")],
    overrides: Overrides = None,
    each: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="submit one run for each value of a config key, in a run folder of its own; with several such "
            "options one for each combination",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="GPUs per node, one rank for each; 0: no GPU, one CPU rank per node")
    ] = 8,
    spares: Annotated[
        int,
        typer.Option(
            min=0,
            help="further nodes of each job; one of them takes the place of a node that dies or is unhealthy, without "
            "a new job",
        ),
    ] = 0,
    partition: Annotated[
        str | None, typer.Option(help="Slurm partition; default: the cluster's default partition")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="time limit of one job, as for sbatch's --time; default: the partition's")
    ] = None,
    chain: Annotated[
        int, typer.Option(min=0, help="number of jobs that run one after another; 0: one job that is requeued instead")
    ] = 0,
    signal_ahead: Annotated[
        int, typer.Option(min=1, help="seconds before the time limit at which the ranks save and stop")
    ] = 120,
    container: Annotated[
        str | None, typer.Option(help="container image that the ranks run in; default: no container")
    ] = None,
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"],
        typer.Option(help="how to run the image: pyxis (srun's --container-image) or apptainer"),
    ] = "pyxis",
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE[:TARGET]", help="folder to mount in the container; may be repeated"),
    ] = None,
    setup: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="shell file that every node reads before the ranks start, for modules and variables of NCCL or the "
            "network",
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]", help="another option of sbatch, for example account=vision; may be repeated"
        ),
    ] = None,
    accept_new_numerics: Annotated[
        bool,
        typer.Option(
            "--accept-new-numerics",
            help="continue a run that an older version began, although masks, samples or dropout will differ",
        ),
    ] = False,
    stage_environment: Annotated[
        bool,
        typer.Option(
            "--stage-environment",
            help="copy the Python packages to the own disk of every node, so that hundreds of ranks do not import "
            "them from the shared file system",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="print the batch script; write and submit nothing")] = False,
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
    from electra_launcher.slurm.batch_script import job_name

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


def status(run: RunFolder, as_json: AsJson = False) -> None:
    """Show where a run stands, its jobs and nodes, and what to do next. Changes nothing.

    The goodput, which it also shows, is the time of useful training steps divided by all time outside Slurm's queue.
    """
    from electra_launcher.cli import status as run_status

    seen = run_status.gather(run)
    if as_json:
        print_json(run_status.facts(seen))
        return
    out = open_console()
    for line in run_status.lines(seen):
        out.print(line)


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
        str | None, typer.Option(help="with --bytes: endpoint of an S3 service other than AWS, for an s3:// corpus")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that the run was trained on exactly the corpus rows that its seed prescribes, up to the step reached.

    A run records receipts (number of rows used so far and digest of their ids) in its metrics and checkpoints. They
    are compared with the receipts that the prescribed rows give. Exit codes: 0 all agree, 1 they deviate at some step,
    78 there is nothing to verify, or another run has written a checkpoint.

    With --bytes, RUN may also be a corpus (folder or s3:// prefix). All shards, vocabularies and checkpoints are read
    again and compared with the digests of their manifests. Exit codes: 0 all are good, 78 with a line for each that
    is not.
    """
    if read_bytes:
        from electra_launcher.cli.verify_bytes import verify_bytes

        verify_bytes(path, endpoint_url, as_json)
    else:
        from electra_launcher.cli.verify import verify_rows

        verify_rows(Path(path), as_json)


def export(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="folder to write the models to; default: RUN/export")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="STEP|best|newest",
            help="checkpoint to export: number of its step, the best on held-out rows, or the newest",
        ),
    ] = "newest",
    average: Annotated[
        str | None,
        typer.Option(metavar="last:N", help="export the mean of the checkpoint's weights and the N - 1 before it"),
    ] = None,
    license_id: Annotated[
        str, typer.Option("--license", help="licence of the weights for the model card, such as apache-2.0")
    ] = "unknown",
) -> None:
    """Write a checkpoint of a run as Hugging Face models: OUTPUT/discriminator and OUTPUT/generator.

    Both are folders that transformers can load, for example AutoModel.from_pretrained('OUTPUT/discriminator'). Each
    has a model card, README.md, with the training, the evaluation and the curves of the run.
    """
    from electra_dist.pretrained.export import export_run
    from electra_dist.report.model_card import check_license, write_model_cards
    from electra_dist.run.folder import EXPORT_DIR, METRICS_FILE, REPORT_FILE, TENSORBOARD_DIR

    choice = _parse_checkpoint(checkpoint)
    num_averaged = _parse_average(average)
    check_license(license_id)
    with progress_bar(Console(stderr=True)) as report_progress:
        exported = export_run(
            run,
            output or run / EXPORT_DIR,
            choice,
            num_averaged,
            progress=lambda num_read, num_to_read: report_progress("checkpoints", num_read, num_to_read),
        )
    cards = write_model_cards(run, exported, license_id)
    out = open_console()
    steps = ", ".join(f"{step:,}" for step in exported.steps)
    weights = f"at step {steps}" if num_averaged == 1 else f"mean of the steps {steps}"
    out.print()
    out.print(styled((str(run), "bold"), f" {weights}"))
    out.print(f"  report         {run / REPORT_FILE}")
    out.print(f"  metrics        {run / METRICS_FILE}   (tensorboard --logdir {run / TENSORBOARD_DIR})")
    for model_name, folder in exported.folders.items():
        out.print(f"  {model_name:<14} {folder}")
    for card in cards:
        out.print(f"  model card     {card}")
    out.print("next:")
    discriminator = exported.folders["discriminator"]
    load_model = f"from transformers import AutoModel; print(AutoModel.from_pretrained('{discriminator}'))"
    out.print(f'  python -c "{load_model}"')
    out.print(f"  electra-dist finetune --model {shlex.quote(str(discriminator))} --task cola --data GLUE")


def _parse_checkpoint(text: str) -> Choice:
    if text == "newest":
        return "newest"
    if text == "best":
        return "best"
    digits = text.replace(",", "")
    if not digits.isascii() or not digits.isdigit():
        raise UserError(f"--checkpoint {text}: not a checkpoint; give the number of a step, best or newest")
    return int(digits)


def _parse_average(text: str | None) -> int:
    """Return N for `--average last:N`; without the option return 1, which means no average."""
    if text is None:
        return 1
    match = _AVERAGE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise UserError(f"--average {text}: not a mean; give last:N, such as last:5 for 5 checkpoints")
    return int(match[1])


def _check_local_checkpoints(run: Path) -> None:
    """Raise a UserError if another run has written local checkpoints of `run`. Checkpoints on S3 are not checked."""
    from electra_dist.checkpoint.checkpoint import owner_of
    from electra_dist.run.folder import open_run, read_identity
    from electra_dist.store.open_store import open_store

    try:
        config = open_run(run)
    except UserError:
        return  # a report is made of the records alone, also without a config that this version can read
    owner = owner_of(config, read_identity(run))
    if owner is not None:
        owner.check_all([open_store(url) for url in config.checkpoint_urls if not url.startswith("s3://")])


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
    from electra_dist.report.overlay_page import OVERLAY_FILE, write_overlay
    from electra_dist.report.report_page import write_report

    for run in runs:
        _check_local_checkpoints(run)
    out = open_console()
    if len(runs) == 1:
        out.print(str(write_report(runs[0], output)))
    else:
        out.print(str(write_overlay(runs, output or Path(OVERLAY_FILE))))

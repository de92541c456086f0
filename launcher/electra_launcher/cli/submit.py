"""The command `electra-dist submit`.

Modules that it needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra_launcher.cli.command_output import open_console
from electra_launcher.cli.options import AcceptNewNumerics, Overrides, Partition, SbatchOptions

if TYPE_CHECKING:
    from electra_launcher.slurm.batch_script import Submission

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

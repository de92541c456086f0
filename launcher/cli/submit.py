"""`electra-dist submit`: write a batch script into RUN/slurm/ and submit it to Slurm."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.cli.console import open_console
from launcher.slurm.batch_script import Container, batch_script
from launcher.slurm.submission import Submission, prepare
from launcher.slurm.submission import submit as submit_jobs


def submit(
    config: Annotated[Path, typer.Option(help="YAML file of the run, for example configs/large_25pct_mask.yaml")],
    nodes: Annotated[int, typer.Option(min=1, help="number of nodes")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="GPUs per node, one rank for each; 0: no GPU, one CPU rank per node")
    ] = 8,
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
    ranks_container = None
    if container:
        ranks_container = Container(image=container, runtime=container_runtime, mounts=tuple(mount or ()))
    submission = Submission(
        config_file=config,
        overrides=tuple(overrides or ()),
        num_nodes=nodes,
        gpus_per_node=gpus_per_node,
        partition=partition,
        time_limit=time,
        chain=chain,
        signal_ahead_s=signal_ahead,
        container=ranks_container,
        sbatch_options=tuple(sbatch or ()),
        accept_new_numerics=accept_new_numerics,
        stage_environment=stage_environment,
    )
    command_line = ["electra-dist", *sys.argv[1:]]
    resolved_config, request, excluded_nodes = prepare(submission, command_line)
    if dry_run:
        print(batch_script(request, excluded_nodes), end="")
        return
    out = open_console()
    packing = "packing the Python packages into one file" if stage_environment else "submitting"
    with out.status(packing):
        job_ids = submit_jobs(resolved_config, request, excluded_nodes)
    run = shlex.quote(resolved_config.run_dir)
    noun = "jobs" if len(job_ids) > 1 else "job"
    out.print(f"submitted {noun} {', '.join(job_ids)}: {request.script_file}")
    if excluded_nodes:
        out.print(f"  left out   {', '.join(excluded_nodes)} (strikes: {request.run_dir}/strikes.jsonl)")
    out.print(f"  log        {request.run_dir}/slurm/job-{job_ids[0]}.log")
    out.print(f"  status     electra-dist status {run}")
    out.print(f"  stop       touch {run}/stop   (saves a checkpoint first)   or: scancel --name={request.job_name}")

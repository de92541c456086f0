"""`electra-dist submit`: options of a person -> a script in RUN/slurm/ and jobs in the queue."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from launcher.slurm.batch_script import Container, batch_script
from launcher.slurm.submission import Submission, prepare
from launcher.slurm.submission import submit as submit_jobs


def submit(
    config: Annotated[Path, typer.Option(help="YAML file, for example configs/large_25pct_mask.yaml")],
    nodes: Annotated[int, typer.Option(min=1, help="nodes")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs, and ranks, per node; 0: a CPU rank")] = 8,
    partition: Annotated[str | None, typer.Option(help="partition; default: the cluster's")] = None,
    time: Annotated[str | None, typer.Option(help="limit of one job, as sbatch's --time")] = None,
    chain: Annotated[
        int, typer.Option(min=0, help="jobs one after another, none requeued; 0: one job that is requeued")
    ] = 0,
    signal_ahead: Annotated[int, typer.Option(min=1, help="seconds before the limit that ranks are told")] = 120,
    container: Annotated[str | None, typer.Option(help="image that the ranks run in")] = None,
    container_runtime: Annotated[
        Literal["pyxis", "apptainer"], typer.Option(help="pyxis: enroot through srun's --container-image")
    ] = "pyxis",
    mount: Annotated[list[str] | None, typer.Option(metavar="SOURCE[:TARGET]", help="mount, may repeat")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="any other option of sbatch: account=vision")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the script; write and submit nothing")] = False,
) -> None:
    """Submit a run to Slurm: it goes on over time limits, preemption and dead nodes until it is finished."""
    image = Container(image=container, runtime=container_runtime, mounts=tuple(mount or ())) if container else None
    submission = Submission(
        config_file=config,
        overrides=tuple(overrides or ()),
        num_nodes=nodes,
        gpus_per_node=gpus_per_node,
        partition=partition,
        time_limit=time,
        chain=chain,
        signal_ahead_s=signal_ahead,
        container=image,
        sbatch_options=tuple(sbatch or ()),
    )
    resolved, request, excluded = prepare(submission, ["electra-dist", *sys.argv[1:]])
    if dry_run:
        print(batch_script(request, excluded), end="")
        return
    jobs = submit_jobs(resolved, request, excluded)
    out, run = Console(highlight=False, soft_wrap=True), shlex.quote(resolved.run_dir)
    out.print(f"submitted {'jobs' if len(jobs) > 1 else 'job'} {', '.join(jobs)}: {request.script_file}")
    if excluded:
        out.print(f"  left out   {', '.join(excluded)} (strikes: {request.run_dir}/strikes.jsonl)")
    out.print(f"  log        {request.run_dir}/slurm/job-{jobs[0]}.log")
    out.print(f"  status     electra-dist status {run}")
    out.print(f"  stop       touch {run}/stop   (saves first)   or: scancel --name={request.job_name}")

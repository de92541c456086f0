"""Submit a run to Slurm: check, write a script that a person can read into RUN/slurm/, hand it to sbatch.

electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --gpus-per-node 8 --time 24:00:00 --chain 5
electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --dry-run

Guarantee: what is queued is what was checked: the config is resolved now and kept beside the script, so a later edit
of the YAML file changes nothing for jobs that wait. Scripts are numbered and never overwritten. Nodes with a strike
are left out. Imports no torch.

Where it stops: it does not wait for the job; `electra-dist status RUN` says what became of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config_file import dump_yaml, load_config
from electra_dist.errors import UserError
from electra_dist.run.folder import SLURM_DIR
from electra_dist.run.ledger import read_ledger
from electra_dist.run.strikes import excluded_nodes, read_strikes
from electra_dist.store.files import writable
from launcher.slurm.batch_script import JobOptions, SubmitRequest, batch_script
from launcher.slurm.job import note


@dataclass(frozen=True, kw_only=True)
class Submission(JobOptions):
    """What a person asked for: the options of the job, and the run's config."""

    config_file: Path
    overrides: tuple[str, ...] = ()


def prepare(submission: Submission, command: Sequence[str]) -> tuple[Config, SubmitRequest, tuple[str, ...]]:
    """The resolved config, the request and the nodes to leave out. Nothing is written.

    Raises:
        UserError: the config, the number of ranks, or a run that is finished already.
    """
    config = load_config(submission.config_file, submission.overrides)
    check_ranks(config, submission.num_nodes, max(1, submission.gpus_per_node))
    run_dir = Path(config.run_dir).absolute()
    if any(event["event"] == "done" for event in read_ledger(run_dir)):
        raise UserError(f"run {config.run_dir} is finished; `electra-dist export {config.run_dir}`, or choose another")
    stem = run_dir / SLURM_DIR / f"submission-{_next_number(run_dir):04d}"
    request = SubmitRequest(
        run_dir=str(run_dir),
        script_file=f"{stem}.sh",
        config_file=f"{stem}.yaml",
        work_dir=os.getcwd(),
        command=shlex.join(command),
        python="python" if submission.container else sys.executable,
        job_name=job_name(run_dir),
        **{field.name: getattr(submission, field.name) for field in fields(JobOptions)},
    )
    expires_s = 3600 * config.cluster.strike_expires_h
    return config, request, tuple(excluded_nodes(read_strikes(run_dir), time.time(), expires_s=expires_s))


def submit(config: Config, request: SubmitRequest, excluded: tuple[str, ...]) -> list[str]:
    """Write script and config, submit, note it. Returns the job ids, first link first.

    Raises:
        UserError: sbatch is missing or refuses.
    """
    script = Path(request.script_file)
    text = batch_script(request, excluded)
    with writable(script):
        script.parent.mkdir(parents=True, exist_ok=True)
        with open(request.config_file, "x", encoding="utf-8") as file:
            file.write(dump_yaml(config))
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)
    jobs: list[str] = []
    try:
        for _ in range(max(1, request.chain)):
            jobs.append(_sbatch(script))
    finally:
        if jobs:
            note(Path(request.run_dir), "submit", jobs=jobs, script=script.name, nodes=request.num_nodes)
    return jobs


def job_name(run_dir: Path) -> str:
    """One name for one run folder: what `singleton` and the cancelling of a chain go by."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name).strip("-") or "run"
    return f"{readable}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"


def check_ranks(config: Config, num_nodes: int, ranks_per_node: int) -> None:
    """Refuse now what every rank would refuse after hours in the queue.

    Raises:
        UserError: names the numbers of nodes that share the global batch evenly.
    """
    train = config.train
    if not train.micro_batches(num_nodes * ranks_per_node):
        fitting = [str(nodes) for nodes in range(1, 1025) if train.micro_batches(nodes * ranks_per_node)]
        advice = f"use {', '.join(fitting)} nodes" if fitting else "use fewer ranks per node"
        raise UserError(
            f"--nodes {num_nodes} x {ranks_per_node} ranks do not share train.global_batch {train.global_batch} "
            f"evenly with train.micro_batch {train.micro_batch}; {advice}, or change train.micro_batch"
        )


def _sbatch(script: Path) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            f"sbatch is not installed here; submit from a login node of the cluster: sbatch {shlex.quote(str(script))}"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.replace("sbatch: error:", " ").split())
        raise UserError(f"sbatch refused {script}: {reason}; change the option that it names and submit again")
    return done.stdout.strip().partition(";")[0]


def _next_number(run_dir: Path) -> int:
    numbers = [int(file.stem.rpartition("-")[2]) for file in (run_dir / SLURM_DIR).glob("submission-[0-9]*.yaml")]
    return max(numbers, default=0) + 1

"""Submit a run to Slurm: check the request, write the batch script into RUN/slurm/, and pass it to sbatch.

    electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --gpus-per-node 8 --time 24:00:00 --chain 5
    electra-dist submit --config configs/large_25pct_mask.yaml --nodes 8 --dry-run

Guarantee: jobs run with the config that was checked. It is resolved at submission and stored beside the script, so a
later edit of the YAML file changes nothing for waiting jobs. Scripts are numbered and never overwritten. Nodes with
a strike (a recorded fault that has not expired) are excluded. Imports no torch.

Limits: it does not wait for the job; `electra-dist status RUN` shows how the run is doing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from electra_dist.config import Config
from electra_dist.config.load import dump_yaml, load_config
from electra_dist.config.rules import check_new_run
from electra_dist.config.secrets import without_secret_arguments
from electra_dist.errors import UserError
from electra_dist.run.folder import SLURM_DIR, check_numerics, is_run_folder
from electra_dist.run.ledger import append_job, read_ledger
from electra_dist.run.strikes import excluded_nodes, read_strikes
from electra_dist.store.atomic_files import PRIVATE, PRIVATE_PROGRAM, replacing
from electra_dist.store.open_store import without_tilde
from launcher.slurm.batch_script import JobOptions, SubmitRequest, batch_script
from launcher.slurm.environment_archive import archive_name, environment_files, write_archive
from launcher.slurm.job_length import check_job_length, check_time_limit
from launcher.slurm.sbatch import run_sbatch


@dataclass(frozen=True, kw_only=True)
class Submission(JobOptions):
    """A user's request to submit a run, not checked yet: options of the job, config file, and config overrides."""

    config_file: Path
    overrides: tuple[str, ...] = ()  # `KEY=VALUE`, applied to the config


def prepare(submission: Submission, command: Sequence[str]) -> tuple[Config, SubmitRequest, tuple[str, ...]]:
    """Check a submission and write nothing; return the config, the values for the script, and the nodes to exclude.

    `command` is the command line as the user typed it, for the script's first comment. OtherNumerics is raised if a
    version with other random draws or rounding began the run, unless `submission.accept_new_numerics` is set.
    """
    check_time_limit(submission.time_limit)
    config = with_absolute_paths(load_config(submission.config_file, submission.overrides))
    ranks_per_node = max(1, submission.gpus_per_node)  # Without GPUs, a node has one CPU rank.
    check_ranks(config, submission.num_nodes, ranks_per_node)
    run_dir = Path(config.run_dir)
    ledger = read_ledger(run_dir)
    check_job_length(submission.time_limit, submission.signal_ahead_s, ledger)
    if any(event.event == "done" for event in ledger):
        raise UserError(
            f"run {config.run_dir} is finished; run `electra-dist export {config.run_dir}`, or set another run_dir"
        )
    if not is_run_folder(run_dir):
        check_new_run(config)
    check_numerics(run_dir, config.numerics, submission.accept_new_numerics)
    setup_file = None
    if submission.setup_file is not None:
        setup_file = str(_readable_file(submission.setup_file))
    stem = run_dir / SLURM_DIR / f"submission-{_next_number(run_dir):04d}"
    archive = ""
    if submission.stage_environment:
        if submission.container is not None:
            raise UserError(
                "--stage-environment copies this interpreter's packages, but --container has its own; leave out one"
            )
        archive = str(run_dir / SLURM_DIR / archive_name(environment_files()))
    # The submission has these options and others; the request for the script takes them over unchanged.
    job_options = {field.name: getattr(submission, field.name) for field in fields(JobOptions)}
    job_options["setup_file"] = setup_file
    request = SubmitRequest(
        run_dir=str(run_dir),
        script_file=f"{stem}.sh",
        config_file=f"{stem}.yaml",
        work_dir=os.getcwd(),
        command=shlex.join(without_secret_arguments(command)),
        python="python" if submission.container else sys.executable,
        job_name=job_name(run_dir),
        storage_patience_s=round(config.cluster.storage_patience_s),
        environment_archive=archive,
        **job_options,
    )
    expires_s = 3600 * config.cluster.strike_expires_h
    struck_nodes = excluded_nodes(read_strikes(run_dir), time.time(), expires_s=expires_s)
    return config, request, tuple(struck_nodes)


def submit(config: Config, request: SubmitRequest, excluded: tuple[str, ...]) -> list[str]:
    """Write the batch script and the config, submit the jobs, record them in jobs.jsonl, and return their ids.

    Without a chain, two jobs are submitted. The second is the standby job: it waits until the first job has ended, and
    continues the run if the first job could not be requeued. When the run is finished, the first job cancels the
    standby job. If Slurm refuses a job, the jobs that it accepted before stay in the queue and are recorded.
    """
    script = Path(request.script_file)
    script_text = batch_script(request, excluded)
    with replacing(Path(request.config_file), only_new=True, permissions=PRIVATE) as file:
        file.write(dump_yaml(config).encode())
    with replacing(script, permissions=PRIVATE_PROGRAM) as file:
        file.write(os.fsencode(script_text))
    if request.environment_archive:
        write_archive(Path(request.environment_archive), environment_files())
    num_jobs = request.chain or 2  # Without a chain, `chain` is 0: one job and its standby job.
    jobs: list[str] = []
    try:
        for _ in range(num_jobs):
            jobs.append(run_sbatch(script))
    finally:
        if jobs:
            append_job(Path(request.run_dir), "submit", jobs=jobs, script=script.name, nodes=request.num_nodes)
    return jobs


def job_name(run_dir: Path) -> str:
    """Return the name of a run's Slurm jobs: the folder's name and 8 hex digits of a hash of its absolute path.

    The name must be unique for each run folder: `--dependency=singleton` lets only one job of a name run at a time,
    and the batch script cancels the waiting jobs of a run by their name.
    """
    # Only characters that need no quoting in a shell or in an option of Slurm are kept.
    readable_name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name).strip("-") or "run"
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()
    return f"{readable_name}-{digest[:8]}"


def with_absolute_paths(config: Config) -> Config:
    """Return a config in which the paths of the run folder, corpora, cache and checkpoint targets are absolute.

    Slurm may start a job in another folder than this process's working folder, for example in /tmp on a node that has
    no such folder. With a relative path, the job would begin a new run there. URLs are not changed. Neither are
    `train.init_from` and `train.init_generator_from`: with other values of these, the run would count as another run.
    """
    phases = tuple(phase.model_copy(update={"corpus": _absolute(phase.corpus)}) for phase in config.data.phases)
    data = config.data.model_copy(
        update={
            "corpus": _absolute(config.data.corpus),
            "heldout": _absolute(config.data.heldout),
            "cache_dir": _absolute(config.data.cache_dir),
            "phases": phases,
        }
    )
    targets = tuple(str(_absolute(target)) for target in config.checkpoint.targets)
    checkpoint = config.checkpoint.model_copy(update={"targets": targets})
    return config.model_copy(update={"run_dir": _absolute(config.run_dir), "data": data, "checkpoint": checkpoint})


def _absolute(path: str | None) -> str | None:
    """Return a local path as an absolute path with "~" expanded; return a URL, None or an empty string unchanged."""
    if not path or "://" in path:
        return path
    return str(without_tilde(path).absolute())


def _readable_file(name: str) -> Path:
    """Return the absolute path of the file that the user passed with --setup; UserError if it cannot be read."""
    path = without_tilde(name).absolute()
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise UserError(f"--setup {name}: no readable file; give the path of a shell file that every node can read")
    return path


def check_ranks(config: Config, num_nodes: int, ranks_per_node: int) -> None:
    """Raise a UserError if this number of ranks cannot share `train.global_batch` evenly.

    The error lists numbers of nodes that work. The check is made at submission, not after hours in the queue.
    """
    train = config.train
    if train.fitting_micro_batch(num_nodes * ranks_per_node):
        return
    fitting_nodes = [str(nodes) for nodes in range(1, 1025) if train.fitting_micro_batch(nodes * ranks_per_node)]
    advice = "use fewer ranks per node"
    if fitting_nodes:
        advice = f"use {', '.join(fitting_nodes)} nodes"
    raise UserError(
        f"--nodes {num_nodes} x {ranks_per_node} ranks do not share train.global_batch {train.global_batch} "
        f"evenly; {advice}, or change train.global_batch"
    )


def _next_number(run_dir: Path) -> int:
    """Return the number of the run's next submission, from the names of files such as submission-0007.yaml."""
    config_files = (run_dir / SLURM_DIR).glob("submission-[0-9]*.yaml")
    names = [re.fullmatch(r"submission-(\d+)\.yaml", file.name) for file in config_files]
    return max((int(name[1]) for name in names if name is not None), default=0) + 1

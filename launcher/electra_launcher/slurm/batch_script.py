"""Compose the sbatch script of a run: #SBATCH lines, then settings (shell variables), then the file job.sh as it is.

Guarantee: one file that a person can read and rerun, and equal submissions give equal text. Every value is quoted: for
the shell in the settings, for Slurm's own parser in an #SBATCH line. A value that an #SBATCH line cannot hold is
refused before anything is submitted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from electra_dist.config import Config
from electra_dist.corpus.prepare.sbatch_environment import HANDED_ON, patterns_left_out
from electra_dist.errors import UserError
from electra_dist.run.folder import SLURM_DIR
from electra_launcher.slurm.slurm import job_name, option_text, user_options

JOB_FILE = Path(__file__).parent / "job.sh"


@dataclass(frozen=True, kw_only=True)
class Container:
    """Container image in which the ranks run, the runtime that starts it, and the folders that are mounted into it."""

    image: str  # as the runtime names it: a file or a registry reference
    runtime: Literal["pyxis", "apptainer"]  # pyxis: srun's --container-* options (enroot)
    mounts: tuple[str, ...] = ()  # SOURCE or SOURCE:TARGET; the run folder and the working folder are always mounted


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `electra-dist submit` that describe a job, such as nodes and time limit."""

    num_nodes: int  # number of nodes on which ranks run
    spare_nodes: int = 0  # number of idle extra nodes of the job; they replace nodes that die or are unhealthy
    gpus_per_node: int  # also the number of ranks per node; 0: no GPUs, one CPU rank per node
    partition: str | None = None  # None: the cluster's default
    time_limit: str | None = None  # in the format of sbatch's --time; None: the partition's default
    chain: int = 0  # number of jobs that run one after another, without requeue; 0: one job that is requeued
    signal_ahead_s: int = 120  # how long before the time limit the ranks receive USR1; Slurm may send it 60 s earlier
    container: Container | None = None  # None: the ranks run without a container
    sbatch_options: tuple[str, ...] = ()  # further sbatch options, `name=value` or `name`, such as account=vision
    accept_new_numerics: bool = False  # also continue a run begun by a version with other random draws or rounding
    setup_file: str | None = None  # shell file that the script and every node source first, for example for modules
    stage_environment: bool = False  # whether every node first unpacks the run's Python packages on its own disk

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node."""
        return max(1, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One run that is submitted, with all that its batch script needs. Paths are absolute and valid on every node."""

    options: JobOptions
    config: Config  # with all overrides applied and absolute paths
    command: str  # the command line that the user typed, quoted in a comment of the script
    number: int = 1  # of the run's submissions, from 1
    work_dir: str = field(default_factory=os.getcwd)  # of the job, to which relative paths in the config refer
    python: str = sys.executable  # interpreter of the ranks; a path inside the container if there is one
    environment_archive: str = ""  # tar file of the installed Python packages, for each node to unpack; "": none
    excluded_nodes: tuple[str, ...] = ()  # on which its jobs will not run

    @property
    def script_file(self) -> Path:
        """Return where the batch script is written; every node runs it once more, with the argument `node`."""
        return Path(self.config.run_dir, SLURM_DIR, f"submission-{self.number:04d}.sh")

    @property
    def config_file(self) -> Path:
        """Return where the resolved config is written, beside the batch script. The submitted jobs read it there."""
        return self.script_file.with_suffix(".yaml")


_RESERVED_OPTIONS = {  # sbatch options that the script sets itself or relies on
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "partition", "time", "signal", "requeue", "no-requeue"),
    *("dependency", "open-mode", "chdir", "output", "error", "exclude", "array", "parsable", "wrap", "export"),
    *("exclusive", "begin", "no-kill"),
}


def batch_script(submission: Submission) -> str:
    """Return the text of the batch script; nothing is written.

    Raises UserError if a value for an #SBATCH line has a backslash or a control character, if `sbatch_options` names
    an option that the script sets itself, or if a container cannot mount a folder.
    """
    options = _sbatch_options(submission)
    command = " ".join(submission.command.split())  # in one line
    lines = [
        "#!/bin/bash",
        f"# {command}",
        "# Written by the command above. `electra-dist status RUN` shows where the run stands and what to do next.",
        *(f"#SBATCH {option_text(name, value)}" for name, value in options),
        "",
        *_settings(submission),
        *_array("left_out", patterns_left_out([name for name, _ in options])),
        *_array("handed_on", HANDED_ON),
        "",
        "",
    ]
    return "\n".join(lines) + JOB_FILE.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n")


def _sbatch_options(submission: Submission) -> list[tuple[str, object]]:
    """Return the sbatch options of the job as pairs of name and value; a flag has the value ""."""
    job = submission.options
    further_options = user_options(job.sbatch_options, _RESERVED_OPTIONS)
    sets_memory = any(name in ("mem", "mem-per-cpu", "mem-per-gpu") for name, _ in further_options)
    options: list[tuple[str, object]] = [  # None leaves an option out.
        ("job-name", job_name(Path(submission.config.run_dir))),
        ("nodes", job.num_nodes + job.spare_nodes),
        ("no-kill", "" if job.spare_nodes else None),  # Slurm keeps the job when one of its nodes dies.
        ("ntasks-per-node", 1),
        ("gpus-per-node", job.gpus_per_node or None),
        ("exclusive", ""),
        ("mem", None if sets_memory else 0),  # 0: all memory of the node, where the default is a part of it
        ("partition", job.partition),
        ("time", job.time_limit),
        ("signal", f"B:USR1@{job.signal_ahead_s}"),
        ("no-requeue" if job.chain else "requeue", ""),
        ("dependency", "singleton"),
        ("chdir", submission.work_dir),
        ("output", "/dev/null"),  # The script opens the log itself, once the run folder can be written.
        ("exclude", ",".join(submission.excluded_nodes) or None),
        *further_options,
    ]
    return [(name, value) for name, value in options if value is not None]


def _settings(submission: Submission) -> list[str]:
    """Return the shell variables of the run, which job.sh reads."""
    job = submission.options
    texts = {
        "run_dir": submission.config.run_dir,
        "script": str(submission.script_file),
        "config": str(submission.config_file),
        "work_dir": submission.work_dir,
        "python": submission.python,
        "setup": job.setup_file or "",
        "archive": submission.environment_archive,
    }
    numbers = {
        "num_nodes": job.num_nodes,
        "spare_nodes": job.spare_nodes,
        "ranks_per_node": job.ranks_per_node,
        "chain": job.chain,
        "patience_s": round(submission.config.cluster.storage_patience_s),
    }
    supervise_options = ["--accept-new-numerics"] if job.accept_new_numerics else []
    return [
        *(f"{name}={shlex.quote(text)}" for name, text in texts.items()),
        *(f"{name}={number}" for name, number in numbers.items()),
        f"supervise_options=({shlex.join(supervise_options)})",
        *_container_settings(submission),
    ]


def _container_settings(submission: Submission) -> list[str]:
    """Return the command that starts a container (apptainer) and the options of srun that do so (pyxis)."""
    container = submission.options.container
    if container is None:
        return ["apptainer=()", "pyxis=()"]
    folders = (submission.config.run_dir, submission.work_dir)
    for folder in folders:
        if "," in folder or ":" in folder:  # They separate folders, and source and target, in a list of mounts.
            raise UserError(
                f"{folder}: no container can mount a folder whose path has a comma or a colon; rename it, or leave "
                f"out --container"
            )
    mounts = ",".join((*folders, *container.mounts))
    if container.runtime == "apptainer":
        command = ["apptainer", "exec", "--nv", "--bind", mounts, container.image]
        return [f"apptainer=({shlex.join(command)})", "pyxis=()"]
    options = [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={submission.work_dir}",
    ]
    return ["apptainer=()", f"pyxis=({shlex.join(options)})"]


def _array(name: str, words: Sequence[str]) -> list[str]:
    """Return the lines that set an array of bash, with four words in a line."""
    lines = [f"    {shlex.join(words[begin : begin + 4])}" for begin in range(0, len(words), 4)]
    return [f"{name}=(", *lines, ")"]

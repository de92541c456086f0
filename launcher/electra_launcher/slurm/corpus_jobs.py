"""Submit the build of a corpus to Slurm: an array job builds its parts, and a last job merges the finished parts.

Guarantee: the scripts hold the whole command with absolute paths, so a person can read them and submit them again.
Every part can be requeued at any time; it skips the steps that it has finished. If a part fails, the job that merges
the parts does not run, and Slurm removes it from the queue.

How: each job depends on the success of the job before it. If the output has no vocab.txt and the user names none, a
first job trains the vocabulary. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from electra_dist.corpus.prepare.slurm_submission import directive
from electra_dist.store.atomic_files import PRIVATE_PROGRAM, replacing
from electra_launcher.slurm.slurm import run_sbatch, user_options


@dataclass(frozen=True, kw_only=True)
class CorpusJobs:
    """Content of the batch scripts of a corpus build: paths, options of the commands, and resources of the jobs."""

    output: str  # where the corpus is written: an absolute path, or an s3:// URL
    folder: Path  # absolute path of the folder for scripts and logs
    build: tuple[str, ...]  # options of `corpus build`, without --part and --workers; paths are absolute
    vocabulary: tuple[str, ...]  # options of `corpus vocab` for a first job; empty: the vocabulary exists already
    merge: tuple[str, ...]  # further options of `corpus merge`
    num_parts: int
    cpus: int  # number of cores, and of worker processes, of each part
    memory_gb: int | None  # memory of each job; None: the partition's default
    partition: str | None  # None: the cluster's default
    time_limit: str | None  # for each job, in the format of sbatch's --time; None: the partition's default
    sbatch: tuple[str, ...] = ()  # further sbatch options, `name=value` or `name`


class CorpusScript(NamedTuple):
    """A batch script of a corpus build."""

    name: str  # vocabulary, parts or merge
    text: str


def corpus_scripts(jobs: CorpusJobs) -> list[CorpusScript]:
    """Return the batch scripts of a corpus build in the order in which they run."""
    scripts = []
    if jobs.vocabulary:
        scripts.append(_script(jobs, "vocabulary", _command("vocab", *jobs.vocabulary)))
    build = _command("build", *jobs.build, "--output", jobs.output, "--workers", str(jobs.cpus))
    parts = f'{build} --part "$SLURM_ARRAY_TASK_ID/{jobs.num_parts}"'
    scripts.append(_script(jobs, "parts", parts))
    scripts.append(_script(jobs, "merge", _command("merge", jobs.output, *jobs.merge)))
    return scripts


def submit_corpus(jobs: CorpusJobs) -> list[str]:
    """Write the batch scripts, submit them, and return Slurm's job ids in the order of the scripts."""
    scripts = corpus_scripts(jobs)
    for script in scripts:
        with replacing(jobs.folder / f"{script.name}.sh", permissions=PRIVATE_PROGRAM) as file:
            file.write(os.fsencode(script.text))
    job_ids: list[str] = []
    for script in scripts:
        dependency = [f"--dependency=afterok:{job_ids[-1]}", "--kill-on-invalid-dep=yes"] if job_ids else []
        job_ids.append(run_sbatch(jobs.folder / f"{script.name}.sh", dependency))
    return job_ids


def _command(*arguments: str) -> str:
    """Return the quoted shell command that runs `electra-dist corpus` with `arguments`."""
    return shlex.join(
        [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "corpus", *arguments]
    )


def _script(jobs: CorpusJobs, name: str, command: str) -> CorpusScript:
    log_folder = str(jobs.folder).replace("%", "%%")  # Slurm replaces %x, %j and the like in the name of a log.
    own = {
        "job-name": f"corpus-{name}",
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": jobs.cpus if name != "merge" else 1,
        "mem": f"{jobs.memory_gb}G" if jobs.memory_gb else None,
        "partition": jobs.partition,
        "time": jobs.time_limit,
        "array": f"1-{jobs.num_parts}" if name == "parts" else None,
        "output": f"{log_folder}/{'%x-%A_%a' if name == 'parts' else '%x-%j'}.log",
        "requeue": "",
        "open-mode": "append",
    }
    given = [(key, value) for key, value in own.items() if value is not None]
    options = [*given, *user_options(jobs.sbatch, own)]
    lines = [f"#SBATCH --{directive(key)}" + (f"={directive(value)}" if value else "") for key, value in options]
    text = "\n".join(["#!/bin/bash", *lines, "export PYTHONUNBUFFERED=1", f"exec {command}", ""])
    return CorpusScript(name, text)

"""`electra-dist corpus submit`: build the parts of a corpus by a Slurm array job, and merge them by a last job.

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
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import PRIVATE_PROGRAM, replacing
from electra_launcher.cli.command_output import open_console
from electra_launcher.cli.options import Overrides, Partition, SbatchOptions
from electra_launcher.slurm.slurm import option_text, run_sbatch, user_options

if TYPE_CHECKING:
    from electra_dist.config import Config


def submit(
    inputs: Annotated[list[str], typer.Option("--input", help="as for `corpus build`; may be repeated")],
    output: Annotated[str, typer.Option(help="shared folder or s3://bucket/prefix of the corpus")],
    config: Annotated[Path, typer.Option("--config", help="YAML of the run, as for `corpus build`")],
    parts: Annotated[int, typer.Option(min=1, help="jobs of the array; each builds one part")],
    overrides: Overrides = None,
    vocab: Annotated[
        Path | None, typer.Option(help="vocab.txt; default: the one in OUTPUT, or a first job trains one")
    ] = None,
    text_field: Annotated[str, typer.Option(help="as for `corpus build`")] = "text",
    cpus: Annotated[int, typer.Option(min=1, help="cores of a part, one worker process each")] = 8,
    memory_gb: Annotated[int | None, typer.Option(min=1, help="memory of a part; default: the partition's")] = None,
    partition: Partition = None,
    time: Annotated[str | None, typer.Option(help="time limit of a part; default: the partition's")] = None,
    jobs_folder: Annotated[
        Path | None, typer.Option("--jobs", help="folder for scripts and logs; default: OUTPUT/slurm")
    ] = None,
    sbatch: SbatchOptions = None,
    dry_run: Annotated[bool, typer.Option(help="print the scripts; write and submit nothing")] = False,
) -> None:
    """Build a corpus on a Slurm cluster: an array of parts, then a job that joins them to the finished corpus.

    A part that is killed or requeued goes on after its finished steps. Submitting again resumes the whole build.
    """
    from electra_dist.config.load import load_config
    from electra_dist.corpus.inputs.find_inputs import refuse_output_among_inputs
    from electra_dist.store.open_store import REMOTE_SCHEMES, absolute_location, open_store
    from electra_dist.tokenizer import VOCAB_FILE

    settings = load_config(config, overrides or ())
    if output.startswith(REMOTE_SCHEMES) and jobs_folder is None:
        raise UserError("--jobs: give a shared folder for scripts and logs, because the output is on S3")
    where = absolute_location(output)
    refuse_output_among_inputs(where, inputs)
    texts: list[str] = []
    for path in inputs:  # a job may start in another folder
        texts += ["--input", absolute_location(path)]
    build = [*texts, "--config", str(config.absolute())]
    for override in overrides or ():
        build += ["--set", override]
    build += ["--text-field", text_field]
    train: list[str] = []
    folder = (jobs_folder or Path(where) / "slurm").absolute()
    if vocab is None and not open_store(where, settings.data.endpoint_url).exists(VOCAB_FILE):
        vocab = folder / VOCAB_FILE
        train = [*texts, "--output", str(vocab), *_vocabulary_options(settings, text_field)]
    if vocab is not None:
        build += ["--vocab", str(vocab.absolute())]
    jobs = CorpusJobs(
        output=where,
        folder=folder,
        build=tuple(build),
        vocabulary=tuple(train),
        merge=("--endpoint-url", settings.data.endpoint_url) if settings.data.endpoint_url else (),
        num_parts=parts,
        cpus=cpus,
        memory_gb=memory_gb,
        partition=partition,
        time_limit=time,
        sbatch=tuple(sbatch or ()),
    )
    if dry_run:
        print("\n".join(script.text for script in corpus_scripts(jobs)), end="")
        return
    job_ids = submit_corpus(jobs)
    out = open_console()
    out.print(f"submitted jobs {', '.join(job_ids)}: scripts and logs in {folder}")
    out.print(f"  status     squeue --jobs={','.join(job_ids)}")
    out.print(f"  at the end electra-dist corpus info {shlex.quote(where)}")


def _vocabulary_options(settings: Config, text_field: str) -> list[str]:
    """Return the options of `corpus vocab` that give a vocabulary as the config `settings` wants it."""
    options = ["--size", str(settings.model.vocab_size), "--text-field", text_field]
    options += [] if settings.corpus.lowercase else ["--cased"]
    options += ["--tokenizer", "bpe"] if settings.corpus.tokenizer == "bpe" else []
    options += ["--endpoint-url", settings.data.endpoint_url] if settings.data.endpoint_url else []
    return options


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
    """Return the batch script `name`, which runs `command` once or, as "parts", once for each part of the corpus."""
    is_array = name == "parts"
    log_folder = str(jobs.folder).replace("%", "%%")  # Slurm replaces %x, %j and the like in the name of a log.
    log_name = "%x-%A_%a.log" if is_array else "%x-%j.log"
    own = {  # None leaves an option out.
        "job-name": f"corpus-{name}",
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": 1 if name == "merge" else jobs.cpus,
        "mem": f"{jobs.memory_gb}G" if jobs.memory_gb else None,
        "partition": jobs.partition,
        "time": jobs.time_limit,
        "array": f"1-{jobs.num_parts}" if is_array else None,
        "output": f"{log_folder}/{log_name}",
        "requeue": "",
        "open-mode": "append",
    }
    given = [(key, value) for key, value in own.items() if value is not None]
    lines = ["#!/bin/bash"]
    for key, value in [*given, *user_options(jobs.sbatch, own)]:
        lines.append(f"#SBATCH {option_text(key, value)}")
    lines += ["export PYTHONUNBUFFERED=1", f"exec {command}", ""]
    return CorpusScript(name, "\n".join(lines))

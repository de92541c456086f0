"""`electra-dist corpus submit`: build the parts of a corpus by a Slurm array job, and merge them by a last job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.errors import UserError
from electra_launcher.cli.console import open_console

if TYPE_CHECKING:  # Each command imports what it needs, so that its --help answers at once.
    pass


def submit(
    inputs: Annotated[list[str], typer.Option("--input", help="as for `corpus build`; may be repeated")],
    output: Annotated[str, typer.Option(help="shared folder or s3://bucket/prefix of the corpus")],
    config: Annotated[Path, typer.Option("--config", help="YAML of the run, as for `corpus build`")],
    parts: Annotated[int, typer.Option(min=1, help="jobs of the array; each builds one part")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="override a key of the config; may be repeated")
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="vocab.txt; default: the one in OUTPUT, or a first job trains one")
    ] = None,
    text_field: Annotated[str, typer.Option(help="as for `corpus build`")] = "text",
    cpus: Annotated[int, typer.Option(min=1, help="cores of a part, one worker process each")] = 8,
    memory_gb: Annotated[int | None, typer.Option(min=1, help="memory of a part; default: the partition's")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition; default: the cluster's default")] = None,
    time: Annotated[str | None, typer.Option(help="time limit of a part; default: the partition's")] = None,
    jobs_folder: Annotated[
        Path | None, typer.Option("--jobs", help="folder for scripts and logs; default: OUTPUT/slurm")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="another option of sbatch; may be repeated")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the scripts; write and submit nothing")] = False,
) -> None:
    """Build a corpus on a Slurm cluster: an array of parts, then a job that joins them to the finished corpus.

    A part that is killed or requeued goes on after its finished steps. Submitting again resumes the whole build.
    """
    from electra_dist.config.load import load_config
    from electra_dist.store.open_store import open_store, without_tilde
    from electra_dist.tokenizer import VOCAB_FILE
    from electra_launcher.slurm.corpus_jobs import CorpusJobs, corpus_scripts, submit_corpus

    settings = load_config(config, overrides or ())
    is_remote = output.startswith("s3://")
    if is_remote and jobs_folder is None:
        raise UserError("--jobs: give a shared folder for scripts and logs, because the output is on S3")
    where = output if is_remote else str(without_tilde(output).absolute())
    build = [
        *(option for path in inputs for option in ("--input", _absolute(path))),
        *("--config", str(config.absolute())),
        *(option for override in overrides or () for option in ("--set", override)),
        *("--text-field", text_field),
    ]
    train: list[str] = []
    has_vocabulary = vocab is not None or open_store(where, settings.data.endpoint_url).exists(VOCAB_FILE)
    folder = (jobs_folder or Path(where) / "slurm").absolute()
    if vocab is None and not has_vocabulary:
        vocab = folder / VOCAB_FILE
        train = [*(option for path in inputs for option in ("--input", _absolute(path)))]
        train += ["--output", str(vocab), "--size", str(settings.model.vocab_size), "--text-field", text_field]
        train += [] if settings.corpus.lowercase else ["--cased"]
        train += ["--tokenizer", "bpe"] if settings.corpus.tokenizer == "bpe" else []
        train += ["--endpoint-url", settings.data.endpoint_url] if settings.data.endpoint_url else []
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


def _absolute(path: str) -> str:
    """Return a path as an absolute path, because a job may start in another folder; return a URL unchanged."""
    from electra_dist.store.open_store import without_tilde

    return path if "://" in path else str(without_tilde(path).absolute())

"""Command `electra-dist corpus prepare`: extract, filter and deduplicate text by datatrove, for `corpus build`."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.console import Console
from electra_dist.errors import EXIT_CRASH, missing_packages
from electra_launcher.cli.command_output import open_console, progress_bar, resumable

if TYPE_CHECKING:  # Each command imports what it needs, so that its --help answers at once.
    from rich.table import Table

    from electra_dist.corpus.prepare.preparation import Preparation
    from electra_dist.corpus.prepare.prepare_report import PrepareReport

_PACKAGES = ("datatrove", "trafilatura", "warcio", "fasttext", "tldextract", "ahocorasick", "ftfy", "fasteners")


def _print_keys(wanted: bool) -> None:
    from electra_dist.corpus.prepare.prepare_config import reference

    if wanted:
        typer.echo(reference(), nl=False)
        raise typer.Exit


def prepare(
    file: Annotated[Path, typer.Argument(help="YAML file of the preparation, such as configs/corpus_prepare.yaml")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything and print the stages")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", callback=_print_keys, is_eager=True, help="print every key of such a file")
    ] = False,
) -> None:
    """Extract, filter and deduplicate text by datatrove; `corpus build` reads OUTPUT/documents.

    What is dropped is counted by step, reason and source in OUTPUT/prepare.json, with samples in OUTPUT/samples. After
    an interruption, run the same command again: completed tasks are not repeated, and the result is the same.

    Exit codes: 0 done (or submitted), 1 a task was killed, 75 interrupted, 78 invalid config or data or no text kept.
    """
    from electra_dist.config.load import load_section
    from electra_dist.corpus.prepare.prepare_config import PrepareConfig

    config = load_section(file, PrepareConfig)
    if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
        raise missing_packages("corpus prepare", "corpus")
    from electra_dist.corpus.inputs.find_inputs import num_with_content
    from electra_dist.corpus.prepare import preparation as steps
    from electra_dist.corpus.prepare.prepare_report import lines_of_lost_sources, remarks_on_shapes

    out = open_console(soft_wrap=False)
    preparation = steps.check(config)
    num_bytes = sum(planned.size for planned in preparation.plan.files)
    out.print(f"{num_with_content(preparation.plan.files):,} files, {num_bytes / 1e6:,.1f} MB", soft_wrap=True)
    if preparation.evaluation is not None:
        texts, num_short = preparation.evaluation
        out.print(
            f"documents with one of {len(texts):,} evaluation texts are dropped; {num_short:,} shorter texts are not "
            f"looked for (filters.decontamination.min_words)",
            soft_wrap=True,
        )
    if dry_run:
        out.print(_stage_table(preparation))
        return
    report = steps.finished_report(preparation)
    if report is None and config.executor.kind == "slurm":
        _submit(preparation, out)
        return
    if report is None:
        _run(preparation, out)
        report = steps.finished_report(preparation)
        assert report is not None
    _print_report(report, out)
    for line in [*lines_of_lost_sources(report, config.output), *remarks_on_shapes(report)]:
        out.print(line, soft_wrap=True)
    documents = shlex.quote(f"{config.output.rstrip('/')}/documents")
    out.print(f"{config.output}: prepared; next: electra-dist corpus build --input {documents}", soft_wrap=True)


def _run(preparation: Preparation, out: Console) -> None:
    """Run the preparation with a progress bar; end the process with 75 on Ctrl-C, and with 1 if a task was killed."""
    from electra_dist.corpus.prepare.preparation import run
    from electra_dist.corpus.workers import WorkerKilled

    try:
        with resumable("completed tasks are kept"), progress_bar(out) as on_progress:
            run(preparation, on_progress)
    except WorkerKilled as error:
        out.print(
            f"{error}; if it ran out of memory, lower executor.workers; run the same command again to continue",
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_CRASH) from None


def _submit(preparation: Preparation, out: Console) -> None:
    from electra_dist.corpus.prepare.preparation import submit_to_slurm

    for stage, job in submit_to_slurm(preparation).items():
        out.print(f"submitted {stage} as job {job}", soft_wrap=True)
    out.print("when the jobs have ended, run the same command again for the report, or to repeat failed tasks")


def _stage_table(preparation: Preparation) -> Table:
    """Return a table of the stages: name, number of tasks, number of unfinished tasks, and steps of each stage."""
    from rich.table import Table

    from electra_dist.corpus.prepare.preparation import tasks_left

    left = tasks_left(preparation)
    table = Table("stage", "tasks", "left", "steps")
    for stage in preparation.stages:
        table.add_row(stage.name, f"{stage.num_tasks:,}", f"{left[stage.name]:,}", stage.step_names)
    return table


def _print_report(report: PrepareReport, out: Console) -> None:
    """Print two tables: the documents of each source, and how many documents each step dropped for which reason."""
    from rich.table import Table

    table = Table("source", "licence", "files", "documents", "dropped", "kept", "characters kept")
    for name, counts in report["sources"].items():
        share = counts["documents_out"] / counts["documents_in"] if counts["documents_in"] else 0.0
        table.add_row(
            name,
            counts["license"],
            f"{counts['files']:,}",
            f"{counts['documents_in']:,}",
            f"{counts['documents_dropped']:,}",
            f"{counts['documents_out']:,} ({share:.1%})",
            f"{counts['characters_out']:,} of {counts['characters_in']:,}",
        )
    out.print(table)
    names = list(report["sources"])
    table = Table("step", "reason", "dropped", *names)
    for step, reasons in report["dropped"].items():
        for reason, by_source in sorted(reasons.items(), key=lambda item: -sum(item[1].values())):
            numbers = [f"{by_source.get(name, 0):,}" for name in names]
            table.add_row(step, reason, f"{sum(by_source.values()):,}", *numbers)
    out.print(table)

"""Command `electra-dist export`: a checkpoint of a run as Hugging Face models, or many as the revisions of one.

Modules that the command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra_dist.console import Console, styled
from electra_dist.errors import StoreError, UserError
from electra_dist.escapes import printable
from electra_launcher.cli.command_output import open_console, progress_bar
from electra_launcher.cli.options import RunFolder

if TYPE_CHECKING:
    from electra_dist.checkpoint.chosen_weights import Choice
    from electra_dist.pretrained.export import Export

_AVERAGE = re.compile(r"last:(\d+)")
_REVISIONS_DIR = "revisions"  # of RUN/export


def export(
    run: RunFolder,
    output: Annotated[
        Path | None,
        typer.Option(help="folder to write the models to; default: RUN/export, or RUN/export/revisions"),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="STEP|best|newest|all|STEP,STEP,...",
            help="checkpoint to export: number of its step, its folder, the best on held-out rows, or the newest (the "
            "default); with --layout revisions: all (the default), or the steps",
        ),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(
            metavar="last:N",
            help="export the mean of the checkpoint's weights and the N - 1 before it; default: its own",
        ),
    ] = None,
    license_id: Annotated[
        str, typer.Option("--license", help="licence of the weights for the model card, such as apache-2.0")
    ] = "unknown",
    layout: Annotated[
        Literal["single", "revisions"],
        typer.Option(help="single: one checkpoint; revisions: a folder OUTPUT/NAME for each checkpoint"),
    ] = "single",
    name_by: Annotated[
        Literal["steps", "tokens"] | None,
        typer.Option(help="names of revisions: steps (step1000, the default) or tokens (chck_10M)"),
    ] = None,
) -> None:
    """Write a checkpoint of a run as Hugging Face models: OUTPUT/discriminator and OUTPUT/generator.

    With joint MLM, OUTPUT/masked_lm is the discriminator with the head that predicts tokens. All are folders that
    transformers can load, for example AutoModel.from_pretrained('OUTPUT/discriminator'). Each has a model card,
    README.md, with the training, the evaluation and the curves of the run.

    With --layout revisions, each checkpoint gets such folders below OUTPUT/NAME, and the lines are printed that upload
    them as revisions of one model. Nothing is uploaded.
    """
    from electra_dist.hub import check_license
    from electra_dist.pretrained.locate import choose_step
    from electra_dist.run.folder import open_run

    check_license(license_id)
    open_run(run)
    if layout == "revisions":
        if average is not None:
            raise UserError("--average: goes with one checkpoint; leave out --average, or --layout revisions")
        _export_revisions(run, output, checkpoint, name_by or "steps", license_id)
        return
    if name_by is not None:
        raise UserError(f"--name-by {name_by}: names revisions; add --layout revisions")
    if checkpoint == "all":
        raise UserError("--checkpoint all: several checkpoints are exported as revisions; add --layout revisions")
    step = choose_step(str(run), checkpoint)
    _export_one(run, output, "newest" if step is None else step, _parse_average(average), license_id)


def _export_one(run: Path, output: Path | None, choice: Choice, num_averaged: int, license_id: str) -> None:
    """Export one checkpoint, or the mean of `num_averaged` checkpoints, with model cards; print what was written."""
    from electra_dist.pretrained.export import export_run
    from electra_dist.report.model_card import write_model_cards
    from electra_dist.run.folder import EXPORT_DIR, METRICS_FILE, REPORT_FILE, TENSORBOARD_DIR

    with progress_bar(Console(stderr=True)) as report_progress:
        exported = export_run(
            run,
            output or run / EXPORT_DIR,
            choice,
            num_averaged,
            progress=lambda num_read, num_to_read: report_progress("checkpoints", num_read, num_to_read),
        )
    cards = write_model_cards(run, exported, license_id)
    out = open_console()
    steps = ", ".join(f"{step:,}" for step in exported.steps)
    weights = f"at step {steps}" if num_averaged == 1 else f"mean of the steps {steps}"
    out.print()
    out.print(styled((str(run), "bold"), f" {weights}"))
    out.print(f"  report         {run / REPORT_FILE}")
    logs = shlex.quote(str(run / TENSORBOARD_DIR))
    out.print(f"  metrics        {run / METRICS_FILE}   (tensorboard --logdir {logs})")
    for model_name, folder in exported.folders.items():
        out.print(f"  {model_name:<14} {folder}")
    for card in cards:
        out.print(f"  model card     {card}")
    out.print("next:")
    discriminator = exported.folders["discriminator"]
    # JSON puts the path in double quotes, which a shell takes as they are between single ones.
    path = json.dumps(str(discriminator))
    load_model = f"from transformers import AutoModel; print(AutoModel.from_pretrained({path}))"
    out.print(f"  python -c {shlex.quote(load_model)}")
    out.print(f"  electra-dist finetune --model {shlex.quote(str(discriminator))} --data TEXTS.csv --output tuned")


def _export_revisions(
    run: Path, output: Path | None, checkpoint: str | None, name_by: Literal["steps", "tokens"], license_id: str
) -> None:
    """Export each chosen checkpoint to OUTPUT/NAME and print how to upload them."""
    from electra_dist.run.folder import EXPORT_DIR

    names = _revision_names(run, checkpoint, name_by)
    folder = output or run / EXPORT_DIR / _REVISIONS_DIR
    out = open_console()
    exported_names: list[str] = []
    with progress_bar(Console(stderr=True)) as report_progress:
        report_progress("checkpoints", 0, len(names))
        exports = _exports(run, folder, names, license_id, is_all=checkpoint in (None, "all"))
        for num_done, exported in enumerate(exports, 1):
            name = names[exported.state.step]
            exported_names.append(name)
            folders = ", ".join(map(str, exported.folders.values()))
            out.print(f"  {name:<14} step {exported.state.step:,}: {folders}")
            report_progress("checkpoints", num_done, len(names))
    quoted = shlex.quote(str(folder))
    out.print("upload the discriminators as revisions of one model, the last one also as its main revision:")
    out.print("  hf auth login")
    out.print(
        f"  for name in {' '.join(exported_names)}; do hf upload YOUR-NAME/YOUR-MODEL {quoted}/$name/discriminator . "
        f"--revision $name; done"
    )
    out.print(f"  hf upload YOUR-NAME/YOUR-MODEL {quoted}/{exported_names[-1]}/discriminator .")
    out.print(f"load one: AutoModel.from_pretrained('YOUR-NAME/YOUR-MODEL', revision='{exported_names[0]}')")


def _exports(run: Path, folder: Path, names: dict[int, str], license_id: str, *, is_all: bool) -> Iterator[Export]:
    """Export the checkpoints of `names` (step -> name), oldest first.

    If the user asked for all checkpoints (`is_all`), one that cannot be read gives a line on stderr and no error.
    """
    from electra_dist.pretrained.export import export_run
    from electra_dist.report.model_card import write_model_cards

    failures: list[UserError] = []
    for step, name in names.items():
        try:
            exported = export_run(run, folder / name, step)
        except StoreError:
            raise
        except UserError as error:
            if not is_all:
                raise
            failures.append(error)
            print(printable(f"step {step:,} is left out: {error}"), file=sys.stderr)
            continue
        write_model_cards(run, exported, license_id)
        yield exported
    if len(failures) == len(names):
        raise failures[-1]


def _revision_names(run: Path, checkpoint: str | None, name_by: Literal["steps", "tokens"]) -> dict[int, str]:
    """Return step -> name of the checkpoints that `--checkpoint` chooses, ascending; only manifests are read."""
    rows_of_step = _rows_of_steps(run)
    if not rows_of_step:
        raise UserError(f"{run}: there is no checkpoint yet; train until the first one, or name another run")
    steps = sorted(rows_of_step) if checkpoint in (None, "all") else _parse_steps(checkpoint)
    for step in steps:
        if step not in rows_of_step:
            known = ", ".join(map(str, sorted(rows_of_step)))
            raise UserError(f"--checkpoint {checkpoint}: {run} has no checkpoint of step {step}; choose among {known}")
    if name_by == "steps":
        return {step: f"step{step}" for step in steps}
    return _names_by_tokens(run, {step: rows_of_step[step] for step in steps})


def _rows_of_steps(run: Path) -> dict[int, int]:
    """Return step -> number of rows trained on so far, for each checkpoint in all targets of a run."""
    from electra_dist.checkpoint.repair import survey
    from electra_dist.checkpoint.stored_copies import open_targets
    from electra_dist.run.folder import open_run

    config = open_run(run)
    rows_of_step: dict[int, int] = {}
    for target in open_targets(config):
        for found in survey(target):
            step = found.checkpoint.step
            if found.manifest is not None:
                rows_of_step[step] = found.manifest.state.rows_seen
            elif found.status == "damaged":
                # The export names the damaged one as an error, unless another target has a good copy of this step.
                rows_of_step.setdefault(step, step * config.train.global_batch)
    return rows_of_step


def _names_by_tokens(run: Path, rows_of_step: dict[int, int]) -> dict[int, str]:
    """Return step -> name of the checkpoint by the tokens read until then, such as chck_10M.

    `rows_of_step` has the rows read until each step. Padding does not count, and three figures are given.
    """
    from electra_dist.report.model_card import tokens_seen
    from electra_dist.run.metrics import newest_metrics
    from electra_dist.run.number_formats import format_count

    newest = newest_metrics(run, with_evaluation=False).step
    names: dict[int, str] = {}
    for step, rows in rows_of_step.items():
        tokens = None if newest is None else tokens_seen([newest], rows)
        if tokens is None:
            raise UserError(f"--name-by tokens: {run} has recorded no step with its tokens; use --name-by steps")
        figures = format_count(tokens)
        if "." in figures:
            unit = figures.lstrip("0123456789.")
            figures = figures.removesuffix(unit).rstrip("0").rstrip(".") + unit
        name = f"chck_{figures}"
        if name in names.values():
            raise UserError(
                f"--name-by tokens: two checkpoints get the name {name}; choose fewer with --checkpoint, or "
                "use --name-by steps"
            )
        names[step] = name
    return names


def _parse_steps(text: str) -> list[int]:
    """Return the steps of `--checkpoint STEP,STEP,...`, ascending."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and str(int(word)) == word for word in words):
        raise UserError(f"--checkpoint {text}: not a list of checkpoints; give all, or steps such as 1000,2000")
    return sorted(set(map(int, words)))


def _parse_average(text: str | None) -> int:
    """Return N for `--average last:N`; without the option return 1, which means no average."""
    if text is None:
        return 1
    match = _AVERAGE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise UserError(f"--average {text}: not a mean; give last:N, such as last:5 for 5 checkpoints")
    return int(match[1])

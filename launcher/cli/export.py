"""`electra-dist export` and `electra-dist report`: write a run's models for transformers, and its HTML report."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.checkpoint.checkpoint_stores import owner_of
from electra_dist.console import Console, styled
from electra_dist.errors import UserError
from electra_dist.report.overlay_page import OVERLAY_FILE, write_overlay
from electra_dist.report.report_page import write_report
from electra_dist.run.folder import (
    EXPORT_DIR,
    METRICS_FILE,
    REPORT_FILE,
    TENSORBOARD_DIR,
    open_run,
    read_identity,
)
from electra_dist.store.open_store import open_store
from launcher.cli.console import open_console
from launcher.cli.finetune import progress_bar
from launcher.cli.options import RunFolder

if TYPE_CHECKING:  # imports torch
    from electra_dist.checkpoint.chosen_weights import Choice

_AVERAGE = re.compile(r"last:(\d+)")


def export(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="folder to write the models to; default: RUN/export")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="STEP|best|newest",
            help="checkpoint to export: number of its step, the best on held-out rows, or the newest",
        ),
    ] = "newest",
    average: Annotated[
        str | None,
        typer.Option(metavar="last:N", help="export the mean of the checkpoint's weights and the N - 1 before it"),
    ] = None,
    license_id: Annotated[
        str, typer.Option("--license", help="licence of the weights for the model card, such as apache-2.0")
    ] = "unknown",
) -> None:
    """Write a checkpoint of a run as Hugging Face models: OUTPUT/discriminator and OUTPUT/generator.

    Both are folders that transformers can load, for example AutoModel.from_pretrained('OUTPUT/discriminator'). Each
    has a model card, README.md, with the training, the evaluation and the curves of the run.
    """
    from electra_dist.pretrained.export_run import export_run
    from electra_dist.report.model_card import check_license, write_model_cards

    choice = _parse_checkpoint(checkpoint)
    num_averaged = _parse_average(average)
    check_license(license_id)
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
    out.print(f"  metrics        {run / METRICS_FILE}   (tensorboard --logdir {run / TENSORBOARD_DIR})")
    for model_name, folder in exported.folders.items():
        out.print(f"  {model_name:<14} {folder}")
    for card in cards:
        out.print(f"  model card     {card}")
    out.print("next:")
    discriminator = exported.folders["discriminator"]
    load_model = f"from transformers import AutoModel; print(AutoModel.from_pretrained('{discriminator}'))"
    out.print(f'  python -c "{load_model}"')
    out.print(f"  electra-dist finetune --model {shlex.quote(str(discriminator))} --task cola --data GLUE")


def _parse_checkpoint(text: str) -> Choice:
    if text == "newest":
        return "newest"
    if text == "best":
        return "best"
    digits = text.replace(",", "")
    if not digits.isascii() or not digits.isdigit():
        raise UserError(f"--checkpoint {text}: not a checkpoint; give the number of a step, best or newest")
    return int(digits)


def _parse_average(text: str | None) -> int:
    """Return N for `--average last:N`; without the option return 1, which means no average."""
    if text is None:
        return 1
    match = _AVERAGE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise UserError(f"--average {text}: not a mean; give last:N, such as last:5 for 5 checkpoints")
    return int(match[1])


def _check_local_checkpoints(run: Path) -> None:
    """Raise a UserError if another run has written local checkpoints of `run`. Checkpoints on S3 are not checked."""
    try:
        config = open_run(run)
    except UserError:
        return  # a report is made of the records alone, also without a config that this version can read
    owner = owner_of(config, read_identity(run))
    if owner is not None:
        owner.check_all([open_store(url) for url in config.checkpoint_urls if not url.startswith("s3://")])


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folder of the run, or of each of up to eight runs", metavar="RUN...")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help=f"page to write; default: RUN/{REPORT_FILE}, and ./{OVERLAY_FILE} for several runs"),
    ] = None,
) -> None:
    """Write a page about the course of a run, or one page that lays several runs over each other, and print its path.

    The page is one HTML file, made from the records in the run folders, so it can be written at any time. It replaces
    an older one. A run folder with checkpoints of another run is refused.
    """
    for run in runs:
        _check_local_checkpoints(run)
    out = open_console()
    if len(runs) == 1:
        out.print(str(write_report(runs[0], output)))
    else:
        out.print(str(write_overlay(runs, output or Path(OVERLAY_FILE))))

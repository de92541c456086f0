"""`electra-dist export` and `electra-dist report`: write a run's models for transformers, and its HTML report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from electra_dist.pretrained.export_run import export_run
from electra_dist.report.overlay_page import OVERLAY_FILE, write_overlay
from electra_dist.report.report_page import write_report
from electra_dist.run.folder import EXPORT_DIR, METRICS_FILE, REPORT_FILE, TENSORBOARD_DIR
from launcher.cli.options import RunFolder


def export(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="folder to write the models to; default: RUN/export")] = None,
) -> None:
    """Write the newest checkpoint of a run as Hugging Face models: OUTPUT/discriminator and OUTPUT/generator.

    Both are folders that transformers can load, for example AutoModel.from_pretrained('OUTPUT/discriminator').
    """
    state, folders = export_run(run, output or run / EXPORT_DIR)
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]{run}[/bold] at step {state.step:,}")
    out.print(f"  report         {run / REPORT_FILE}")
    out.print(f"  metrics        {run / METRICS_FILE}   (tensorboard --logdir {run / TENSORBOARD_DIR})")
    for model_name, folder in folders.items():
        out.print(f"  {model_name:<14} {folder}")
    out.print("next:")
    load_model = f"from transformers import AutoModel; print(AutoModel.from_pretrained('{folders['discriminator']}'))"
    out.print(f'  python -c "{load_model}"')
    out.print("  deepspeed launcher/pretrain.py --config configs/large_25pct_mask.yaml --dry-run")


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
    an older one.
    """
    if len(runs) == 1:
        print(write_report(runs[0], output))
    else:
        print(write_overlay(runs, output or Path(OVERLAY_FILE)))

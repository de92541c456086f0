"""`electra-dist compare`: which objective is worth most on your corpus, at equal training FLOPs?"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED


def compare(
    file: Annotated[Path, typer.Argument(help="YAML file, for example configs/compare_cpu.yaml")],
    glue: Annotated[Path | None, typer.Option(help="folder with CoLA/train.tsv and so on")] = None,
    dry_run: Annotated[bool, typer.Option(help="check everything, print the runs, start none")] = False,
) -> None:
    """Pretrain objectives at equal FLOPs, score them along the way; a table and a picture. Goes on where it was.

    Exit codes: 0 all done, 1 a run failed (it is named), 75 interrupted, 78 something is wrong with the input.
    """
    from electra_dist.compare.config import CompareConfig
    from electra_dist.compare.run import Comparison
    from electra_dist.config_file import load_section
    from launcher.cli.finetune import progress_bar

    out = Console(highlight=False, soft_wrap=True)
    comparison = Comparison(load_section(file, CompareConfig), file, glue)
    table = Table("run", "steps", "FLOPs", "of the budget", title=f"{comparison.plan.budget_flops:.4g} FLOPs a run")
    for cell in comparison.plan.cells:
        flops = cell.flops(cell.marks[-1])
        share = f"{flops / comparison.plan.budget_flops:.2%}"
        table.add_row(cell.name, f"{cell.marks[-1]:,}", f"{flops:.4g}", share)
    out.print(table)
    if dry_run:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both ways of stopping hand it on to the ranks
    try:
        with progress_bar(out) as progress:
            is_complete = comparison.run(progress, out.print)
    except KeyboardInterrupt:
        out.print("interrupted; the same command goes on from here")
        raise typer.Exit(EXIT_STOPPED) from None
    out.print(comparison.table())
    for failure in comparison.failures():
        out.print(f"failed: {failure.entry} seed {failure.seed}: {failure.what}")
    for path in comparison.write():
        out.print(path)
    if not is_complete:
        raise typer.Exit(EXIT_CRASH)

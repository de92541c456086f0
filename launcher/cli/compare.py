"""Command `electra-dist compare`: pretrain with several objectives at equal training FLOPs and compare the models.

An objective is a pretraining task and its loss, for example ELECTRA or masked language modelling.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED
from launcher.cli.console import open_console

if TYPE_CHECKING:  # torch is loaded when the command runs, not for --help
    from electra_dist.compare.comparison_plan import Plan


def compare(
    file: Annotated[Path, typer.Argument(help="YAML file of the comparison, such as configs/compare_cpu.yaml")],
    glue: Annotated[
        Path | None, typer.Option(help="folder of the GLUE download, which contains CoLA/train.tsv and so on")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="check everything and print the runs, but start none")] = False,
) -> None:
    """Pretrain one model per objective at equal FLOPs, score their checkpoints, and write a table and a picture.

    The differences to the baseline are printed with their standard errors, and the criterion of the file with its
    verdict.

    After an interrupt, run the same command again: it continues, and finished runs and scores are not repeated.

    Exit codes: 0 done, 1 a run or a checkpoint failed (each is listed), 75 interrupted, 78 invalid config or data.
    """
    from electra_dist.compare.comparison import Comparison
    from electra_dist.compare.comparison_config import CompareConfig
    from electra_dist.config.load import load_section
    from launcher.cli.finetune import progress_bar

    out = open_console()
    comparison = Comparison(load_section(file, CompareConfig), file, glue)
    out.print(_plan_table(comparison.plan))
    if dry_run:
        return
    # SIGTERM raises KeyboardInterrupt like Ctrl-C: both stop the runs in order, so that their ranks save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bar(out) as progress:
            is_complete = comparison.run(progress, out.print)
    except KeyboardInterrupt:
        out.print("interrupted; run the same command again to continue from this point")
        raise typer.Exit(EXIT_STOPPED) from None
    results = comparison.results()
    out.print(results.table())
    out.print(results.difference_table())
    for line in results.verdict_lines():
        out.print(line)
    for failure in comparison.failures():
        out.print(f"failed: {failure.entry} seed {failure.seed}: {failure.what}")
    written_files = comparison.write()
    for path in written_files:
        out.print(path)
    if not is_complete:
        raise typer.Exit(EXIT_CRASH)


def _plan_table(plan: Plan) -> Table:
    """Return a table of the planned runs: steps, FLOPs, and the FLOPs as a share of the budget, near 100 %."""
    table = Table("run", "steps", "FLOPs", "of the budget", title=f"{plan.budget_flops:.4g} FLOPs a run")
    for run in plan.cells:
        num_steps = run.marks[-1]  # The marks are the steps at which the run is scored; the last one is its end.
        flops = run.flops(num_steps)
        table.add_row(run.name, f"{num_steps:,}", f"{flops:.4g}", f"{flops / plan.budget_flops:.2%}")
    return table

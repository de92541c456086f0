"""`electra-dist status RUN`: show where a run stands, and the command to run next.

Guarantee: the command only reads; it changes neither the run nor Slurm's queue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.console import open_console, print_json
from launcher.cli.options import AsJson
from launcher.cli.run_status.json_object import json_object
from launcher.cli.run_status.page import page_lines
from launcher.cli.run_status.snapshot import take_snapshot


def status(
    run: Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")], as_json: AsJson = False
) -> None:
    """Show where a run stands, its jobs and nodes, and what to do next. Changes nothing.

    The goodput, which it also shows, is the time of useful training steps divided by all time outside Slurm's queue.
    """
    snapshot = take_snapshot(run)
    if as_json:
        print_json(json_object(snapshot))
        return
    out = open_console()
    for line in page_lines(snapshot):
        out.print(line)

"""Define the arguments and options of the command line that several subcommands share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of a run, for example configs/large_25pct_mask.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object for other programs")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")]

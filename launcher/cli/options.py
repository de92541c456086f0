"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="YAML file, for example configs/large_25pct_mask.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override, may repeat")]
RunFolder = Annotated[Path, typer.Argument(help="a run's folder, for example runs/demo_cpu")]

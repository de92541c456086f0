"""Define the arguments and options of the command line that several subcommands share, as annotated types."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of a run, for example configs/large_25pct_mask.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object for other programs")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")]


class Tower(StrEnum):
    """Name of one of the two networks that an ELECTRA run trains.

    The generator proposes replacements for masked tokens. The discriminator detects the replaced tokens; it is the
    network that is fine-tuned by default.
    """

    discriminator = "discriminator"
    generator = "generator"


Vocab = Annotated[Path | None, typer.Option(help="vocab.txt for random:CONFIG.yaml; default: that of its corpus")]
TowerOption = Annotated[Tower, typer.Option(help="network of a run that is used")]

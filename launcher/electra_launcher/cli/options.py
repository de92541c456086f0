"""Define the arguments and options of the command line that several subcommands share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from electra_launcher.entry import ACCEPT_NEW_NUMERICS

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of a run, for example configs/large_25pct_mask.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one config key; may be repeated")
]
AcceptNewNumerics = Annotated[bool, typer.Option("--accept-new-numerics", help=ACCEPT_NEW_NUMERICS)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object for other programs")]
Corpus = Annotated[str, typer.Argument(help="folder or s3:// prefix of a finished corpus")]
EndpointUrl = Annotated[str | None, typer.Option(help="URL of the S3 endpoint; default: AWS")]
RunFolder = Annotated[Path, typer.Argument(help="folder of a run, for example runs/demo_cpu")]


Partition = Annotated[str | None, typer.Option(help="Slurm partition; default: the cluster's default partition")]
SbatchOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[=VALUE]", help="another option of sbatch, for example account=vision; may be repeated"),
]
Vocab = Annotated[Path | None, typer.Option(help="vocab.txt for random:CONFIG.yaml; default: that of its corpus")]
TowerOption = Annotated[Literal["discriminator", "generator"], typer.Option(help="network of a run that is used")]

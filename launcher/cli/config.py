"""`electra-dist config` and `electra-dist resolve`: show a config with all defaults and overrides applied."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from electra_dist.config import Config
from electra_dist.config_file import dump_yaml, load_config, sources
from launcher.cli.options import ConfigFile, Overrides


def config(
    file: ConfigFile,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="also describe each key")] = False,
) -> None:
    """Print every key of the resolved config, its value, and where the value comes from."""
    origin = sources(file, overrides or ())
    resolved = load_config(file, overrides or ()).model_dump(mode="json")
    columns = ["key", "value", "from"]
    if describe:
        columns.append("description")
    table = Table(*columns, title=str(file))
    for key, source in origin.items():
        value: object = resolved
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else value
        row = [key, str(value), source]
        if describe:
            row.append(_description(key))
        table.add_row(*row)
    Console().print(table)


def resolve(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config as YAML, with all defaults and overrides applied."""
    print(dump_yaml(load_config(file, overrides or ())), end="")


def _description(key: str) -> str:
    """Return the description of a key such as `train.micro_batch`; empty for a key that has none."""
    fields = Config.model_fields
    *path, last = key.split(".")
    for part in path:
        inner = fields[part].annotation
        fields = getattr(inner, "model_fields", {})
    return (fields[last].description or "") if last in fields else ""

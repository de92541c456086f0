"""`electra-dist config` and `electra-dist resolve`: the configuration as it will be used."""

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
    describe: Annotated[bool, typer.Option(help="also say what each key is")] = False,
) -> None:
    """The resolved configuration, and where each value comes from."""
    origin = sources(file, overrides or ())
    resolved = load_config(file, overrides or ()).model_dump(mode="json")
    table = Table("key", "value", "from", *(["what it is"] if describe else []), title=str(file))
    for key, where in origin.items():
        value: object = resolved
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else value
        table.add_row(key, str(value), where, *([_description(key)] if describe else []))
    Console().print(table)


def resolve(file: ConfigFile, overrides: Overrides = None) -> None:
    """The resolved configuration as YAML."""
    print(dump_yaml(load_config(file, overrides or ())), end="")


def _description(key: str) -> str:
    fields = Config.model_fields
    *path, last = key.split(".")
    for part in path:
        inner = fields[part].annotation
        fields = getattr(inner, "model_fields", {})
    return (fields[last].description or "") if last in fields else ""

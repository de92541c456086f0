"""`electra-dist config` and `electra-dist resolve`: show a config with all defaults and overrides applied."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from electra_dist.config import Config
from electra_dist.config.keys import fields, flattened
from electra_dist.config.load import dump_yaml, load_config, sources
from launcher.cli.console import open_console
from launcher.cli.options import ConfigFile, Overrides


def config(
    file: ConfigFile,
    overrides: Overrides = None,
    describe: Annotated[bool, typer.Option(help="also describe each key")] = False,
) -> None:
    """Print every key of the resolved config, its value, and where the value comes from.

    The source is the YAML file that sets the key, `--set` for an override on the command line, or `default`.
    """
    source_of_key = sources(file, overrides or ())
    values = flattened(load_config(file, overrides or ()).model_dump(mode="json"))
    described = fields(Config)
    columns = ["key", "value", "from"]
    if describe:
        columns.append("description")
    table = Table(*columns, title=str(file))
    for key, source in source_of_key.items():
        row = [key, str(values[key]), source]
        if describe:
            field = described.get(key)  # the entries of a mapping, such as corpus.licences, have none
            row.append(field.description or "" if field else "")
        table.add_row(*row)
    open_console(soft_wrap=False).print(table)


def resolve(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the config as YAML, with all defaults and overrides applied; the output can be used as a config file."""
    print(dump_yaml(load_config(file, overrides or ())), end="")

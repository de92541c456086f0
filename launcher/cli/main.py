"""`electra-dist`: everything around a run that is not the run itself. A user's mistake is one line and exit 78.

A command's module is imported when the command is named, so that `electra-dist status` loads neither torch nor
matplotlib.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from electra_dist.errors import EXIT_USER_ERROR, UserError

COMMANDS = {  # command -> (module, function or Typer application), in the order of `--help`
    "corpus": ("launcher.cli.corpus", "app"),
    "checkpoint": ("launcher.cli.checkpoint", "app"),
    "submit": ("launcher.cli.submit", "submit"),
    "status": ("launcher.cli.status", "status"),
    "finetune": ("launcher.cli.finetune", "finetune"),
    "compare": ("launcher.cli.compare", "compare"),
    "flops": ("launcher.cli.flops", "flops"),
    "plan": ("launcher.cli.plan", "plan"),
    "minimal-pairs": ("launcher.cli.finetune", "minimal_pairs"),
    "verify": ("launcher.cli.verify", "verify_command"),
    "config": ("launcher.cli.config", "config"),
    "export": ("launcher.cli.export", "export"),
    "report": ("launcher.cli.export", "report"),
    "resolve": ("launcher.cli.config", "resolve"),
}


class _CommandsOnUse(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        found = getattr(import_module(module), name)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(found)
            found = single
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_CommandsOnUse, no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Everything around a run that is not the run itself. A user's mistake is one line and exit 78."""


def main() -> None:
    """Run the console command. A user's mistake is printed in one line and ends the process with 78."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)

"""The command `electra-dist`: prepares corpora, submits runs, and inspects, evaluates and exports them.

How: the module of a subcommand is imported only when the subcommand is used, so that `electra-dist status` loads
neither torch nor matplotlib. An error that the user can correct (UserError) is printed as one line, and the process
ends with exit code 78.
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
    "speed": ("launcher.cli.speed", "speed"),
    "minimal-pairs": ("launcher.cli.finetune", "minimal_pairs"),
    "verify": ("launcher.cli.verify", "verify_command"),
    "config": ("launcher.cli.config", "config"),
    "export": ("launcher.cli.export", "export"),
    "report": ("launcher.cli.export", "report"),
    "score": ("launcher.cli.score", "score"),
    "resolve": ("launcher.cli.config", "resolve"),
}


class _CommandsOnUse(TyperGroup):
    """Command group that imports the module of a subcommand only when that subcommand is used.

    `COMMANDS` lists the subcommands and their modules.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all subcommands, in the order in which `--help` shows them; import no module."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the subcommand `cmd_name`; return None for an unknown name, which Click then reports.

        An entry of `COMMANDS` names either a Typer application with subcommands of its own, such as `corpus`, or a
        function, such as `status`. For a function, a Click command is made from its signature.
        """
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        function_or_app = getattr(import_module(module), attribute)
        if isinstance(function_or_app, typer.Typer):
            command_app = function_or_app
        else:
            command_app = typer.Typer(add_completion=False)
            command_app.command(cmd_name)(function_or_app)
        command = typer.main.get_command(command_app)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_CommandsOnUse, no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Prepare corpora, submit runs to Slurm, and inspect, evaluate and export runs.

    Exit codes: 0 success, 1 a check failed, 2 wrong usage, 78 an error that you must fix (printed as one line).
    """


def main() -> None:
    """Run the command line of this process; print a UserError to stderr as one line and exit with code 78.

    A UserError is an error that the user can correct. Any other exception is a bug and shows its traceback.
    """
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)

"""A group of commands that imports the module of a command only when the command is used.

So `electra-dist --help`, the completion of a shell, and the help of one command load neither torch nor matplotlib.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

Place = tuple[str, str]  # module, and its function or Typer application
Groups = Mapping[str, Mapping[str, Place]]  # heading of `--help` -> command -> place, in their order


class LazyGroup(TyperGroup):
    """Group whose commands are those of `groups`, which a subclass sets."""

    groups: Groups

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._places = {name: place for group in self.groups.values() for name, place in group.items()}
        self._headings = {name: heading for heading, group in self.groups.items() for name in group}
        self.commands = {name: TyperCommand(name) for name in self._places}  # the nearest name of a mistyped command

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in with only a name and a help text, for `--help`; `resolve_command` returns the command."""
        if cmd_name not in self._places:
            return None
        help_text = _description(*self._places[cmd_name])
        return TyperCommand(cmd_name, help=help_text, rich_help_panel=self._headings[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the command line names; return its name, the command, and the arguments left."""
        name, command, remaining = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, remaining
        return name, _import_command(name, *self._places[name]), remaining


def _import_command(name: str, module: str, attribute: str) -> Any:
    """Import a command, which is a Typer application (as `corpus` is) or a function (as `status` is)."""
    function_or_app = getattr(import_module(module), attribute)
    if isinstance(function_or_app, typer.Typer):
        command_app = function_or_app
    else:
        command_app = typer.Typer(add_completion=False)
        command_app.command(name)(function_or_app)
    command = typer.main.get_command(command_app)
    command.name = name
    return command


def _description(module: str, attribute: str) -> str:
    """Return a command's help text (docstring of a function or `help` of a Typer app) without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        statements = ast.parse(file.read()).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == attribute:
            return ast.get_docstring(statement) or ""
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            help_texts = [keyword.value for keyword in statement.value.keywords if keyword.arg == "help"]
            if attribute in names and help_texts:
                return str(ast.literal_eval(help_texts[0]))
    return ""

"""The command `electra-dist`: prepares corpora, submits runs, and inspects, evaluates and exports them.

How: the module of a command is imported only when the command is used. So `electra-dist --help`, the completion of a
shell, and the help of one command load neither torch nor matplotlib.

An error that the user can correct (UserError) is printed as one line, and the process ends with exit code 78; after
Ctrl-C it ends with 75.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from electra_dist.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from electra_dist.version import VERSION
from electra_launcher.entry import begin_program, exit_code_of

Place = tuple[str, str]  # module, and its function or Typer application
Groups = Mapping[str, Mapping[str, Place]]  # heading of `--help` -> command -> place, in their order

_BUILD = "electra_launcher.cli.corpus.build"
GROUPS: Groups = {
    "Train": {
        "train": ("electra_launcher.cli.train", "train"),
        "status": ("electra_launcher.cli.runs", "status"),
        "why": ("electra_launcher.cli.runs", "why"),
    },
    "Before a run": {
        "init": ("electra_launcher.cli.plans", "init"),
        "corpus": (__name__, "corpus_app"),
        "config": ("electra_launcher.cli.plans", "config"),
        "plan": ("electra_launcher.cli.plans", "plan"),
        "speed": ("electra_launcher.cli.plans", "speed"),
        "resolve": ("electra_launcher.cli.plans", "resolve"),
    },
    "After a run": {
        "export": ("electra_launcher.cli.export", "export"),
        "finetune": ("electra_launcher.cli.finetune", "finetune"),
        "predict": ("electra_launcher.cli.finetune", "predict"),
        "report": ("electra_launcher.cli.runs", "report"),
        "verify": ("electra_launcher.cli.runs", "verify"),
        "checkpoint": ("electra_launcher.cli.checkpoint", "app"),
        "score": ("electra_launcher.cli.models", "score"),
        "minimal-pairs": ("electra_launcher.cli.models", "minimal_pairs"),
        "compare": ("electra_launcher.cli.models", "compare"),
    },
    "Cluster": {
        "submit": ("electra_launcher.cli.runs", "submit"),
    },
}
CORPUS_GROUPS: Groups = {
    "Make a corpus": {
        "prepare": ("electra_launcher.cli.corpus.prepare", "prepare"),
        "vocab": ("electra_launcher.cli.corpus.vocab", "train_vocab"),
        "plan": ("electra_launcher.cli.corpus.plan", "plan"),
        "build": (_BUILD, "build"),
        "merge": (_BUILD, "merge"),
        "submit": ("electra_launcher.cli.corpus.submit", "submit"),
        "index": (_BUILD, "index"),
    },
    "Look into it": {
        "info": (_BUILD, "info"),
        "stats": (_BUILD, "stats"),
        "find": ("electra_launcher.cli.corpus.find", "find"),
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


class LazyGroup(TyperGroup):
    """Group of commands, listed in `groups` of a subclass, that imports a command only when it is called."""

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


class _Command(TyperCommand):
    """Command that refuses an option with a single value that is given twice; only the last one would count.

    An unknown option with the name of a setting is refused with the way to give settings: --set.
    """

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        except Exception as caught:
            error: Any = caught
            if type(error).__name__ == "NoSuchOption":  # a class that typer does not export
                self._name_setting(error)
            raise
        for option in given:
            takes_one_value = option.param_type_name == "option" and not (option.multiple or option.is_flag)
            if takes_one_value and given.count(option) > 1 and not ctx.resilient_parsing:
                raise typer.BadParameter("given more than once, but it takes one value", ctx=ctx, param=option)
        return super().parse_args(ctx, args)

    def _name_setting(self, error: Any) -> None:
        """Say in the error of an unknown option, such as --epochs, how to give the setting of this name, if any."""
        from electra_dist.config import Config
        from electra_dist.config.keys import fields, nearest_key
        from electra_dist.finetune.finetune_config import FinetuneConfig

        if not any("--set" in parameter.opts for parameter in self.params):
            return
        name = error.option_name.lstrip("-").replace("-", "_")
        settings = fields(FinetuneConfig if self.name == "finetune" else Config)
        key = name if name in settings or error.possibilities else nearest_key("", name, settings)
        if key in settings:
            error.message += f"; a setting is given by --set {key}=VALUE"
            error.possibilities = None


def _import_command(name: str, module: str, attribute: str) -> Any:
    """Import a command, which is a Typer application (as `corpus` is) or a function (as `status` is)."""
    function_or_app = getattr(import_module(module), attribute)
    if isinstance(function_or_app, typer.Typer):
        command_app = function_or_app
    else:
        command_app = typer.Typer(add_completion=False)
        command_app.command(name)(function_or_app)
    for registered in command_app.registered_commands:
        registered.cls = _Command
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


class _Commands(LazyGroup):
    groups = GROUPS

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; end with exit code 75 and without a traceback if the user interrupts it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_STOPPED) from None


class _CorpusCommands(LazyGroup):
    groups = CORPUS_GROUPS


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"electra-dist {VERSION}")
        raise typer.Exit


app = typer.Typer(cls=_Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Pretrain ELECTRA: train, prepare before a run, use what it gives, submit it to a cluster.

    Exit codes: 0 success, 1 a check failed, 2 wrong usage, 75 interrupted, 78 an error that you must fix (printed as
    one line).
    """


corpus_app = typer.Typer(
    cls=_CorpusCommands,
    help="Turn text into a corpus: rows of token ids in WebDataset shards.",
    no_args_is_help=True,
    add_completion=False,
)


@corpus_app.callback()
def _corpus_group() -> None:
    """Do nothing; typer needs a function that runs before each command of the group."""


def main() -> None:
    """Run the command line of this process; print a UserError to stderr as one line and exit with code 78.

    Any other exception is a bug and shows its traceback.
    """
    begin_program()
    sys.exit(exit_code_of(_run_command, code_if_away=EXIT_USER_ERROR))


def _run_command() -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder has been deleted; change to another one, for example by `cd ~`") from None
    return int(app() or 0)

"""The command `electra-dist`: prepares corpora, submits runs, and inspects, evaluates and exports them.

An error that the user can correct (UserError) is printed as one line, and the process ends with exit code 78; after
Ctrl-C it ends with 75.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from electra_dist.errors import EXIT_STOPPED, EXIT_USER_ERROR
from electra_dist.version import VERSION
from electra_launcher.cli.lazy_group import LazyGroup
from electra_launcher.entry import begin_program, exit_code_of

GROUPS = {  # heading -> command -> (module, function or Typer application), in the order of `--help`
    "Train": {
        "train": ("electra_launcher.cli.train", "train"),
        "status": ("electra_launcher.cli.runs", "status"),
        "why": ("electra_launcher.cli.runs", "why"),
    },
    "Before a run": {
        "init": ("electra_launcher.cli.init", "init"),
        "corpus": ("electra_launcher.cli.corpus.group", "app"),
        "config": ("electra_launcher.cli.plans", "config"),
        "plan": ("electra_launcher.cli.plans", "plan"),
        "speed": ("electra_launcher.cli.plans", "speed"),
        "flops": ("electra_launcher.cli.plans", "flops"),
        "resolve": ("electra_launcher.cli.plans", "resolve"),
    },
    "After a run": {
        "export": ("electra_launcher.cli.export", "export"),
        "finetune": ("electra_launcher.cli.finetune", "finetune"),
        "predict": ("electra_launcher.cli.predict", "predict"),
        "report": ("electra_launcher.cli.runs", "report"),
        "verify": ("electra_launcher.cli.runs", "verify"),
        "checkpoint": ("electra_launcher.cli.checkpoint", "app"),
        "score": ("electra_launcher.cli.models", "score"),
        "minimal-pairs": ("electra_launcher.cli.models", "minimal_pairs"),
        "compare": ("electra_launcher.cli.models", "compare"),
    },
    "Cluster": {
        "submit": ("electra_launcher.cli.submit", "submit"),
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


class _Commands(LazyGroup):
    groups = GROUPS

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; end with exit code 75 and without a traceback if the user interrupts it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_STOPPED) from None


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


def main() -> None:
    """Run the command line of this process; print a UserError to stderr as one line and exit with code 78.

    Any other exception is a bug and shows its traceback.
    """
    begin_program()
    sys.exit(exit_code_of(app, code_if_away=EXIT_USER_ERROR))

"""The list of the commands of `electra-dist corpus`."""

from __future__ import annotations

import typer

from electra_launcher.cli.lazy_group import LazyGroup

_BUILD = "electra_launcher.cli.corpus.build"


class _CorpusCommands(LazyGroup):
    groups = {
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


app = typer.Typer(
    cls=_CorpusCommands,
    help="Turn text into a corpus: rows of token ids in WebDataset shards.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _group() -> None:
    """A group needs a function, which runs before each command."""

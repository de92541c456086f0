"""Golden JSON: what the commands with --json print about a finished run and about configs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.real_runs import write_corpus, write_tiny_config

from golden.comparison import Kind
from golden.doors import CONFIGS, command, train, without_moments

COMMANDS: dict[str, list[str]] = {
    "status": ["status", "RUN", "--json"],
    "verify": ["verify", "RUN", "--json"],
    "checkpoint list": ["checkpoint", "list", "RUN", "--json"],
    "checkpoint verify": ["checkpoint", "verify", "RUN", "--json"],
    "plan of large_25pct_mask": ["plan", str(CONFIGS / "large_25pct_mask.yaml"), "--json"],
    "plan of modern_base": ["plan", str(CONFIGS / "modern_base.yaml"), "--json"],
}
# Values of the machine or the moment; their keys stay, and show that there was a number or a text.
_OF_THE_MOMENT = re.compile(
    r"(^|_)(s|seconds|time|mfu|gb|host|node|version|python|torch|pid|age|load|free|cpu|goodput|commit|eta|loss|losses|norm|auc|"
    r"accuracy|precision|recall|entropy|scores?)$"
)


def names() -> list[str]:
    """Return the names of all outputs."""
    return list(COMMANDS)


def make(name: str, folder: Path) -> Any:
    """Return the tree that a command prints; of a run, values of the machine or the moment become their types."""
    corpus, run_dir = folder / "corpus", folder / "run"
    write_corpus(str(corpus), [40, 24])
    write_corpus(str(corpus / "heldout"), [8], seed=9)
    settings = {"train.num_steps": 6, "train.global_batch": 4, "train.micro_batch": 2, "checkpoint.every_steps": 3}
    config = write_tiny_config(folder / "run.yaml", run_dir, str(corpus), **settings)
    words = COMMANDS[name]
    if "RUN" in words:
        codes, text = train(config, run_dir, 1)
        assert set(codes) == {0}, text[-2000:]
    printed = command(folder, *(str(run_dir) if word == "RUN" else word for word in words))
    tree = json.loads(without_moments(printed))
    return _typed(tree) if "RUN" in words else tree


def _typed(tree: Any, is_of_the_moment: bool = False) -> Any:
    if isinstance(tree, dict):
        return {
            name: _typed(value, is_of_the_moment or bool(_OF_THE_MOMENT.search(name))) for name, value in tree.items()
        }
    if isinstance(tree, list):
        return [_typed(value, is_of_the_moment) for value in tree]
    return f"<{type(tree).__name__}>" if is_of_the_moment and not isinstance(tree, bool | None) else tree


KIND = Kind("json_outputs", __doc__.splitlines()[0], names, make)

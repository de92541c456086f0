"""Expand a submission into one for each value of some config keys, such as seeds or learning rates."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from electra_dist.errors import UserError


def sweep(run_dir: str, each: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every run of a sweep: one run for each combination of values, with a folder of its own.

    The folder is that of the config with the last word of each key and its value appended, such as runs/a-seed-1.

    Args:
        run_dir: the run folder of the config.
        each: texts `KEY=VALUE,VALUE,...`; a value cannot hold a comma. Empty: one run without overrides.

    Returns:
        For each run its overrides `KEY=VALUE`, the run folder included; one empty tuple without `each`.

    Raises:
        UserError: a text is not of that form, a value occurs twice, or a key is the run folder.
    """
    if not each:
        return [()]
    choices = [_choices(text) for text in each]
    runs = []
    for combination in itertools.product(*choices):
        suffixes = [f"-{key.rpartition('.')[2]}-{_plain(value)}" for key, value in combination]
        settings = [f"{key}={value}" for key, value in combination]
        runs.append((*settings, f"run_dir={run_dir}{''.join(suffixes)}"))
    folders = [run[-1] for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError(f"--each {' --each '.join(each)}: two runs would have the same folder; name each value once")
    return runs


def command_of_run(arguments: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return the arguments that submit one run of a sweep again: `--set` with its overrides in place of `--each`.

    Args:
        arguments: the arguments of the command that submitted the sweep.
        changes: the overrides of the run, an entry of `sweep`.
    """
    kept = []
    is_value_of_each = False
    for argument in arguments:
        if is_value_of_each:
            is_value_of_each = False
        elif argument == "--each":
            is_value_of_each = True
        elif not argument.startswith("--each="):
            kept.append(argument)
    for change in changes:
        kept += ["--set", change]
    return kept


def _choices(text: str) -> list[tuple[str, str]]:
    """Return the pairs of key and value in a text `KEY=VALUE,VALUE,...`; raise UserError if it has another form."""
    key, _, values = text.partition("=")
    words = [value.strip() for value in values.split(",")]
    if not key or key == "run_dir" or not all(words):
        raise UserError(
            f"--each {text}: write KEY=VALUE,VALUE,... with a key of the config other than run_dir, for example "
            f"--each seed=1,2,3"
        )
    return [(key, word) for word in words]


def _plain(value: str) -> str:
    """Return a value with only characters that a folder's name can have everywhere; others become a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value)

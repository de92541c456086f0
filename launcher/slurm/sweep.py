"""Turn one submission into several runs, one for each value of a config key such as the seed or the learning rate."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from electra_dist.errors import UserError


def sweep(run_dir: str, each: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the config overrides of each run of a sweep: one run for each combination of values in `each`.

    `each` holds texts `KEY=VALUE,VALUE,...`. The last override of a run sets its own `run_dir`, such as runs/a-seed-1:
    the given folder, followed by the last word of each key and the value. An empty `each` gives one run without
    overrides, [()]. A UserError means that a text has another format, its key is `run_dir`, or two runs would have the
    same folder.
    """
    if not each:
        return [()]
    settings_of_options = [_parse_option(option) for option in each]
    runs = []
    for combination in itertools.product(*settings_of_options):
        folder = run_dir
        for key, value in combination:
            last_word = key.rpartition(".")[2]
            folder += f"-{last_word}-{_as_folder_name(value)}"
        overrides = [f"{key}={value}" for key, value in combination]
        runs.append((*overrides, f"run_dir={folder}"))
    folders = [run[-1] for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError(f"--each {' --each '.join(each)}: two runs would have the same folder; name each value once")
    return runs


def command_of_run(arguments: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return the arguments of `electra-dist submit` for one run of a sweep, which has the overrides `changes`.

    They are `arguments` without the options `--each`, followed by `--set` with each override.
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


def _parse_option(option: str) -> list[tuple[str, str]]:
    """Split an option KEY=VALUE,VALUE,... into one pair (KEY, VALUE) for each value."""
    key, _, values = option.partition("=")
    words = [value.strip() for value in values.split(",")]
    if not key or key == "run_dir" or not all(words):
        raise UserError(
            f"--each {option}: write KEY=VALUE,VALUE,... with a key of the config other than run_dir, for example "
            f"--each seed=1,2,3"
        )
    return [(key, word) for word in words]


def _as_folder_name(value: str) -> str:
    """Replace each sequence of characters other than ASCII letters, digits, ".", "_" and "-" by a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value)

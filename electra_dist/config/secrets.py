"""Keep secrets out of every record of a run: the command `cluster.notify`, and passwords within URLs.

Guarantee: `without_secrets` replaces the command, and `without_secret_arguments` the command and the passwords. Every
record of a config or of a command line that others may read is made by one of them. The files from which a run goes on
hold the command itself; they are created for their owner alone (`store/atomic_files.py`, PRIVATE).

How: the value is replaced by `HIDDEN`, which the config refuses as a command, so that a recorded command line that
somebody runs again ends with one line about it.

Limits: the command line of a process is shown to all users of its machine while it runs. The ranks of a supervisor,
and DeepSpeed, which prints their command lines, get hidden overrides through the environment instead, which only their
user can read (`hide_overrides`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "(hidden)"
_VARIABLE = "ELECTRA_DIST_OVERRIDES"
_SECRET_KEY = re.compile(r"(^|\.)cluster\.notify$")
_SECTION = re.compile(r"(^|\.)cluster$")
# KEY=VALUE, perhaps behind its option as in --set=KEY=VALUE, of a key with a secret or of the section around it.
_SECRET_OVERRIDE = re.compile(r"((?:--[\w-]+=)?\s*cluster\s*(?:\.\s*notify[^=]*)?)=.*", re.DOTALL)
_PASSWORD_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(tree: Any, key: str = "") -> Any:
    """Return a copy of a config, given as dicts, lists and plain values, with `HIDDEN` in place of its secrets.

    Keys of the tree may be dotted, such as "cluster.notify". If `tree` is a part of a config, `key` is its dotted key.
    """
    is_secret = _SECRET_KEY.search(key) or (_SECTION.search(key) and not isinstance(tree, (dict, list)))
    if is_secret:
        return HIDDEN if tree else tree
    if isinstance(tree, dict):
        return {name: without_secrets(value, f"{key}.{name}") for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value, key) for value in tree]
    return tree


def without_secret_arguments(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments, or overrides such as "train.micro_batch=32", with `HIDDEN` for each secret."""
    shown = []
    for argument in arguments:
        override = _SECRET_OVERRIDE.fullmatch(argument)
        argument = f"{override[1]}={HIDDEN}" if override else argument
        shown.append(_PASSWORD_OF_URL.sub(HIDDEN, argument))
    return shown


def hide_overrides(overrides: Sequence[str]) -> list[str]:
    """Return config overrides with `HIDDEN` for each secret, to be put on the command line of a new process.

    If there are secrets, the unchanged overrides are put into an environment variable of this process. The new process
    inherits the variable, and `whole_overrides` reads the overrides from it.
    """
    shown = without_secret_arguments(overrides)
    if shown != list(overrides):
        os.environ[_VARIABLE] = json.dumps(list(overrides))
    return shown


def whole_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of this process's command line with their secrets, from the variable of `hide_overrides`.

    Overrides that are not those of the variable are returned as they are.
    """
    whole: list[str] = json.loads(os.environ.get(_VARIABLE, "[]"))
    return whole if without_secret_arguments(whole) == list(overrides) else list(overrides)

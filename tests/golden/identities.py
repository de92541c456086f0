"""Golden identities: what decides whether a run goes on, for every shipped config and for a change of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from electra_dist.errors import UserError
from golden.comparison import Kind
from golden.doors import CONFIGS, identity, leaves, resolved

BASE = CONFIGS / "small.yaml"
# Not configs of runs.
_OTHER = ("compare_", "corpus_prepare")


def _shipped() -> list[str]:
    files = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    return [file for file in files if not Path(file).name.startswith(_OTHER)]


def names() -> list[str]:
    """Return `config FILE` for every shipped config, and `key KEY` for every key."""
    return [*(f"config {file}" for file in _shipped()), *(f"key {key}" for key in leaves(resolved(BASE)))]


def make(name: str, folder: Path) -> str:
    """Return the identity, or the error if the config is not whole or the changed value is refused."""
    what, _, which = name.partition(" ")
    try:
        if what == "config":
            return identity(CONFIGS / which)
        value = changed(leaves(resolved(BASE))[which])
        return f"{value}: {identity(BASE, [f'{which}={value}'])}"
    except UserError as error:
        return f"refused: {str(error).replace(str(CONFIGS), 'CONFIGS')}"


def changed(value: Any) -> str:
    """Return another value of the same type for the command line."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int):
        return str(value * 2 or 1)
    if isinstance(value, float):
        return repr(value / 2 or 0.25)
    if isinstance(value, str):
        return "another"
    return "1"


KIND = Kind("identities", __doc__.splitlines()[0], names, make)

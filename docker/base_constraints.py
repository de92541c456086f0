"""Constraints for an installation on top of a base image: what the base brings stays as it is, to the build.

    python docker/base_constraints.py constraints.txt > /tmp/constraints.txt

Prints the base's own version of every distribution that it has (so pip cannot replace its torch, triton or apex, and
refuses rather than try), then the tested versions of those that it lacks. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

_READABLE = re.compile(r"\d[\w.!]*(\+[\w.]+)?")


def merged(tested: str, installed: dict[str, str]) -> list[str]:
    """Lines of a constraints file: `installed` by normal name, then the pins of `tested` that it does not name."""
    lines = [f"{name}=={version}" for name, version in sorted(installed.items())]
    for line in tested.splitlines():
        pin = line.partition("#")[0].strip()
        if pin and normal(pin.partition("==")[0]) not in installed:
            lines.append(pin)
    return lines


def normal(name: str) -> str:
    """A distribution's name as pip compares names."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def installed_here() -> dict[str, str]:
    """Versions by normal name, as an import would find them: the first of a name on sys.path.

    A version that pip could not read (some of the operating system's) is left out: nothing here asks for those.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        found.setdefault(normal(distribution.metadata["Name"] or ""), distribution.version)
    return {name: v for name, v in found.items() if name not in ("", "electra-dist") and _READABLE.fullmatch(v)}


if __name__ == "__main__":
    print("\n".join(merged(Path(sys.argv[1]).read_text(encoding="utf-8"), installed_here())))

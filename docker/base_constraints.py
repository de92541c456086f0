"""Print pip constraints that keep the packages of a base image and pin the tested versions of all others.

    python docker/base_constraints.py constraints.txt > /tmp/constraints.txt

Guarantee: every distribution that the base image has is pinned to exactly the build that is installed. If a
requirement does not fit it, pip stops with an error instead of replacing torch, triton or apex. Distributions that the
base lacks get the versions of constraints.txt.

Limits: run it with the Python of the base image; it needs only the standard library.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

_READABLE = re.compile(r"\d[\w.!]*(\+[\w.]+)?")  # A version that pip can parse, such as 2.9.0a0+50eac811a6.nv25.9.


def merged(tested: str, installed: dict[str, str]) -> list[str]:
    """Return the lines of a constraints file: all installed versions, then the tested pins of what is not installed.

    Args:
        tested: Text of constraints.txt: a pin such as `jinja2==3.1.6` per line, with optional comments.
        installed: Versions of the base image by normalised name, as from `installed_here`.
    """
    lines = [f"{name}=={version}" for name, version in sorted(installed.items())]
    for line in tested.splitlines():
        pin = line.partition("#")[0].strip()
        name = normal(pin.partition("==")[0])
        if pin and name not in installed:
            lines.append(pin)
    return lines


def normal(name: str) -> str:
    """Return a distribution's name as pip compares names: lower case, with single hyphens (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def installed_here() -> dict[str, str]:
    """Return the version of every installed distribution by normalised name.

    If a name is installed twice, the first on sys.path counts, which is the one that Python imports. electra-dist
    itself is left out. Versions that pip cannot parse, as some packages of the operating system have, are left out,
    too; electra-dist requires none of these.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = normal(distribution.metadata["Name"] or "")
        versions.setdefault(name, distribution.version)
    return {
        name: version
        for name, version in versions.items()
        if name not in ("", "electra-dist") and _READABLE.fullmatch(version)
    }


if __name__ == "__main__":
    print("\n".join(merged(Path(sys.argv[1]).read_text(encoding="utf-8"), installed_here())))

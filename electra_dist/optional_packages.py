"""Say how to install the packages that only a part of the product needs: the extras of setup.py."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from electra_dist.errors import UserError


def missing_packages(purpose: str, extra: str) -> UserError:
    """Return the error of one line that `purpose` needs packages: those of the extra `extra` of setup.py.

    Its pip command names the packages, not the extra, so that it works beside a clone and beside an installed wheel.
    """
    needed = [Requirement(line) for line in _requirements()]
    chosen = [f"{one.name}{one.specifier}" for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
    packages = shlex.join(chosen or [f".[{extra}]"])
    return UserError(f"{purpose} needs packages that are not installed; run: pip install {packages}")


def _requirements() -> list[str]:
    """Return the requirements of electra-dist with their markers; [] if it runs without being installed."""
    try:
        return requires("electra-dist") or []
    except PackageNotFoundError:
        return []

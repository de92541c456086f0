"""The form of an entry in the tables of mistakes that `mutants.py` makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A mistake: in `file`, `original` becomes `mutated`; then `test` must fail."""

    name: str  # "PACKAGE: what is wrong"
    file: str
    original: str  # a piece of text that is in the file exactly once
    mutated: str
    test: str  # the test, or the file of tests, that fails; not one with the marker `drill` or `cluster`

    @property
    def package(self) -> str:
        """The package of the mistake, which begins its name."""
        return self.name.partition(":")[0]

"""Define the text files that fine-tuning writes beside a model, and make tables of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TextFile(NamedTuple):
    """File with predictions: its name, relative to the folder of the model, and its content."""

    name: str
    text: str


def tsv_file(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> TextFile:
    """Return a tab-separated file with `titles` as its first line; no cell may contain a tab or a line feed."""
    lines = ["\t".join(cells) for cells in (titles, *rows)]
    return TextFile(name=name, text="\n".join(lines) + "\n")

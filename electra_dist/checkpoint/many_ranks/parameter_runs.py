"""Describe by a few numbers how a parameter is divided between the files of hundreds of ranks.

At ZeRO stages 0 and 3 every rank stores a part of every parameter: 1.8 million tensors for ELECTRA-Large on 1,024
ranks, whose list would take 270 MB. The parts of a parameter follow one another in the order of the ranks, though, and
most have the same size. So the manifest holds them as runs: (1023, 346), (1, 10) stands for 1,023 ranks with 346
elements each, and a last one with 10. Offsets and digests of the tensors are in the header of each file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from electra_dist.errors import TornCheckpoint

Run = tuple[int, int]  # number of consecutive ranks, and the elements that each of them holds
_MOST_LISTED_TENSORS = 20_000  # 3 MB of manifest


class Parts(NamedTuple):
    """Parts of one parameter that the files of consecutive ranks hold, without a gap between them."""

    start: int | None  # first element of the first part that is not empty; None if all are empty
    runs: tuple[Run, ...]

    @property
    def end(self) -> int | None:
        """Return the element after the last part; None if all parts are empty."""
        return None if self.start is None else self.start + num_elements(self.runs)


def is_too_long_a_list(zero_stage: int, num_parameters: int, world_size: int) -> bool:
    """Return whether a manifest must hold runs, because a list of all tensors would take more than about 3 MB.

    The result depends on the arguments alone, so all ranks come to the same one.

    Args:
        zero_stage: at stages 1 and 2 a rank stores few tensors, and the list stays short.
        num_parameters: parameters of the model; each has a master weight and two moments.
        world_size: number of ranks.
    """
    return zero_stage in (0, 3) and 3 * num_parameters * world_size > _MOST_LISTED_TENSORS


def num_elements(runs: Iterable[Run]) -> int:
    """Return the number of elements in all parts of the runs."""
    return sum(count * size for count, size in runs)


def join(name: str, pieces: Sequence[Parts]) -> Parts:
    """Return the parts of one parameter in several groups of ranks, which follow one another, as a single group.

    Args:
        name: the parameter, for the message.
        pieces: the parts in each group of ranks.

    Raises:
        TornCheckpoint: a part does not begin where the part before it ends.
    """
    start = None
    end = None
    runs: list[Run] = []
    for piece in pieces:
        if piece.start is not None:
            if end is not None and piece.start != end:
                first, last = sorted((end, piece.start))
                raise TornCheckpoint(f"elements {first} to {last} of {name} are missing or stored twice")
            start = piece.start if start is None else start
            end = piece.end
        for count, size in piece.runs:
            if runs and runs[-1][1] == size:
                count += runs.pop()[0]
            runs.append((count, size))
    return Parts(start, tuple(runs))


def check_runs(name: str, numel: int, runs: Sequence[Run], num_files: int) -> None:
    """Verify that runs divide a parameter of `numel` elements between `num_files` files.

    The parts follow one another from element 0 on, so that each element is in exactly one of them if their sizes add
    up to the size of the parameter.

    Raises:
        TornCheckpoint: they do not.
    """
    is_negative = any(count < 1 or size < 0 for count, size in runs)
    if is_negative or num_elements(runs) != numel or sum(count for count, _ in runs) != num_files:
        raise TornCheckpoint(f"the parts of {name} do not make up its {numel} elements in {num_files} files")


class FilesOfElements:
    """Lookup of the files that hold given elements of one parameter."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Compute the first element of every file.

        Args:
            runs: how the parameter is divided between the files.
        """
        sizes = [size for count, size in runs for _ in range(count)]
        self._ends = list(accumulate(sizes))
        self._sizes = sizes

    def overlapping(self, start: int, end: int) -> list[int]:
        """Return the numbers of the files that hold any of the elements [start, end), at least one of them."""
        first = bisect_right(self._ends, start)
        last = bisect_right(self._ends, end - 1)
        return [file for file in range(first, last + 1) if self._sizes[file]]

    def part(self, file: int) -> tuple[int, int]:
        """Return the elements [start, end) that a file holds."""
        return self._ends[file] - self._sizes[file], self._ends[file]

"""Describe with a few numbers how a parameter is divided between the files of hundreds of ranks.

At ZeRO stages 0 and 3 every rank stores a part of every parameter: 1.8 million tensors for ELECTRA-Large on 1,024
ranks, and a list of them would take 270 MB. However, the parts of a parameter follow one another in the order of the
ranks, and most have the same size. Therefore the manifest stores the sizes as a run-length code: (1023, 346), (1, 10)
stands for 1,023 ranks with 346 elements each, followed by one rank with 10. In this module a "run" is such a pair, and
not a training run. Offsets and digests of the tensors are in the header of each file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from electra_dist.errors import TornCheckpoint

Run = tuple[int, int]  # run of equal sizes: number of consecutive ranks, and elements that each of them stores
_MOST_LISTED_TENSORS = 20_000  # 3 MB of manifest


class Parts(NamedTuple):
    """Parts of one parameter that consecutive ranks store, one after another without a gap."""

    start: int | None  # first element of the first part that is not empty; None if all parts are empty
    runs: tuple[Run, ...]  # (number of consecutive ranks, elements of each), in the order of the ranks

    @property
    def end(self) -> int | None:
        """Return the index after the last element of the last part; None if all parts are empty."""
        return None if self.start is None else self.start + num_elements(self.runs)


def is_too_long_a_list(zero_stage: int, num_parameters: int, world_size: int) -> bool:
    """Return whether a manifest's list of tensors would exceed about 3 MB, so that a run-length code replaces it."""
    return zero_stage in (0, 3) and 3 * num_parameters * world_size > _MOST_LISTED_TENSORS


def num_elements(runs: Iterable[Run]) -> int:
    """Return how many elements all ranks of a run-length code store together."""
    return sum(count * size for count, size in runs)


def join(name: str, pieces: Sequence[Parts]) -> Parts:
    """Join the run-length codes that consecutive groups of ranks have for one parameter into one code.
    Raises TornCheckpoint if one group's elements do not begin where those of the previous group end.
    """
    start = None  # first element of all groups
    end = None  # element after the last one of the groups joined so far
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
                previous_count, _ = runs.pop()
                count += previous_count
            runs.append((count, size))
    return Parts(start, tuple(runs))


def check_runs(name: str, numel: int, runs: Sequence[Run], num_files: int) -> None:
    """Raise TornCheckpoint unless the parts in all files add up to the `numel` elements of a parameter.
    Parts follow one another without gaps, in the order of the files. So if their sizes add up, every element is in
    exactly one part.
    """
    has_impossible_run = any(count < 1 or size < 0 for count, size in runs)
    num_coded_files = sum(count for count, _ in runs)
    if has_impossible_run or num_elements(runs) != numel or num_coded_files != num_files:
        raise TornCheckpoint(f"the parts of {name} do not make up its {numel} elements in {num_files} files")


class FilesOfElements:
    """Lookup of the files (numbered by the rank that wrote them) that hold given elements of one parameter."""

    def __init__(self, runs: Sequence[Run]) -> None:
        sizes = [size for count, size in runs for _ in range(count)]
        self._ends = list(accumulate(sizes))  # for each file, the element after its last one
        self._sizes = sizes  # elements in each file

    def overlapping(self, start: int, end: int) -> list[int]:
        """Return the numbers of the files that hold any of the elements [start, end), ascending."""
        first = bisect_right(self._ends, start)
        last = bisect_right(self._ends, end - 1)
        return [file for file in range(first, last + 1) if self._sizes[file]]

    def part(self, file: int) -> tuple[int, int]:
        """Return the range [start, end) of the parameter's elements that a file holds."""
        return self._ends[file] - self._sizes[file], self._ends[file]

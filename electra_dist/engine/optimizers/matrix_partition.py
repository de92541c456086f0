"""Gather whole matrices whose elements ZeRO stages 1 and 2 have divided among the ranks.

Guarantee: each rank gets every matrix of which it keeps at least one element, whole, with the values that the ranks
hold. Each element of each matrix is in the partition of exactly one rank.

How: at these stages DeepSpeed lays the parameters of a group one after another in a flat tensor, which it cuts into
equal partitions, one for each rank. A rank therefore needs one contiguous span: from the first element of the matrix
in which its partition begins, to the last element of the matrix in which its partition ends. The ranks exchange the
parts of these spans in one all-to-all, in which a rank receives the missing elements of at most two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Span(NamedTuple):
    """A range of elements of the flat tensor of a parameter group; `stop` is exclusive."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    def overlap(self, other: Span) -> Span:
        """Return the range of the elements that are in both spans; an empty range if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def within(self, outer: Span) -> slice:
        """Return the slice of this span in a tensor that holds exactly the elements of `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)


class WholeMatrix(NamedTuple):
    """A whole matrix, and the range of its elements that are in this rank's own partition."""

    values: torch.Tensor  # [rows, columns]
    own: slice  # of the flattened matrix: the elements that are in this rank's partition
    in_partition: slice  # of this rank's partition: the same elements


class MatrixPartition:
    """Division of the matrices of one parameter group into one flat partition for each rank.

    `shapes` are in the order of the flat tensor. Elements behind the last matrix are padding. Matrices are gathered on
    `device`, on which the process group must be able to communicate.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        partition_numel: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._shapes = list(shapes)
        self._matrix_spans = []
        start = 0
        for shape in self._shapes:
            self._matrix_spans.append(Span(start, start + math.prod(shape)))
            start += math.prod(shape)
        if start > partition_numel * num_ranks:
            raise RuntimeError(
                f"{num_ranks} partitions of {partition_numel} elements cannot hold matrices of {start} elements; "
                f"report this"
            )
        self.partitions = [Span(r * partition_numel, (r + 1) * partition_numel) for r in range(num_ranks)]
        self._needed_spans = [self._span_of_touched_matrices(partition) for partition in self.partitions]

    def _span_of_touched_matrices(self, partition: Span) -> Span:
        matrices = [matrix for matrix in self._matrix_spans if matrix.overlap(partition).numel]
        if not matrices:
            return Span(partition.start, partition.start)
        return Span(matrices[0].start, matrices[-1].stop)

    def outgoing(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of this rank's partition that each rank needs, as views in the order of the ranks."""
        own = self.partitions[self.rank]
        return [values[needed.overlap(own).within(own)] for needed in self._needed_spans]

    def incoming_numels(self) -> list[int]:
        """Return how many elements this rank gets from each rank, itself included."""
        needed = self._needed_spans[self.rank]
        return [partition.overlap(needed).numel for partition in self.partitions]

    def whole_matrices(self, values: torch.Tensor) -> list[WholeMatrix]:
        """Cut the elements that all ranks have sent to this one, 1-D and in their order, into matrices (views)."""
        own = self.partitions[self.rank]
        needed = self._needed_spans[self.rank]
        matrices = []
        for shape, span in zip(self._shapes, self._matrix_spans, strict=True):
            own_span = span.overlap(own)
            if own_span.numel == 0:
                continue
            matrix = values[span.within(needed)].view(shape)
            matrices.append(WholeMatrix(matrix, own_span.within(span), own_span.within(own)))
        return matrices

    def gather(self, values: torch.Tensor) -> list[WholeMatrix]:
        """Return the matrices of which at least one element is in this rank's partition `values`, 1-D. Collective."""
        parts = self.outgoing(values.to(self.device))
        if self.num_ranks == 1:
            return self.whole_matrices(parts[0])
        incoming = torch.empty(sum(self.incoming_numels()), dtype=values.dtype, device=self.device)
        dist.all_to_all_single(incoming, torch.cat(parts), self.incoming_numels(), [part.numel() for part in parts])
        return self.whole_matrices(incoming)

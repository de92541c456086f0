"""Gather whole matrices whose elements ZeRO stages 1 and 2 have divided among the ranks.

Guarantee: each rank gets every matrix of which it keeps at least one element, whole, with the values that the ranks
hold. Each element of each matrix is in the partition of exactly one rank.

How: at these stages DeepSpeed lays the parameters of a group one after another in a flat tensor, which it cuts into
equal partitions, one for each rank. A rank therefore needs one contiguous span: from the first element of the matrix
in which its partition begins, to the last element of the matrix in which its partition ends. The ranks exchange the
parts of these spans in one all-to-all.

Cost: a rank receives the missing elements of at most two matrices, and holds its span twice during the exchange.
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
        """Return the slice of this span in a tensor that holds the elements of `outer` and nothing more.

        Every element of this span must be in `outer`.
        """
        return slice(self.start - outer.start, self.stop - outer.start)


class WholeMatrix(NamedTuple):
    """A whole matrix, and the range of its elements that are in this rank's own partition.

    Attributes:
        values: the whole matrix, [rows, columns].
        own: slice of the flattened matrix with the elements that are in this rank's partition.
        in_partition: slice of this rank's partition, a 1-D tensor, with the same elements.
    """

    values: torch.Tensor
    own: slice
    in_partition: slice


class MatrixPartition:
    """Division of the matrices of one parameter group into one flat partition for each rank."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        partition_numel: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        """Compute for each rank the range of elements in its partition, and the range that it must receive.

        Args:
            shapes: (rows, columns) of the matrices, in the order in which they are in the flat tensor.
            partition_numel: number of elements of each rank's partition. Elements behind the last matrix are padding.
            rank: number of this rank, from 0.
            num_ranks: number of ranks that share the flat tensor.
            device: where the matrices are gathered; the process group must be able to communicate on it.

        Raises:
            RuntimeError: the partitions together are smaller than the matrices.
        """
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
        """Return the range of the flat tensor that holds all matrices of which a partition has at least one element.

        The range begins with the first element of the first of these matrices, and ends after the last element of the
        last one. It is empty if the partition has only padding.
        """
        matrices = [matrix for matrix in self._matrix_spans if matrix.overlap(partition).numel]
        if not matrices:
            return Span(partition.start, partition.start)
        return Span(matrices[0].start, matrices[-1].stop)

    def outgoing(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements that each rank needs from this one, in the order of the ranks.

        Args:
            values: this rank's partition, 1-D.

        Returns:
            Views of `values`, one for each rank; empty for a rank that needs nothing.
        """
        own = self.partitions[self.rank]
        return [values[needed.overlap(own).within(own)] for needed in self._needed_spans]

    def incoming_numels(self) -> list[int]:
        """Return how many elements this rank gets from each rank, itself included."""
        needed = self._needed_spans[self.rank]
        return [partition.overlap(needed).numel for partition in self.partitions]

    def whole_matrices(self, values: torch.Tensor) -> list[WholeMatrix]:
        """Cut the elements that this rank has received into whole matrices.

        Args:
            values: the elements that all ranks sent to this one, in the order of the ranks, 1-D.

        Returns:
            The matrices of which at least one element is in this rank's partition, in their order, as views of
            `values`.
        """
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
        """Return the whole matrices of which at least one element is in this rank's partition. Collective.

        Args:
            values: this rank's partition, 1-D, of the same dtype on all ranks.

        Returns:
            The matrices in their order, on `device`.
        """
        parts = self.outgoing(values.to(self.device))
        if self.num_ranks == 1:
            return self.whole_matrices(parts[0])
        incoming = torch.empty(sum(self.incoming_numels()), dtype=values.dtype, device=self.device)
        dist.all_to_all_single(incoming, torch.cat(parts), self.incoming_numels(), [part.numel() for part in parts])
        return self.whole_matrices(incoming)

"""Add up and exchange the gradients of a step at ZeRO stage 1 in bf16, with few operations.

DeepSpeed's BF16_Optimizer remains the optimizer. It keeps the sums of a parameter group's gradients in one flat fp32
tensor, and handles each parameter by itself in Python. This module handles buckets of consecutive parameters instead.

Guarantee: on a CPU without overlap every sum is that of DeepSpeed 0.19.8, bit for bit. With overlap
(`engine.overlap_communication`) the sum over two ranks is the same, bit for bit, because it has two terms. With more
ranks the order of the terms depends on how a collective divides a bucket, so that the last bit may differ. On a GPU
the gradients of weights are not rounded to bf16 before they are added. Sums over micro-batches and over ranks are
fp32.

How: autograd hooks collect the gradients of a bucket during the backward pass, and add them to the bucket's fp32 sums
when all of them exist. On a GPU the product that computes a weight's gradient adds it to the fp32 sum itself. With
overlap, a bucket whose sums are complete is all-reduced at once, while the backward pass goes on with lower layers.
All ranks exchange the buckets in the same order: the one in which rank 0 completed them in the backward pass before
the first exchange.

Limits: tested with DeepSpeed 0.19.8, whose attributes this module reads. The gather of the updated parameters is not
overlapped. With overlap, a second gradient for a parameter whose bucket is being exchanged raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from electra_dist.collectives import from_rank_0
from electra_dist.model.fused_layer import GradientSum

BUCKET_ELEMENTS = 1 << 24  # limit of a bucket, 64 MiB of fp32 sums; a single parameter may have more
_OVERLAPPED_BUCKETS = 16  # with overlap, a small model has at least about as many, so that its exchange begins early


class _Bucket:
    """Consecutive parameters of one parameter group whose gradients are added up and exchanged together."""

    def __init__(self, index: int, sums: torch.Tensor, num_parameters: int) -> None:
        self.index = index
        self.sums = sums  # fp32 sums of all parameters in the bucket, 1-D; a view of DeepSpeed's flat tensor
        self.num_parameters = num_parameters
        self.gradients: list[torch.Tensor] = []  # of the current backward pass, not added to the sums yet
        self.targets: list[torch.Tensor] = []  # for each of these, the view of `sums` in the shape of the parameter
        self.num_added = 0  # gradients of the current backward pass that are added to the sums already
        self.is_exchanging = False  # whether an all-reduce of the sums is started and its result not yet in use

    def add_gradients(self) -> None:
        """Add the collected gradients to the fp32 sums with few operations, and drop these gradients."""
        if not self.gradients:
            return
        if self.sums.is_cuda:
            # On a GPU, torch copies a list of bf16 tensors to fp32 by few kernels, and adds two lists of fp32 tensors
            # by few; to add bf16 to fp32, it launches a kernel for each tensor.
            gradients = [gradient.flatten() for gradient in self.gradients]
            sizes = [gradient.numel() for gradient in gradients]
            fp32_gradients = self.sums.new_empty(sum(sizes)).split(sizes)
            torch._foreach_copy_(fp32_gradients, gradients)
            torch._foreach_add_([target.flatten() for target in self.targets], fp32_gradients)
        else:
            torch._foreach_add_(self.targets, self.gradients)
        self.num_added += len(self.gradients)
        self.gradients.clear()
        self.targets.clear()


class GradientSums:
    """Replacement for DeepSpeed's code that adds up the gradients of a BF16_Optimizer in fp32, one by one.

    It adds them bucket by bucket. Create it before the first backward pass. It replaces methods of the optimizer, so
    the caller need not keep a reference to it. With `overlaps` ranks exchange gradients during the backward pass; the
    optimizer must then have been built with `immediate_grad_update`, and the caller must switch off DeepSpeed's own
    exchange. With `takes_products`, which needs `immediate_grad_update`, too, the matrix product that computes a
    weight's gradient adds it to the fp32 sum itself (`GradientSum`).
    """

    def __init__(
        self,
        optimizer: Any,
        is_last_micro_batch: Callable[[], bool],
        *,
        overlaps: bool,
        takes_products: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._is_last_micro_batch = is_last_micro_batch
        self._overlaps = overlaps
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[list[_Bucket]] = []  # bucket of each parameter, by parameter group and parameter
        self._targets: list[list[torch.Tensor]] = []  # view of the sums in the shape of each parameter, likewise
        most_elements = BUCKET_ELEMENTS
        if overlaps:
            num_elements = sum(flat_sums.numel() for flat_sums in optimizer.fp32_groups_gradients_flat)
            most_elements = min(most_elements, num_elements // _OVERLAPPED_BUCKETS)
        for parameters, flat_sums in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients_flat, strict=True):
            self._make_buckets(parameters, flat_sums, most_elements)
            if takes_products:
                self._offer_sums(len(self._targets) - 1, parameters)
        self._completed: list[int] = []  # buckets in the order in which the current backward pass completed them
        self._exchange_order: list[int] | None = None  # buckets in the order of exchange; None before the first one
        self._num_started = 0  # all-reduces that are started in the current step
        self._all_reduces: list[tuple[_Bucket, Any]] = []  # (bucket, handle with `wait`) of each of these all-reduces
        if optimizer.immediate_grad_update:
            optimizer.accumulate_hp_grads_and_remove_lp = self._collect_gradient
            self._deepspeed_epilogue = optimizer.backward_epilogue
            optimizer.backward_epilogue = self._end_backward
        else:
            optimizer._update_hp_grad = self._add_gradient

    def _make_buckets(self, parameters: Sequence[torch.Tensor], flat_sums: torch.Tensor, most_elements: int) -> None:
        """Make buckets for the parameters of a group, and give each parameter its part of the group's fp32 sums."""
        bucket_of_parameter = []
        target_of_parameter = []
        start = 0  # element of `flat_sums` at which the next parameter begins
        for bucket_parameters in _divide(parameters, most_elements):
            numel = sum(parameter.numel() for parameter in bucket_parameters)
            bucket = _Bucket(len(self._buckets), flat_sums[start : start + numel], len(bucket_parameters))
            self._buckets.append(bucket)
            for parameter in bucket_parameters:
                target = flat_sums[start : start + parameter.numel()]
                parameter._hp_grad = target  # type: ignore[attr-defined]  # as BF16_Optimizer sets it
                target_of_parameter.append(target.view(parameter.shape))
                bucket_of_parameter.append(bucket)
                start += parameter.numel()
        self._bucket_of.append(bucket_of_parameter)
        self._targets.append(target_of_parameter)

    def _offer_sums(self, group: int, parameters: Sequence[Any]) -> None:
        """Let the products that compute the gradients of a group's matrices add them to the fp32 sums directly."""
        for index, parameter in enumerate(parameters):
            if parameter.dim() == 2:
                count = functools.partial(self._count_product, group, index)
                parameter.gradient_sum = GradientSum(self._targets[group][index], count)

    @torch.no_grad()
    def _add_gradient(self, parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        """Add the gradient of parameter `index` of a group to its fp32 sum; replaces DeepSpeed's `_update_hp_grad`."""
        if parameter.grad is None:
            return
        self._targets[group][index].add_(parameter.grad)
        self._optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            parameter.grad.zero_()

    @torch.no_grad()
    def _collect_gradient(self, parameter: Any, group: int, index: int) -> None:
        """Move a new gradient to its bucket, in place of DeepSpeed's `accumulate_hp_grads_and_remove_lp`."""
        if parameter.grad is None:
            return
        bucket = self._bucket_of[group][index]
        bucket.gradients.append(parameter.grad)
        bucket.targets.append(self._targets[group][index])
        parameter.grad = None
        self._count_gradient(group, index)

    @torch.no_grad()
    def _count_product(self, group: int, index: int) -> None:
        """Count a gradient that a matrix product has added to its fp32 sum."""
        self._bucket_of[group][index].num_added += 1
        self._count_gradient(group, index)

    def _count_gradient(self, group: int, index: int) -> None:
        """Record that a parameter has its gradient; if that completes its bucket, add up and start to exchange."""
        bucket = self._bucket_of[group][index]
        if bucket.is_exchanging:
            raise RuntimeError(
                "a parameter got a second gradient in a backward pass after its first one was exchanged; set "
                "engine.overlap_communication: false, and report this"
            )
        self._optimizer.fp32_groups_has_gradients[group][index] = True
        num_gradients = bucket.num_added + len(bucket.gradients)
        if num_gradients < bucket.num_parameters:
            return
        bucket.add_gradients()
        if bucket.index not in self._completed:  # A parameter with a second gradient completes its bucket again.
            self._completed.append(bucket.index)
        # Before the first exchange the ranks have not agreed on an order yet; `_finish_exchange` then starts all.
        is_order_known = self._exchange_order is not None
        if self._overlaps and is_order_known and self._is_last_micro_batch():
            self._start_completed()

    @torch.no_grad()
    def _end_backward(self, **options: Any) -> None:
        """Add up what is left in buckets and finish the exchange; then call DeepSpeed's own `backward_epilogue`."""
        for bucket in self._buckets:
            bucket.add_gradients()
            bucket.num_added = 0
        if self._overlaps and self._is_last_micro_batch():
            self._finish_exchange()
        self._completed.clear()
        self._deepspeed_epilogue(**options)

    def _start_completed(self) -> None:
        assert self._exchange_order is not None
        for index in self._exchange_order[self._num_started :]:
            if index not in self._completed:
                break  # later ones wait, because all ranks must start the collectives in the same order
            self._start_next()

    def _start_next(self) -> None:
        assert self._exchange_order is not None
        bucket = self._buckets[self._exchange_order[self._num_started]]
        bucket.is_exchanging = True
        self._num_started += 1
        self._all_reduces.append((bucket, dist.all_reduce(bucket.sums, async_op=True)))

    def _finish_exchange(self) -> None:
        """All-reduce the remaining buckets, wait for all, and divide the sums by the number of ranks. Collective."""
        if self._exchange_order is None:
            incomplete = [index for index in range(len(self._buckets)) if index not in self._completed]
            self._exchange_order = from_rank_0(lambda: self._completed + incomplete)
        while self._num_started < len(self._exchange_order):
            self._start_next()
        for bucket, all_reduce in self._all_reduces:
            all_reduce.wait()
            bucket.sums.mul_(1.0 / dist.get_world_size())  # DeepSpeed expects means
            bucket.is_exchanging = False
        self._all_reduces.clear()
        self._num_started = 0


def _divide(parameters: Sequence[torch.Tensor], most_elements: int) -> list[list[torch.Tensor]]:
    """Divide parameters into runs of neighbours: of at most `most_elements` elements, or of one larger parameter."""
    runs: list[list[torch.Tensor]] = []
    num_elements = 0  # of the newest run
    for parameter in parameters:
        if not runs or num_elements + parameter.numel() > most_elements:
            runs.append([])
            num_elements = 0
        runs[-1].append(parameter)
        num_elements += parameter.numel()
    return runs

"""Adds up, exchanges, measures and clips the gradients of a step at ZeRO stage 1 in bf16, with few operations.

DeepSpeed's BF16_Optimizer stays the optimizer. It keeps a flat fp32 sum of the gradients of each parameter group. This
module replaces what DeepSpeed does for each parameter in Python by operations on groups of consecutive parameters,
called buckets, and on whole partitions.

Guarantee: without overlap every sum, the norm and the clipped gradients are those of DeepSpeed 0.19.8, bit for bit.
With overlap (`engine.overlap_communication`) the sum over two ranks is the same, bit for bit, for it has two terms.
With more ranks the order of the terms depends on how a collective divides a bucket, and on a GPU the norm is computed
by another kernel, so that the last bit may differ. Sums over micro-batches and over ranks are fp32.

How: hooks of the backward pass collect the gradients of a bucket and add them to its fp32 sums when the last of them
exists. With overlap, a bucket whose sums are complete is all-reduced at once, while the backward pass computes the
gradients of the layers before it. All ranks exchange the buckets in one order: the one in which rank 0 completed them
in its first backward pass.

Limits: tested with DeepSpeed 0.19.8, whose attributes this module reads. The gather of the updated parameters is not
overlapped. A backward pass that gives a parameter a gradient twice is refused with overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2

BUCKET_ELEMENTS = 1 << 24  # of a bucket's fp32 sums, 64 MiB; a single parameter may have more

# Names in DeepSpeed's modules by which its optimizers compute the norm of the gradients and let the host look at it.
_NORM_NAMES = ("get_global_norm_of_tensors", "clip_tensors_by_global_norm", "is_invalid_grad_norm")
_CHECK_NAMES = ("is_invalid_grad_norm", "mask_nan_or_inf_with_val_inplace")


class _Bucket:
    """Consecutive parameters of a group whose gradients are added to the fp32 sums, and exchanged, together.

    Attributes:
        index: Number of the bucket, from 0.
        sums: The fp32 sums of all its parameters, 1-D; a view of DeepSpeed's flat tensor.
        num_parameters: Number of its parameters.
        gradients: Gradients of the present backward pass that are not added yet.
        targets: For each of these gradients, its part of the sums in the shape of the parameter.
        num_added: Parameters whose gradient of the present backward pass is added.
        is_exchanging: Whether its all-reduce of the present step has begun.
    """

    def __init__(self, index: int, sums: torch.Tensor, num_parameters: int) -> None:
        """Store the sums; there are no gradients yet."""
        self.index = index
        self.sums = sums
        self.num_parameters = num_parameters
        self.gradients: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.num_added = 0
        self.is_exchanging = False

    def add_gradients(self) -> None:
        """Add the collected gradients to the sums, and release them."""
        if not self.gradients:
            return
        torch._foreach_add_(self.targets, self.gradients)
        self.num_added += len(self.gradients)
        self.gradients.clear()
        self.targets.clear()


class GradientSums:
    """The fp32 sums of gradients of a BF16_Optimizer, filled by hooks of the backward pass.

    It attaches itself to the optimizer, which from then on adds gradients through it.
    """

    def __init__(self, optimizer: Any, is_last_micro_batch: Callable[[], bool], *, overlaps: bool) -> None:
        """Divide the parameters into buckets, and attach to the optimizer.

        Args:
            optimizer: BF16_Optimizer of deepspeed.initialize, before the first backward pass.
            is_last_micro_batch: returns whether the present backward pass is the last one of its step.
            overlaps: exchange buckets during the backward pass. The caller then switches DeepSpeed's exchange off, and
                the optimizer must have been built with `immediate_grad_update`.
        """
        self._optimizer = optimizer
        self._is_last_micro_batch = is_last_micro_batch
        self._overlaps = overlaps
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[list[_Bucket]] = []  # by group and parameter
        self._targets: list[list[torch.Tensor]] = []  # the sums of each parameter in its shape
        for parameters, flat_sums in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients_flat, strict=True):
            self._divide(parameters, flat_sums)
        self._completed: list[int] = []  # buckets in the order in which the present backward pass completed them
        self._order: list[int] | None = None  # in which buckets are exchanged; None until the first exchange
        self._num_exchanging = 0
        self._works: list[tuple[_Bucket, Any]] = []
        if optimizer.immediate_grad_update:
            optimizer.accumulate_hp_grads_and_remove_lp = self._collect
            self._end_of_backward = optimizer.backward_epilogue
            optimizer.backward_epilogue = self._end_backward
        else:
            optimizer._update_hp_grad = self._add_one

    def _divide(self, parameters: Sequence[torch.Tensor], flat_sums: torch.Tensor) -> None:
        """Divide the parameters of one group into buckets of at most BUCKET_ELEMENTS, but at least one parameter.

        Args:
            parameters: the parameters, which lie one after another in `flat_sums`.
            flat_sums: the group's fp32 sums, with padding at the end.
        """
        runs: list[list[torch.Tensor]] = []
        for parameter in parameters:
            is_full = not runs or sum(other.numel() for other in runs[-1]) + parameter.numel() > BUCKET_ELEMENTS
            if is_full:
                runs.append([])
            runs[-1].append(parameter)
        buckets = []
        targets = []
        start = 0
        for run in runs:
            numel = sum(parameter.numel() for parameter in run)
            bucket = _Bucket(len(self._buckets), flat_sums[start : start + numel], len(run))
            self._buckets.append(bucket)
            for parameter in run:
                target = flat_sums[start : start + parameter.numel()]
                parameter._hp_grad = target  # type: ignore[attr-defined]  # as BF16_Optimizer sets it
                targets.append(target.view(parameter.shape))
                buckets.append(bucket)
                start += parameter.numel()
        self._bucket_of.append(buckets)
        self._targets.append(targets)

    @torch.no_grad()
    def _add_one(self, parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        """Add the gradient of one parameter to its sum; takes the place of `_update_hp_grad` of DeepSpeed.

        Args:
            parameter: the bf16 parameter.
            group: index of its group.
            index: index of the parameter in the group.
            clear_lp_grads: whether to set the bf16 gradient to zero afterwards.
        """
        if parameter.grad is None:
            return
        self._targets[group][index].add_(parameter.grad)
        self._optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            parameter.grad.zero_()

    @torch.no_grad()
    def _collect(self, parameter: Any, group: int, index: int) -> None:
        """Take the gradient of one parameter, and add those of its bucket if it is the last; a hook of the backward.

        Args:
            parameter: the bf16 parameter, whose gradient is set to None.
            group: index of its group.
            index: index of the parameter in the group.

        Raises:
            RuntimeError: the bucket is being exchanged already.
        """
        if parameter.grad is None:
            return
        bucket = self._bucket_of[group][index]
        if bucket.is_exchanging:
            raise RuntimeError(
                "a parameter got a second gradient in a backward pass after its first one was exchanged; set "
                "engine.overlap_communication: false, and report this"
            )
        bucket.gradients.append(parameter.grad)
        bucket.targets.append(self._targets[group][index])
        parameter.grad = None
        self._optimizer.fp32_groups_has_gradients[group][index] = True
        if bucket.num_added + len(bucket.gradients) < bucket.num_parameters:
            return
        bucket.add_gradients()
        self._completed.append(bucket.index)
        if self._overlaps and self._order is not None and self._is_last_micro_batch():
            self._exchange_completed()

    @torch.no_grad()
    def _end_backward(self, **options: Any) -> None:
        """Add what is left of the gradients and, with overlap in the last micro-batch, finish the exchange.

        Takes the place of `backward_epilogue` of DeepSpeed. Collective with overlap in the last micro-batch.
        """
        for bucket in self._buckets:
            bucket.add_gradients()
            bucket.num_added = 0
        if self._overlaps and self._is_last_micro_batch():
            self._finish_exchange()
        self._completed.clear()
        self._end_of_backward(**options)

    def _exchange_completed(self) -> None:
        """Begin the all-reduces of the next buckets of the order, up to the first that is not completed yet."""
        assert self._order is not None
        while self._num_exchanging < len(self._order) and self._order[self._num_exchanging] in self._completed:
            self._exchange_next()

    def _exchange_next(self) -> None:
        """Begin the all-reduce of the next bucket of the order; the ranks need not wait for it."""
        assert self._order is not None
        bucket = self._buckets[self._order[self._num_exchanging]]
        bucket.is_exchanging = True
        self._num_exchanging += 1
        self._works.append((bucket, dist.all_reduce(bucket.sums, async_op=True)))

    def _finish_exchange(self) -> None:
        """Begin the all-reduces that have not begun, wait for all, and turn the sums into DeepSpeed's means.

        On a GPU only the device waits. In the first backward pass the ranks take over rank 0's order of the buckets.
        """
        if self._order is None:
            late = [index for index in range(len(self._buckets)) if index not in self._completed]
            order = [self._completed + late]
            dist.broadcast_object_list(order)
            self._order = order[0]
        while self._num_exchanging < len(self._order):
            self._exchange_next()
        for bucket, work in self._works:
            work.wait()
            bucket.sums.mul_(1.0 / dist.get_world_size())
            bucket.is_exchanging = False
        self._works.clear()
        self._num_exchanging = 0


@contextlib.contextmanager
def norms_stay_on_device(optimizer: Any, *, fused: bool) -> Iterator[None]:
    """Let DeepSpeed's optimizers of ZeRO stages 1 and 2 compute and clip by the norm without a wait of the host.

    DeepSpeed's functions let the host read the norm twice, to skip a step whose gradients are not finite and to decide
    whether to clip. Inside the block no step is skipped there: the engine decides when DeepSpeed calls the optimizer,
    from the norm that it then reads. Clipping multiplies by a factor of 1 where DeepSpeed would not multiply.

    Args:
        optimizer: the optimizer that deepspeed.initialize returned.
        fused: compute the norms of all gradients of a BF16_Optimizer by one operation, whose rounding on a GPU is not
            that of one operation for each gradient.
    """

    def global_norm(input_tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        """Return the norm over all tensors: the 2-norm of their 2-norms, as DeepSpeed computes it."""
        if fused:
            norms = list(torch._foreach_norm(list(input_tensors)))
        else:
            norms = [torch.linalg.vector_norm(tensor) for tensor in input_tensors]
        return torch.stack(norms).pow(2.0).sum().pow(0.5)

    def clip(max_norm: float, global_norm: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
        """Clip this rank's partitions of the gradients, the only ones that it reads afterwards."""
        factor = (max_norm / (global_norm + eps)).clamp(max=1.0)
        for partition in optimizer.fp32_groups_gradient_flat_partition:
            partition.mul_(factor)
        return global_norm

    replacements = {
        bf16_optimizer: dict(zip(_NORM_NAMES, (global_norm, clip, lambda norm: False), strict=True)),
        stage_1_and_2: dict(zip(_CHECK_NAMES, (lambda norm: False, lambda *_, **__: None), strict=True)),
    }
    originals = [(module, name, getattr(module, name)) for module, names in replacements.items() for name in names]
    for module, names in replacements.items():
        for name, function in names.items():
            setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)

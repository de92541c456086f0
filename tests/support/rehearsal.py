"""Rehearses the GPU's branch of a training step on a machine without a GPU, and counts what it would do.

Guarantee: the host side of a micro-batch runs as on a GPU: the same operators of torch, the same Triton launches with
the same arguments, in the same order. An error is raised for a host read (`.item()`, `.tolist()`, an index by a bool
tensor), for a tensor that is on the host where the others are on the device, for a kernel argument that is strided, on
the host or an integer beyond 32 bits, and for a launch with a missing argument or an impossible grid.

How: all tensors are on torch's device `meta`, which computes shapes and dtypes and no values. `Rehearsal`, a dispatch
mode, sees every operator and adds up the bytes of the storages that are alive. Triton's launch function is replaced by
one that checks and records its arguments. Fake tensors of the device `cuda` are no alternative: their backward pass
asks for a GPU.

Limits: values, times and the allocator's rounding are not rehearsed, and nothing inside a kernel. Autocast (ZeRO-0 in
bf16) does not exist on `meta`. Under torch.compile the graphs are those of its backend aot_eager, so operators are
counted before Inductor fuses them.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from electra_kernels import keyed_random
from electra_kernels.operation_types import SpecialIds
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from electra_dist.config import Config
from electra_dist.config.schedule import schedules_of
from electra_dist.model import attention, attention_choice
from electra_dist.model.attention import BACKENDS, LayerMask
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives import build_objective
from electra_dist.objectives.base import Objective, ScheduledValues, Schedules, StepInput

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
META = torch.device("meta")

_WORD = 2**31  # an integer argument of a kernel must fit into a signed word of 32 bits
_LARGEST_GRID = (2**31 - 1, 65535, 65535)  # CUDA's limits of a grid's three dimensions
_HOST_OPERATORS = ("aten.lift_fresh.default", "aten.detach.default")  # free on the host; a tensor is made by them
_HOST_ELEMENTS = 4  # tensors of up to this size may be on the host: a layer's dropout key has 3 elements


class Stray(AssertionError):
    """Error for an operator or launch of a rehearsal that a GPU would refuse, or that would make it wait."""


class Launch(NamedTuple):
    """One recorded launch of a Triton kernel."""

    kernel: str
    grid: tuple[int, ...]
    tensors: dict[str, tuple[int, ...]]  # name of a pointer argument -> shape of its tensor
    words: dict[str, int]  # name of an integer argument -> its value
    num_bytes: int  # of all tensors, each once


class DeviceCall(NamedTuple):
    """One operator of torch that computes on the device."""

    name: str  # such as "aten.mm.default"
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it reads, then of those that it returns
    num_bytes: int  # of all these tensors


class Figures(NamedTuple):
    """What one micro-batch did in a rehearsal."""

    operators: Counter[str]  # name of an operator of torch, such as "aten.mm.default" -> how often it ran
    device_calls: list[DeviceCall]  # those that compute on the device, neither views nor allocations, in their order
    launches: list[Launch]  # Triton launches in their order
    peak_bytes: int  # largest sum of the tensors that were alive at one time, without parameters and buffers
    uploads: int  # copies from the host to the device

    @property
    def kernel_counts(self) -> dict[str, int]:
        """Number of launches of each Triton kernel, sorted by name."""
        return dict(sorted(Counter(launch.kernel for launch in self.launches).items()))


class Rehearsal(TorchDispatchMode):
    """Dispatch mode that checks and counts every operator of torch, and follows the bytes that are alive.

    Parameters and buffers of the module do not count. Gradients that the backward pass makes do.
    """

    def __init__(self, module: torch.nn.Module, launches: list[Launch]) -> None:
        """Begin with no bytes alive; `launches` is the list that `gpu_branch` fills."""
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.device_calls: list[DeviceCall] = []
        self.launches = launches
        self.uploads = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._real_bodies = _real_bodies()
        held = [*module.parameters(), *module.buffers()]
        self._known_storages = {tensor.untyped_storage()._cdata for tensor in held}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile compiles below this mode and does not silently run eagerly."""
        return True

    def figures(self) -> Figures:
        """Return what was counted so far."""
        return Figures(
            operators=Counter(self.operators),
            device_calls=list(self.device_calls),
            launches=list(self.launches),
            peak_bytes=self.peak_bytes,
            uploads=self.uploads,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the tensors of an operator, run it, and count it and the storages that it made."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = str(func)
        if name not in _HOST_OPERATORS and not _is_upload(name, inputs):
            self._check_devices(func, inputs)
        run = self._real_bodies.get(name, func)
        outputs = run(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        self.operators[name] += 1
        if made and _is_upload(name, inputs):
            self.uploads += 1
        if made and _does_work(func, inputs, made):
            tensors = [tensor for tensor in [*inputs, *made] if tensor.is_meta]
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            self.device_calls.append(DeviceCall(name, shapes, sum(_size(tensor) for tensor in tensors)))
        for tensor in made:
            self._count_storage(tensor.untyped_storage())
        return outputs

    @staticmethod
    def _check_devices(func: Any, inputs: list[torch.Tensor]) -> None:
        """Raise Stray if a tensor is on the host that a GPU's operator would refuse or wait for."""
        on_device = any(tensor.is_meta for tensor in inputs)
        for tensor in inputs:
            if tensor.is_meta:
                continue
            is_host_key = func.namespace == "electra" and tensor.numel() <= _HOST_ELEMENTS
            largest_size = 1 if on_device and not is_host_key else _HOST_ELEMENTS
            if tensor.numel() > largest_size or (on_device and tensor.dim() > 0 and not is_host_key):
                raise Stray(f"{func}: a tensor of shape {tuple(tensor.shape)} is on {tensor.device}")

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        """Add a storage to the bytes alive, unless it is known, and subtract it when it is freed."""
        key = storage._cdata
        if key in self._known_storages:
            return
        size = storage.nbytes()
        self._known_storages.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        """Subtract a storage that was freed."""
        self.live_bytes -= size
        self._known_storages.discard(key)


def _kernel_modules() -> list[Any]:
    """Return the imported modules of the packages that define operators of this project."""
    return [
        module for name, module in sys.modules.items() if name.startswith(("electra_kernels", "electra_dist.model"))
    ]


def _real_bodies() -> dict[str, Callable[..., Any]]:
    """Return the functions behind this project's custom operators by name of the operator.

    The operators' own versions for `meta` compute shapes only. A rehearsal runs what a GPU runs, which launches
    kernels.
    """
    definitions = [
        value
        for module in _kernel_modules()
        for value in vars(module).values()
        if isinstance(value, torch.library.CustomOpDef)
    ]
    return {f"{definition._qualname.replace('::', '.')}.default": definition._init_fn for definition in definitions}


def _is_upload(name: str, inputs: list[torch.Tensor]) -> bool:
    """Return whether an operator, such as "aten._to_copy.default", may copy a tensor from the host to the device."""
    return name == "aten._to_copy.default" and not inputs[0].is_meta


def _does_work(func: Any, inputs: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Return whether the operator `func` launches work on the device: it is neither a view nor an allocation.

    It read the tensors `inputs`, and returned the tensors `made`, which are on the device.
    """
    if func._schema.is_mutable:
        return True  # it changes an argument, so its result is no mere view
    if "empty" in str(func) or func.namespace == "electra":
        return False  # an allocation, or an operator of this project, whose parts are counted
    read_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(tensor.untyped_storage()._cdata not in read_storages for tensor in made)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded dimension counts once."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride()):
        if stride != 0:
            elements *= length
    return elements * tensor.element_size()


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Run what torch's scaled_dot_product_attention picks on a GPU for a mask with dropout: its EFFICIENT kernel.

    On `meta` torch would take the plain operations instead, which hold the probabilities of all heads. FlashAttention
    by `torch.ops.aten._flash_attention_forward` needs no replacement, because it exists for `meta` with its backward
    pass.
    """
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    function = torch.ops.aten._scaled_dot_product_efficient_attention
    output: torch.Tensor = function(query, key, value, bias, True, dropout_p, **options)[0]
    return output


@contextlib.contextmanager
def gpu_branch() -> Iterator[list[Launch]]:
    """Make the fused operations take Triton, and record its launches in the list that is yielded.

    Inside the block, a launch that a GPU would refuse, or that would read wrong memory, raises Stray.
    """
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        """Take the place of `JITFunction.run`: check the arguments and record the launch."""
        launches.append(_checked_launch(kernel, args, grid, options))

    def take_triton(backend: str, device: str, *, in_cuda_library: bool = True) -> str:
        """Take the place of `backend_choice.resolve`."""
        return "triton"

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", record))
        for module in _kernel_modules():
            if hasattr(module, "resolve"):
                stack.enter_context(mock.patch.object(module, "resolve", take_triton))
        stack.enter_context(mock.patch.object(attention.F, "scaled_dot_product_attention", fused_attention))
        yield launches


def _checked_launch(kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> Launch:
    """Return the record of a launch of `kernel`, Triton's JITFunction.

    `grid` is the numbers of programs, or a function of the arguments that returns them. `options` are arguments by
    name, and options of the compiler such as `num_warps`. Raises Stray if a tensor is strided or not on the device, an
    integer has more than 32 bits, an argument is missing, or the grid is empty or too large.
    """
    name = kernel.__name__
    arguments = dict(zip(kernel.arg_names, args))
    arguments |= {key: value for key, value in options.items() if key in kernel.arg_names}
    has_default = {parameter.name for parameter in kernel.params if parameter.has_default}
    missing = [key for key in kernel.arg_names if key not in arguments and key not in has_default]
    if missing:
        raise Stray(f"{name}: no argument {', '.join(missing)}")

    tensors = {}
    words = {}
    num_bytes = 0
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                raise Stray(f"{name}({key}): the tensor is on {value.device}")
            if not value.is_contiguous():
                raise Stray(f"{name}({key}): shape {tuple(value.shape)}, but strides {value.stride()}")
            tensors[key] = tuple(value.shape)
            num_bytes += _size(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            if not -_WORD <= value < _WORD:
                raise Stray(f"{name}({key}): {value} does not fit into 32 bits")
            words[key] = value

    shape = tuple(grid(arguments)) if callable(grid) else tuple(grid)
    if any(not 0 < size <= limit for size, limit in zip(shape, _LARGEST_GRID)):
        raise Stray(f"{name}: grid {shape}")
    return Launch(name, shape, tensors, words, num_bytes)


def gpu_attention(config: Config) -> type[LayerMask]:
    """Return the attention backend that the run would choose on a GPU where FlashAttention passes its trial.

    FlexAttention is taken to fail it, because a rehearsal cannot run the kernels that Inductor writes for it.
    """

    def fault_on_a_gpu(backend: type[LayerMask], config: Config, device: str) -> str:
        """Take the place of `attention_choice.find_fault`, which needs a GPU."""
        if backend.name == "flex":
            return "it is not rehearsed"
        return "it computes in bf16 or fp16" if config.train.precision == "fp32" else ""

    with mock.patch.object(attention_choice, "find_fault", fault_on_a_gpu):
        return BACKENDS[attention_choice.choose_attention(config, "cuda").name]


def build(config: Config) -> Objective:
    """Return the objective of a config on `meta`, in training mode, with the engine's settings as on a GPU.

    Parameters are in the dtype of `train.precision`, as with ZeRO 1 to 3.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.train.precision]

    def towers_on_meta(model: Any, seed: int, objective: Any) -> ElectraTowers:
        """Take the place of `build_towers`, whose initial weights have values."""
        with META:
            return ElectraTowers(model, objective)

    with mock.patch.object(build_objective, "build_towers", towers_on_meta):
        counts = np.ones(config.model.vocab_size, np.int64)
        module = build_objective.build_objective(config.model, config.objective, SPECIAL, config.seed, "auto", counts)
    module = module.to(META, dtype).train()
    module.attention = gpu_attention(config)
    for part in module.modules():
        if hasattr(part, "recompute"):
            part.recompute = config.engine.activation_checkpointing
    return module


def scheduled_values(config: Config, step: int) -> ScheduledValues | None:
    """Return the values of a step, or None without schedules."""
    if not schedules_of(config.objective):
        return None
    return Schedules(config.objective, config.train.num_steps).values(step)


def step_input(
    config: Config, module: Objective, rows: int, step: int = 0, scheduled: ScheduledValues | None = None
) -> StepInput:
    """Return the input of a micro-batch of so many rows on `meta`, as `train/step.py` makes it.

    `scheduled` is the result of `scheduled_values`.
    """
    ids_BS = torch.empty(rows, config.data.seq_len, dtype=torch.int64, device=META)
    host_ids_BS = np.full((rows, config.data.seq_len), SPECIAL.mask)
    host_ids_BS[:, 0] = SPECIAL.cls
    mask_prob = scheduled.mask_prob if scheduled else None
    scale_2 = 1.0 / module.loss_counts(ids_BS, mask_prob).sum(0)
    key = (config.seed, step)
    return module.step_input(ids_BS, host_ids_BS, 0, key, scale_2, scheduled)


def rehearse(
    module: Objective, make_input: Callable[[], StepInput], backward: bool = True, allow_unused: tuple[str, ...] = ()
) -> Figures:
    """Run one micro-batch of the objective `module`, from `build`, as a GPU's host would; return what was counted.

    The operators of `make_input` count, too. Without `backward` nothing records gradients, as in evaluation. Raises
    Stray if a GPU would refuse an operator or a launch, or if a parameter has no gradient, unless its name begins with
    one of `allow_unused`.
    """
    module.zero_grad()
    keyed_random.device_keys.cache_clear()  # the micro-batch is the first of its step
    keyed_random._step_in_row.cache_clear()
    with gpu_branch() as launches, Rehearsal(module, launches) as rehearsal:
        with torch.set_grad_enabled(backward):
            loss = module(make_input()).loss
        if backward:
            loss.backward()
        figures = rehearsal.figures()
    if backward:
        without = [name for name, parameter in module.named_parameters() if parameter.grad is None]
        forgotten = [name for name in without if not name.startswith(allow_unused)]
        if forgotten or (without and not allow_unused):
            raise Stray(f"no gradient for {', '.join(forgotten or without)}")
    module.zero_grad()
    return figures


def bytes_per_row(module: Objective, config: Config, few_rows: int) -> float:
    """Return by how many bytes the peak grows with a row, between `few_rows` and twice as many.

    `few_rows` must be large enough that a row's activations outweigh the gradients that the backward pass makes while
    it frees them.
    """
    few = rehearse(module, lambda: step_input(config, module, few_rows)).peak_bytes
    many = rehearse(module, lambda: step_input(config, module, 2 * few_rows)).peak_bytes
    return (many - few) / few_rows

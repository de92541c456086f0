"""Build the DeepSpeed config and engine, and run optimizer steps. Only this file calls deepspeed.initialize.

Guarantees: the DeepSpeed JSON is derived from Config in one pure function; master weights, moments and the sum over
micro-batches are fp32 at every stage; nothing is compiled at start on a CPU.

How each precision and ZeRO stage runs (tested with DeepSpeed 0.19.8):
  fp32   0: plain optimizer; 1, 2, 3: ZeRO over fp32.
  bf16   0: torch autocast over fp32 parameters, because DeepSpeed's own bf16 path at stage 0 accumulates in bf16;
         1: BF16_Optimizer with fp32 accumulation; 2, 3: ZeRO with bf16 parameters.
  fp16   0: torch autocast over fp32 parameters; 1, 2, 3: ZeRO with fp16 parameters; all with the loss scale of
         `LossScale`. Ranks exchange fp32 on any device.

What differs between devices in bf16 at stages 1 to 3: on a GPU ranks exchange gradients in fp32, so that the sum over
ranks is fp32 as well. On a CPU they do so with `engine.overlap_communication` only. Otherwise DeepSpeed's default
stays there, which rounds gradients to bf16 before the exchange; to change it would change the bits of runs that exist.
In fp32, and at stage 0, both devices exchange fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, torch_autocast
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import set_z3_leaf_modules
from electra_kernels import BackendUnavailable
from electra_kernels.backend_choice import resolve

from electra_dist.collectives import agree
from electra_dist.config import Config, EngineConfig, OptimizerConfig, TrainConfig
from electra_dist.engine.foreach_optimizers import check_muon
from electra_dist.engine.gradient_sums import GradientSums
from electra_dist.engine.optimizer import build_optimizer, choose_implementation, misaligned_parameters
from electra_dist.engine.process_group import local_device
from electra_dist.engine.zero import Bf16Stage1, LossScale, ZeroLayout, layout_of, without_memory_reports
from electra_dist.errors import UserError
from electra_dist.model.encoder import EncoderLayer
from electra_dist.model.modern_encoder import ModernAttention
from electra_dist.objectives.base import Objective, StepInput, StepOutput

_BF16_CAPABILITY = (8, 0)  # lowest compute capability of GPUs that compute in bf16
_CLIP_EPS = 1e-6  # added to a norm before dividing by it, as DeepSpeed and torch do


def deepspeed_config(train: TrainConfig, engine: EngineConfig, clip_norm: float, device_type: str) -> dict[str, Any]:
    """Return the DeepSpeed config (its JSON as a dict) of a run; with a `clip_norm` of 0 DeepSpeed does not clip.

    DeepSpeed derives the number of gradient accumulation steps from the two batch sizes and the number of ranks.
    """
    stage = engine.zero_stage
    is_bf16 = train.precision == "bf16"
    is_fp16 = train.precision == "fp16"
    config: dict[str, Any] = {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_clipping": clip_norm,
        # ZeRO refuses optimizers of other packages unless these two keys allow them.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,  # DeepSpeed's own progress lines are never printed
        # DeepSpeed's throughput timer waits for the GPU twice in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": stage},
    }
    if is_bf16 and stage == 0:
        # DeepSpeed's own bf16 path would accumulate gradients in bf16 at stage 0.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif is_bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if not engine.offload_optimizer:
            # The engine reads the norm and refuses an update that is not finite. DeepSpeed's check would read every
            # gradient again and make the host wait for the device. Only stage 2 reads the key.
            config["bf16"]["check_grad_overflow"] = False
        if device_type == "cuda" or engine.overlap_communication:
            config["communication_data_type"] = "fp32"
            # Without this key a gradient is first added to a zeroed bf16 buffer. The key saves the buffer and two
            # operations per parameter and micro-batch, and the sums are the same bit for bit. Only stage 1 reads it.
            config["bf16"]["immediate_grad_update"] = True
    elif is_fp16 and stage == 0:
        # DeepSpeed's own fp16 path would accumulate gradients in fp16 at stage 0, too.
        config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    elif is_fp16:
        config["fp16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"  # a sum over ranks could overflow fp16
    if engine.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return config


def check_precision(precision: str) -> None:
    """Raise UserError if this process cannot compute in `precision` on its GPU or, if it has none, on the CPU."""
    has_gpu = torch.cuda.is_available()
    device_name = torch.cuda.get_device_name() if has_gpu else "this CPU"
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(f"train.precision fp16 cannot run on {device_name}; set train.precision: bf16 or fp32")
    # torch would compute bf16 on an older GPU by slow emulation.
    if precision == "bf16" and has_gpu and torch.cuda.get_device_capability() < _BF16_CAPABILITY:
        raise UserError(f"train.precision bf16 cannot run on {device_name}; set train.precision: fp16 or fp32")


def check_machine(config: Config) -> None:
    """Raise UserError if this machine lacks the precision, the kernels, or NVIDIA's apex that the config demands."""
    check_precision(config.train.precision)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    # The engine checks every implementation when it is built, after the run folder was written. This check needs no
    # compilation, so it can come before.
    if config.optimizer.implementation == "apex":
        choose_implementation(config.optimizer, device_type, config.engine.offload_optimizer)
    try:
        resolve(config.kernels.backend, device_type)
    except BackendUnavailable as error:
        raise UserError(str(error)) from None


class StepNumbers:
    """Numbers of a step, such as losses and counts, that are still on the device, as 1-D float64 or int64 tensors.

    One copy brings all of them and the gradient norm to the host, with their exact bits. So the host waits for the
    device only once in a step, and before the update. The tensors must not change until they are read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self.values: list[list[Any]] = []  # the elements of each tensor as Python numbers, after `read_with`

    def read_with(self, norm: torch.Tensor) -> float:
        """Copy the step's numbers and its gradient norm to the host with a single copy; return the norm."""
        tensors = [norm.double().reshape(1), *self._tensors]
        # The bits of a float64 travel as an int64, so that nothing is rounded.
        words = torch.cat([tensor.detach().view(torch.int64) for tensor in tensors])
        host_words = np.array(words.tolist(), np.int64)
        ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
        norm_on_host, *self.values = (
            part.view(np.float64 if tensor.is_floating_point() else np.int64).tolist()
            for part, tensor in zip(np.split(host_words, ends), tensors)
        )
        return float(norm_on_host[0])


class TowerClipping:
    """Separate clipping of generator and discriminator: after a step's last backward, call `measure`, then `apply`.

    With `optimizer.generator`, the gradients of the generator's parameter groups are scaled by min(1, clip / (norm +
    1e-6)) with the generator's norm and bound, all others by the discriminator's. DeepSpeed would clip by one norm
    over all parameters, so its own clipping is off. All ranks use the same factors, and the host does not wait for the
    device. Sums of squares are float64, so that the factor does not depend on how ZeRO cuts the gradients, except for
    the rounding of a float64 sum.
    """

    def __init__(self, discriminator_clip: float, generator_clip: float, device: torch.device) -> None:
        self._clip_2 = torch.tensor([discriminator_clip, generator_clip], dtype=torch.float64, device=device)
        self._factor_2 = torch.ones(2, device=device)

    def measure(self, layout: ZeroLayout, gradient_scale: float = 1.0) -> None:
        """Compute both towers' clipping factors from the gradients of a step. Collective at ZeRO stages 1 to 3.

        `gradient_scale` is the factor, such as fp16's loss scale, by which the gradients are too large.
        """
        square_2 = torch.zeros_like(self._clip_2)
        for group, gradients in layout.gradients():
            tower = int(group["is_generators"])
            for gradient in gradients:
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
                square_2[tower] += norm.to(square_2.device) ** 2
        if layout.is_partitioned:
            dist.all_reduce(square_2)
        norm_2 = square_2.sqrt() / gradient_scale
        self._factor_2 = (self._clip_2 / (norm_2 + _CLIP_EPS)).clamp(max=1.0).float()

    def apply(self, groups: list[dict[str, Any]]) -> None:
        """Clip in place: multiply the gradients of each parameter group by the factor of its tower."""
        for group in groups:
            factor = self._factor_2[int(group["is_generators"])]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))


class Engine:
    """DeepSpeed engine around an objective; runs optimizer steps.

    One optimizer step is `num_micro_batches` pairs of calls, `forward` and then `backward`, and `step` after them.

    The caller of `step` may refuse the update, for example after a loss spike: it passes a function `accept`, which
    the engine asks once the gradients are reduced and their norm is known. A refused step changes neither weights nor
    moments, at any ZeRO stage.

    `notes` has lines for the run's log, such as which optimizer was chosen. `layout` knows where DeepSpeed's optimizer
    keeps master weights and gradients. `loss_scale` is None unless in fp16.
    """

    def __init__(
        self, module: Objective, train: TrainConfig, engine: EngineConfig, optimizer_config: OptimizerConfig
    ) -> None:
        """Move `module` to this rank's device; cast and partition it for precision and ZeRO stage. Collective."""
        self.device = local_device()
        self.notes: list[str] = []
        implementation = self._choose_implementation(optimizer_config, engine)
        optimizer, self.optimizer_name = build_optimizer(
            module, optimizer_config, self.device.type, implementation=implementation
        )
        # DeepSpeed will call `_update_if_allowed` where it would have called the optimizer.
        self._base_optimizer = optimizer
        self._update = optimizer.step
        optimizer.step = self._update_if_allowed  # type: ignore[method-assign, assignment]
        self._accept: Callable[[], bool] = lambda: True  # of the current step; decides whether to update
        self._applied: bool | None = None  # whether the current step updates; None until it is decided
        self._norm = math.nan  # of the gradients of the current step
        self._numbers = StepNumbers()  # of the current step; the host reads them together with the norm
        self.zero_stage = engine.zero_stage
        clip_norm = optimizer_config.clip_norm
        self._tower_clipping: TowerClipping | None = None  # None: DeepSpeed clips by one norm
        if optimizer_config.generator is not None:
            generator_clip_norm = optimizer_config.for_generator.clip_norm
            self._tower_clipping = TowerClipping(clip_norm, generator_clip_norm, self.device)
            clip_norm = 0.0
        if self.zero_stage == 3:
            # A layer reads its parameters directly, not through the modules that hold them, so DeepSpeed has to gather
            # all of them when the layer begins.
            set_z3_leaf_modules(module, [EncoderLayer, ModernAttention], raise_if_not_found=False)
        # A global variable of DeepSpeed's says that an engine of this process uses autocast. Left by an earlier engine
        # in fp16 at stage 0, it would make this one multiply its loss by 65,536.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        with without_memory_reports():
            self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=deepspeed_config(train, engine, clip_norm, self.device.type),
                dist_init_required=False,
            )
        self.module: Objective = self.deepspeed.module
        misaligned = misaligned_parameters(module) if self.device.type == "cuda" else []
        if misaligned:
            self.notes.append(
                f"{len(misaligned)} parameters, such as {misaligned[0]}, do not begin at a multiple of 16 bytes, so "
                f"their kernels are slow or fail; give the parameters of the objective multiples of 8 elements"
            )
        self.layout = layout_of(self.optimizer)
        if optimizer_config.name == "muon":
            check_muon(self.optimizer)
        self.num_micro_batches: int = self.deepspeed.gradient_accumulation_steps()
        self._overlaps = engine.overlap_communication and dist.get_world_size() > 1
        if isinstance(self.layout, Bf16Stage1):
            self._take_over_gradient_sums()
        self.loss_scale: LossScale | None = None
        if train.precision == "fp16":
            self.loss_scale = self._install_loss_scale()
        # Not in fp16, because DeepSpeed reads the norm to detect an overflow of the scaled gradients, and not with
        # offloading, because the norm is computed on the host.
        self._keeps_norm_on_device = self.zero_stage in (1, 2) and self.loss_scale is None and not self.layout.offloads

    def _choose_implementation(self, config: OptimizerConfig, engine: EngineConfig) -> str:
        """Return which implementation of the optimizer all ranks use, and note why. Collective on GPUs."""
        updates_on_host = engine.offload_optimizer and engine.zero_stage > 0
        choice = choose_implementation(config, self.device.type, updates_on_host)
        if self.device.type == "cuda":
            choice = agree(choice, fallback="foreach")
        if choice.reason:
            self.notes.append(f"optimizer: {choice.name}, because {choice.reason}")
        return choice.name

    def _take_over_gradient_sums(self) -> None:
        """Add up gradients by `GradientSums`, and switch off DeepSpeed's exchange of them where it is not needed."""
        is_last_micro_batch = self.deepspeed.is_gradient_accumulation_boundary
        # On a CPU, runs that exist keep the bits of gradients that are rounded to bf16.
        on_gpu = self.device.type == "cuda"
        GradientSums(self.optimizer, is_last_micro_batch, overlaps=self._overlaps, takes_products=on_gpu)
        # On a single rank BF16_Optimizer would only copy all fp32 sums to a new buffer and back. An exchange in bf16
        # rounds the sums, so it is kept. At the other stages the function that exchanges gradients also updates the
        # optimizer's state.
        is_copy = dist.get_world_size() == 1 and self.deepspeed.communication_data_type == torch.float32
        if self._overlaps or is_copy:
            self.deepspeed.enable_backward_allreduce = False

    def _install_loss_scale(self) -> LossScale:
        loss_scale = LossScale()
        if self.zero_stage == 0:
            self.deepspeed.torch_autocast_z0_gradscaler = None  # `backward` and `step` of this class scale instead
        else:
            self.optimizer.loss_scaler = loss_scale
        return loss_scale

    def forward(self, given: StepInput) -> StepOutput:
        """Run the objective on one micro-batch. Collective at ZeRO stage 3, which gathers parameters."""
        return self.deepspeed(given)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss to those of the step, whose loss is the sum over micro-batches."""
        # DeepSpeed divides gradients by both numbers, so that the result is the plain sum.
        factor: float = dist.get_world_size() * self.num_micro_batches
        if self.loss_scale is not None and self.zero_stage == 0:
            factor *= self.loss_scale.cur_scale  # at the other stages DeepSpeed multiplies by it
        self.deepspeed.backward(loss * factor)
        is_last = self.deepspeed.is_gradient_accumulation_boundary()
        if not is_last:
            self.deepspeed.step()  # counts the micro-batch and updates nothing

    def step(
        self,
        learning_rate: float,
        accept: Callable[[], bool] = lambda: True,
        generator_learning_rate: float | None = None,
        numbers: StepNumbers | None = None,
    ) -> tuple[float, bool]:
        """Clip the gradients, update the weights unless `accept` refuses, and clear the gradients. Collective.

        `accept` is called once, if the gradients are finite, and must return the same on all ranks. The generator's
        parameter groups use `generator_learning_rate`, if given. `numbers` of the step are copied to the host together
        with the norm, before `accept` is called, so that the host waits for the device only once.

        Returns:
            The global gradient norm before clipping (NaN if it is not finite), and whether the update was made.
        """
        for group in self.optimizer.param_groups:
            has_own_rate = generator_learning_rate is not None and group["is_generators"]
            group_learning_rate = generator_learning_rate if has_own_rate else learning_rate
            group["lr"] = group_learning_rate * group.get("lr_scale", 1.0)
        self._accept = accept
        self._applied = None
        self._numbers = StepNumbers() if numbers is None else numbers
        # At stage 0 DeepSpeed clips the gradients in place and does not report the norm, so it is computed here.
        if self.zero_stage == 0:
            self._norm = self._numbers.read_with(self._unscaled_grad_norm())
        if self._tower_clipping is not None:
            gradient_scale = 1.0
            if self.loss_scale is not None and self.zero_stage > 0:
                gradient_scale = self.loss_scale.cur_scale
            self._tower_clipping.measure(self.layout, gradient_scale)
        norm_context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._keeps_norm_on_device:
            # The fused norm rounds differently. On a CPU without overlap, runs that exist resume with the other one.
            fused = self._overlaps or self.device.type == "cuda"
            norm_context = _norms_stay_on_device(self.optimizer, fused=fused)
        with norm_context:
            self.deepspeed.step()
        if self.zero_stage > 0 and self._applied is None:
            norm = self.deepspeed.get_global_grad_norm()  # a tensor or a number
            self._norm = self._numbers.read_with(torch.as_tensor(norm, device=self.device))
            self.layout.clean_up_skipped_step()
        # Of gradients that are not finite, DeepSpeed reports the norm inf, NaN or -1.
        grad_norm = self._norm if 0 <= self._norm < math.inf else math.nan
        # `_applied` is still None if DeepSpeed skipped the update itself, because the gradients are not finite.
        was_updated = bool(self._applied)
        if was_updated and self.loss_scale is not None:
            self.loss_scale.count_update()
        return grad_norm, was_updated

    def _update_if_allowed(self) -> None:
        """Update the weights if the caller of `step` accepts; DeepSpeed calls this as the optimizer's `step`."""
        # DeepSpeed calls this once in a step, or for each group; `accept` is asked once, and its answer holds for all.
        if self._applied is None:
            # At stage 0 `step` has computed the norm. At the other stages it is read here, before the update: reading
            # it afterwards would wait until a GPU has finished the update.
            if self.zero_stage > 0:
                self._norm = self._numbers.read_with(self.optimizer._global_grad_norm)
            self._applied = 0 <= self._norm < math.inf and self._accept()
        if not self._applied:
            return
        if self._tower_clipping is not None:
            self._tower_clipping.apply(self._base_optimizer.param_groups)
        self._update()

    def _unscaled_grad_norm(self) -> torch.Tensor:
        """Divide the gradients of stage 0 by the loss scale, if there is one, and return their norm."""
        # After the last `backward` of a step every rank has the whole, reduced gradients.
        parameters = self.deepspeed.module.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.cur_scale)
        return torch.nn.utils.get_total_norm(gradients)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on (training mode) or off (evaluation mode), until the next call."""
        self.deepspeed.train(mode)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers; the engine cannot be used afterwards."""
        self.deepspeed.destroy()


@contextlib.contextmanager
def _norms_stay_on_device(optimizer: Any, *, fused: bool) -> Iterator[None]:
    """Let DeepSpeed compute the gradient norm and clip at ZeRO stages 1 and 2 without making the host wait.

    DeepSpeed's own functions copy the norm to the host twice: to skip a step whose gradients are not finite, and to
    decide whether to clip. This context replaces these functions: DeepSpeed skips no step, and always multiplies by a
    clipping factor, which is 1 within the limit. The engine reads the norm before the update, and decides then.
    `fused` computes all norms of a BF16_Optimizer with one operation, which on a GPU rounds differently.
    """

    def global_norm(input_tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        if fused:
            norms = list(torch._foreach_norm(list(input_tensors)))
        else:
            norms = [torch.linalg.vector_norm(tensor) for tensor in input_tensors]
        return torch.stack(norms).pow(2.0).sum().pow(0.5)

    def clip(max_norm: float, global_norm: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
        factor = (max_norm / (global_norm + eps)).clamp(max=1.0)
        # Other ranks' partitions need no clipping, because this rank does not read them afterwards.
        for partition in optimizer.fp32_groups_gradient_flat_partition:
            partition.mul_(factor)
        return global_norm

    replacements: dict[Any, dict[str, Callable[..., Any]]] = {
        bf16_optimizer: {
            "get_global_norm_of_tensors": global_norm,
            "clip_tensors_by_global_norm": clip,
            "is_invalid_grad_norm": lambda norm: False,
        },
        stage_1_and_2: {
            "is_invalid_grad_norm": lambda norm: False,
            "mask_nan_or_inf_with_val_inplace": lambda *_, **__: None,  # a norm that is not finite stays so
        },
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

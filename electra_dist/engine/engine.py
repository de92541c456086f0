"""Build the DeepSpeed config and engine, and run optimizer steps. Only this file calls deepspeed.initialize.

Guarantees: the DeepSpeed JSON is derived from Config in one pure function; master weights, moments and the sum over
micro-batches are fp32 at every stage; nothing is compiled at start on a CPU.

How each precision and ZeRO stage runs (tested with DeepSpeed 0.19.8):
  fp32   0: plain optimizer; 1, 2, 3: ZeRO over fp32.
  bf16   0: torch autocast over fp32 parameters, because DeepSpeed's own bf16 path at stage 0 accumulates in bf16;
         1: BF16_Optimizer with fp32 accumulation; 2, 3: ZeRO with bf16 parameters.
  fp16   0: torch autocast over fp32 parameters; 1, 2, 3: ZeRO with fp16 parameters; all with the loss scale of
         loss_scale.py. Ranks exchange fp32 on any device.

What differs between devices in bf16 at stages 1 to 3: on a GPU ranks exchange gradients in fp32, so that the sum over
ranks is fp32 as well. On a CPU they do so with `engine.overlap_communication` only. Otherwise DeepSpeed's default
stays there, which rounds gradients to bf16 before the exchange; to change it would change the bits of runs that exist.
In fp32, and at stage 0, both devices exchange fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import set_z3_leaf_modules

from electra_dist.collectives import gather
from electra_dist.config import EngineConfig, OptimizerConfig, TrainConfig, divisors
from electra_dist.engine.gradients.gradient_sums import GradientSums, norms_stay_on_device
from electra_dist.engine.gradients.step_numbers import StepNumbers
from electra_dist.engine.loss_scale import LossScale
from electra_dist.engine.optimizer import Implementation, build_optimizer, choose_implementation
from electra_dist.engine.optimizers.muon import adopt_partitions, check_update
from electra_dist.engine.process_group import local_device
from electra_dist.engine.tower_clipping import TowerClipping
from electra_dist.errors import UserError
from electra_dist.model.attention import AttentionChoice
from electra_dist.model.encoder import EncoderLayer
from electra_dist.objectives.base import Objective, StepInput, StepOutput

# A longer list of rank counts in an error message is cut to its first and its last ones.
_MOST_RANKS_SHOWN = 12
_FIRST_RANKS_SHOWN = 6
_LAST_RANKS_SHOWN = 3

_BF16_CAPABILITY = (8, 0)  # lowest compute capability of GPUs that compute in bf16


def deepspeed_config(train: TrainConfig, engine: EngineConfig, clip_norm: float, device_type: str) -> dict[str, Any]:
    """Return the DeepSpeed config (its JSON as a dict) of a run.

    It sets the global batch and the micro-batch, from which DeepSpeed derives the number of gradient accumulation
    steps at the given number of ranks. Micro-batches are summed in fp32 at every ZeRO stage.

    Args:
        train: gives the global batch, the micro-batch and the precision.
        engine: gives the ZeRO stage and the offloading of the optimizer.
        clip_norm: bound of the global gradient norm; 0 if DeepSpeed is not to clip.
        device_type: "cuda" or "cpu". On "cuda", and with `engine.overlap_communication` on any device, the ranks
            exchange the gradients of bf16 parameters in fp32 instead of bf16, and at stage 1 each gradient is added to
            its fp32 sum and freed during the backward pass. Gradients of fp16 parameters are exchanged in fp32 on any
            device.
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


def check_world_size(train: TrainConfig, world_size: int) -> None:
    """Raise unless every rank can process the same number of rows of the global batch in each step.

    Args:
        train: gives the global batch, in rows.
        world_size: number of ranks of the run.

    Raises:
        UserError: `global_batch` is not a multiple of `world_size`.
    """
    can_share_evenly = train.fitting_micro_batch(world_size) > 0
    if can_share_evenly:
        return
    possible_ranks = [str(num_ranks) for num_ranks in divisors(train.global_batch)]
    if len(possible_ranks) > _MOST_RANKS_SHOWN:
        possible_ranks = [*possible_ranks[:_FIRST_RANKS_SHOWN], "...", *possible_ranks[-_LAST_RANKS_SHOWN:]]
    raise UserError(
        f"train.global_batch {train.global_batch} is not a multiple of the {world_size} ranks; use "
        f"{', '.join(possible_ranks)} ranks, or change train.global_batch"
    )


def check_precision(precision: str) -> None:
    """Raise unless this process can compute in a precision, on its current GPU or, without a GPU, on the CPU.

    Args:
        precision: "bf16", "fp16" or "fp32", as in `train.precision`.

    Raises:
        UserError: fp16 on a device for which DeepSpeed refuses it, or bf16 on a GPU without bf16; names what to set.
    """
    has_gpu = torch.cuda.is_available()
    device_name = torch.cuda.get_device_name() if has_gpu else "this CPU"
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(f"train.precision fp16 cannot run on {device_name}; set train.precision: bf16 or fp32")
    # torch would compute bf16 on an older GPU by slow emulation.
    if precision == "bf16" and has_gpu and torch.cuda.get_device_capability() < _BF16_CAPABILITY:
        raise UserError(f"train.precision bf16 cannot run on {device_name}; set train.precision: fp16 or fp32")


class Engine:
    """DeepSpeed engine around an objective (the module that computes the pretraining loss); runs optimizer steps.

    One optimizer step is `num_micro_batches` pairs of calls, `forward` and then `backward`. Call `step_micro_batch`
    after each pair except the last one, and `step` after the last one.

    The attribute `notes` holds lines for the run's log about choices that were made while it was built. `loss_scale`
    is the loss scale of a run in fp16, and None in other precisions.

    The caller of `step` may refuse the update, for example after a loss spike. DeepSpeed calls the optimizer after it
    has reduced the gradients and computed their norm; the engine replaces that call by one that first asks the
    function `accept` of the caller. A refused step changes neither weights nor moments, at any ZeRO stage.
    """

    def __init__(
        self, module: Objective, train: TrainConfig, engine: EngineConfig, optimizer_config: OptimizerConfig
    ) -> None:
        """Wrap a module and its new optimizer with DeepSpeed. Collective.

        The process group must exist (`init_distributed`). The module is moved to the device of this rank; at ZeRO
        stages 1 to 3 in bf16 or fp16 its parameters get that dtype, and at stage 3 they are partitioned.

        Args:
            module: the objective, with its initial weights.
            train: gives the batch sizes and the precision.
            engine: gives the ZeRO stage and the offloading of the optimizer.
            optimizer_config: gives the optimizer and the bound of the gradient norm.

        Raises:
            UserError: the config demands an implementation of the optimizer that this machine does not have.
            RuntimeError: `optimizer.name` is muon, and the optimizer's update is not orthogonal.
        """
        self.device = local_device()
        self.notes: list[str] = []
        implementation = self._agree_on_implementation(optimizer_config, engine)
        optimizer, self.optimizer_name = build_optimizer(
            module, optimizer_config, self.device.type, implementation=implementation.name
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
            set_z3_leaf_modules(module, [EncoderLayer], raise_if_not_found=False)
        with _without_memory_reports():
            self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=deepspeed_config(train, engine, clip_norm, self.device.type),
                dist_init_required=False,
            )
        if optimizer_config.name == "muon":
            adopt_partitions(self.optimizer, self.device)
            check_update(self.optimizer)
        self.num_micro_batches: int = self.deepspeed.gradient_accumulation_steps()
        if self._reduces_for_nothing():
            self.deepspeed.enable_backward_allreduce = False
        self._overlaps = engine.overlap_communication and dist.get_world_size() > 1
        if isinstance(self.optimizer, bf16_optimizer.BF16_Optimizer):
            is_last_micro_batch = self.deepspeed.is_gradient_accumulation_boundary
            GradientSums(self.optimizer, is_last_micro_batch, overlaps=self._overlaps)
            if self._overlaps:
                self.deepspeed.enable_backward_allreduce = False
        self.loss_scale: LossScale | None = None
        if train.precision == "fp16":
            self.loss_scale = self._install_loss_scale()

    def _agree_on_implementation(self, config: OptimizerConfig, engine: EngineConfig) -> Implementation:
        """Choose the implementation of the optimizer; on GPUs all ranks agree on one. Collective on GPUs.

        If the ranks would choose differently, for example because one machine cannot compile DeepSpeed's optimizer,
        all of them take foreach, which runs everywhere; different implementations would round differently. A choice
        that is not the fastest implementation of the configured optimizer is added to `notes`, with its reason.

        Args:
            config: gives the optimizer and its implementation.
            engine: gives the ZeRO stage and whether the optimizer's state is in host memory.

        Raises:
            UserError: the config demands an implementation that this machine does not have.
        """
        updates_on_host = engine.offload_optimizer and engine.zero_stage > 0
        implementation = choose_implementation(config, self.device.type, updates_on_host)
        if self.device.type == "cuda":
            choices = [Implementation(*choice) for choice in gather(list(implementation))]
            names = {choice.name for choice in choices}
            if len(names) > 1:
                reasons = [choice.reason for choice in choices if choice.reason]
                reason = reasons[0] if reasons else "the machines of the ranks can run different ones"
                implementation = Implementation("foreach", reason)
        if implementation.reason:
            self.notes.append(f"optimizer: {implementation.name}, because {implementation.reason}")
        return implementation

    def _reduces_for_nothing(self) -> bool:
        """Return whether DeepSpeed's exchange of gradients can be left out, because the run has a single rank.

        That is so for BF16_Optimizer, if the exchange has the dtype of its fp32 sums: it then only copies all sums to
        a new buffer and back. An exchange in bf16 would round the sums, so it is kept. At the other stages the
        function that exchanges gradients also keeps state of the optimizer up to date, so it must be called.
        """
        exchanges_fp32 = self.deepspeed.communication_data_type == torch.float32
        is_bf16_stage_1 = isinstance(self.optimizer, bf16_optimizer.BF16_Optimizer)
        return dist.get_world_size() == 1 and is_bf16_stage_1 and exchanges_fp32

    def _install_loss_scale(self) -> LossScale:
        """Return a new loss scale, and let DeepSpeed use it in place of its own."""
        loss_scale = LossScale()
        if self.zero_stage == 0:
            self.deepspeed.torch_autocast_z0_gradscaler = None  # `backward` and `step` of this class scale instead
        else:
            self.optimizer.loss_scaler = loss_scale
        return loss_scale

    @property
    def attention(self) -> AttentionChoice:
        """Return the attention backend of the module; with "flash" every input of `forward` needs `bounds`."""
        module: Objective = self.deepspeed.module
        return module.attention

    def forward(self, given: StepInput) -> StepOutput:
        """Return the objective's output for one micro-batch, computed through DeepSpeed's hooks.

        DeepSpeed calls `Objective.forward`, which calls `compute_loss` of the objective. At ZeRO stage 3 it is
        collective, because it gathers the parameters.

        Args:
            given: token ids of one micro-batch on `device`, and two factors that turn the objective's loss sums into
                means over the global batch.
        """
        if self.loss_scale is not None:
            given = dataclasses.replace(given, gradient_scale=dist.get_world_size() * self.loss_scale.cur_scale)
        return self.deepspeed(given)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of one micro-batch to the gradient sums of the step.

        DeepSpeed divides gradients by the number of ranks and by the number of micro-batches. The loss is first
        multiplied by both numbers, so that the result is the plain sum over all of them.

        Args:
            loss: scalar that is already divided by a count over the global batch (`Objective` does that), so that the
                losses of all micro-batches and ranks add up to the loss of the step.
        """
        factor: float = dist.get_world_size() * self.num_micro_batches
        if self.loss_scale is not None and self.zero_stage == 0:
            factor *= self.loss_scale.cur_scale  # at the other stages DeepSpeed multiplies by it
        self.deepspeed.backward(loss * factor)

    def step_micro_batch(self) -> None:
        """End a micro-batch that is not the last one of its step: DeepSpeed counts it and updates nothing."""
        self.deepspeed.step()

    def step(
        self,
        learning_rate: float,
        accept: Callable[[], bool] = lambda: True,
        generator_learning_rate: float | None = None,
        numbers: StepNumbers | None = None,
    ) -> tuple[float, bool]:
        """Clip the gradients, update the weights unless the update is refused, and clear the gradients. Collective.

        Args:
            learning_rate: learning rate of this update; in a parameter group with a key `lr_scale` it is multiplied by
                that.
            accept: called once, after the gradients were reduced and found finite; returns whether to update. It must
                return the same value on all ranks. It is not called if the gradients are not finite.
            generator_learning_rate: takes the place of `learning_rate` in the generator's parameter groups; None if
                it has no learning rate of its own.
            numbers: other numbers of the step, such as its losses, which are copied to the host together with the
                norm before `accept` is called, so that the host waits for the device only once; None if there are
                none.

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
            self._unscale_unpartitioned_gradients()
            self._norm = self._numbers.read_with(self._unpartitioned_grad_norm())
        if self._tower_clipping is not None:
            gradient_scale = 1.0
            if self.loss_scale is not None and self.zero_stage > 0:
                gradient_scale = self.loss_scale.cur_scale
            self._tower_clipping.measure(self.optimizer, gradient_scale)
        with self._norm_on_device():
            self.deepspeed.step()
        if self.zero_stage > 0 and self._applied is None:
            self._norm = float(self.deepspeed.get_global_grad_norm())
            self._clean_up_skipped_step()
        grad_norm = self._norm if _is_finite_norm(self._norm) else math.nan
        # `_applied` is still None if DeepSpeed skipped the update itself, because the gradients are not finite.
        was_updated = bool(self._applied)
        if was_updated and self.loss_scale is not None:
            self.loss_scale.count_update()
        return grad_norm, was_updated

    def _update_if_allowed(self) -> None:
        """Call the optimizer's own `step` if the gradients are finite and the caller of `step` accepts the update.

        DeepSpeed calls this method in place of `optimizer.step`, once per step or once per parameter group. The
        function `accept` of the caller is called only the first time in a step; its answer also holds for the other
        groups.
        """
        if self._applied is None:
            # At stage 0 `step` has computed the norm. At the other stages it is read here, before the update: reading
            # it afterwards would wait until a GPU has finished the update.
            if self.zero_stage > 0:
                self._norm = self._numbers.read_with(self.optimizer._global_grad_norm)
            self._applied = _is_finite_norm(self._norm) and self._accept()
        if not self._applied:
            return
        if self._tower_clipping is not None:
            self._tower_clipping.apply(self._base_optimizer.param_groups)
        self._update()

    def _norm_on_device(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which DeepSpeed's step computes the norm without the host waiting for it.

        In three cases it changes nothing: in fp16, because DeepSpeed reads the norm to detect an overflow of the
        scaled gradients; with offloading, because the norm is computed on the host; and at ZeRO stages 0 and 3.
        """
        is_offloading = getattr(self.optimizer, "cpu_offload", False)
        if self.zero_stage not in (1, 2) or self.loss_scale is not None or is_offloading:
            return contextlib.nullcontext()
        return norms_stay_on_device(self.optimizer, fused=self._overlaps)

    def _clean_up_skipped_step(self) -> None:
        """Correct the state that DeepSpeed 0.19.8 leaves when it skips a step with non-finite gradients. Collective.

        At ZeRO stages 1 and 2 with `engine.offload_optimizer` DeepSpeed keeps the gradients, and would add those of
        the next step to them; they are dropped. At stage 3 it leaves its "persistent" parameters partitioned, small
        ones that are otherwise whole on every rank; they are gathered again. Without that, the next step fails if
        DeepSpeed has recorded the order of parameters while these were whole, as after a restart.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
        if isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3) and optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _unscale_unpartitioned_gradients(self) -> None:
        """Divide the gradients of ZeRO stage 0 by the loss scale, in place; without a loss scale do nothing."""
        if self.loss_scale is None:
            return
        parameters = self.deepspeed.module.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.loss_scale.cur_scale)

    def _unpartitioned_grad_norm(self) -> torch.Tensor:
        """Return the global gradient norm at ZeRO stage 0, a scalar tensor on the device.

        DeepSpeed clips at stage 0 without reporting the norm, so it is computed before. After the last `backward` of a
        step every rank has the whole, reduced gradients, so no communication is needed.
        """
        parameters = self.deepspeed.module.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def train(self, mode: bool = True) -> None:
        """Switch the module to training mode, with dropout, or to evaluation mode, without it.

        Args:
            mode: True for training, False for evaluation. The mode stays until the next call.
        """
        self.deepspeed.train(mode)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers; the engine cannot be used afterwards."""
        self.deepspeed.destroy()


def _is_finite_norm(norm: float) -> bool:
    """Return whether a gradient norm that DeepSpeed reports means that all gradients are finite.

    For gradients that are not finite DeepSpeed reports inf, NaN or -1.
    """
    return math.isfinite(norm) and norm >= 0


@contextlib.contextmanager
def _without_memory_reports() -> Iterator[None]:
    """Silence the lines about memory that DeepSpeed prints while it builds its optimizers.

    The function that prints them also collects Python's garbage and resets the allocator's peak; neither is needed.
    DeepSpeed has no setting for it, so its name is replaced in the modules that call it, until the block ends.
    """
    modules = (bf16_optimizer, stage_1_and_2, stage3)
    originals = [module.see_memory_usage for module in modules]
    for module in modules:
        module.see_memory_usage = lambda *_, **__: None
    try:
        yield
    finally:
        for module, original in zip(modules, originals):
            module.see_memory_usage = original

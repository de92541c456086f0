"""Build the optimizer: AdamW as the ELECTRA paper used it, or LAMB, or Muon.

AdamW has no bias correction, a decoupled decay times lr, and no decay on LayerNorm and bias. Three implementations
have this one update rule: FusedAdam of NVIDIA's apex, FusedAdam of DeepSpeed (compiled at its first use on a GPU, with
nvcc and the CUDA headers), and `ForeachAdamW` of `foreach_optimizers.py`, which states the rule and needs no compiler.
A GPU takes the first that runs. CPUs run the last one, and so does `engine.offload_optimizer`, because DeepSpeed then
passes tensors in host memory.

LAMB is `ForeachLamb` or FusedLAMB of apex, Muon is `ForeachMuon`. Both run at ZeRO stage 0 only: at the other stages
an optimizer gets flat pieces of many parameters, and apex would silently take the norm of a piece for that of a
parameter.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import nn

from electra_dist.collectives import Candidate, Choice, first_that_works
from electra_dist.config import OptimizerConfig
from electra_dist.engine.foreach_optimizers import ForeachAdamW, ForeachLamb, ForeachMuon
from electra_dist.errors import UserError
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import Objective
from electra_dist.objectives.rtd import TwoStageDetection

# Not the CPU, whose kernels take any address: another order would change the last bit of gradient norms, and with it
# the runs that exist.
_DEVICES_THAT_NEED_ALIGNMENT = ("cuda",)


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    generator: OptimizerConfig | None = None,
    *,
    use_muon: bool = False,
    aligned: bool = False,
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: LayerNorm parameters and biases are not decayed, all others are.

    In two-stage training, or if `generator` gives it other optimizer settings, the generator has groups of its own,
    with `is_generators` True. With `use_muon`, the matrices of the layers have groups of their own, with the key
    `num_matrices` that `ForeachMuon` reads.

    With `aligned`, parameters whose number of elements is no multiple of 8 are last in their group, the largest first:
    DeepSpeed lays a group's parameters one after another, and GPU kernels need addresses that are multiples of 16
    bytes.
    """
    layer_norms = [submodule for submodule in module.modules() if isinstance(submodule, nn.LayerNorm)]
    layer_norm_ids = {id(parameter) for norm in layer_norms for parameter in norm.parameters(recurse=False)}
    towers: ElectraTowers | None = None  # needed only where the generator has groups of its own
    if generator is not None or isinstance(module, TwoStageDetection):
        assert isinstance(module, Objective)
        towers = module.towers

    parameters_of_kind: dict[_Kind, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        is_bias = name == "bias" or name.endswith(".bias")
        is_undecayed = is_bias or id(parameter) in layer_norm_ids
        in_generator = towers is not None and towers.is_generators(name.removeprefix("towers."))
        num_matrices = _num_matrices(name, parameter) if use_muon else 0
        parameters_of_kind.setdefault(_Kind(in_generator, is_undecayed, num_matrices), []).append(parameter)

    groups = []
    for kind, parameters in sorted(parameters_of_kind.items()):
        settings: dict[str, Any] = {"weight_decay": weight_decay}
        if kind.in_generator and generator is not None:
            settings = {"weight_decay": generator.weight_decay, "betas": (generator.beta1, generator.beta2)}
        if kind.is_undecayed:
            settings["weight_decay"] = 0.0
        if kind.num_matrices:
            settings["num_matrices"] = kind.num_matrices
        in_order = sorted(parameters, key=_place_in_memory) if aligned else parameters
        groups.append({"params": in_order, "is_generators": kind.in_generator, **settings})
    return groups


class _Kind(NamedTuple):
    """What the parameters of one group of the optimizer have in common."""

    in_generator: bool  # whether only the generator's loss trains them, and the generator has groups of its own
    is_undecayed: bool
    num_matrices: int  # that each of them stacks, for Muon; 0 for AdamW


def _place_in_memory(parameter: nn.Parameter) -> tuple[bool, int]:
    """Return the sort key of a parameter in its group: multiples of 8 elements first, then the others, largest first.

    A multiple of 8 elements takes a multiple of 16 bytes in any precision.
    """
    is_multiple = parameter.numel() % 8 == 0
    return (False, 0) if is_multiple else (True, -parameter.numel())


def misaligned_parameters(module: nn.Module) -> list[str]:
    """Return the names of parameters with more than one element whose address is no multiple of 16 bytes.

    On a GPU, operations on them take slower kernels, or fail. An objective that has several parameters of odd sizes
    can have such addresses in spite of `parameter_groups`.
    """
    return [name for name, value in module.named_parameters() if value.numel() > 1 and value.data_ptr() % 16]


def _num_matrices(name: str, parameter: nn.Parameter) -> int:
    """Return how many matrices a parameter stacks, as 3 for query, key and value; 0 if Muon leaves it to AdamW."""
    if ".layers." not in name or parameter.dim() != 2:
        return 0
    if name.endswith("gated_expand.weight"):
        return 2  # inner values and gates, in the architecture `modern`
    return 3 if name.endswith("attention.qkv.weight") else 1


def choose_implementation(config: OptimizerConfig, device_type: str, updates_on_host: bool = False) -> Choice:
    """Choose who computes the optimizer's updates: "apex", "deepspeed" or "foreach" (torch alone).

    It is the configured implementation, or for `auto` the fastest that runs. A configured one is tried out; if this
    machine lacks it, UserError is raised. At its first trial, DeepSpeed's is compiled, which takes about a minute.
    `updates_on_host` says that the optimizer's state is in host memory, which only foreach can update.
    """
    offloads = device_type == "cuda" and updates_on_host
    if config.implementation == "auto":
        if device_type != "cuda" or config.facts.implementations == ("foreach",):
            return Choice("foreach")
        if offloads:
            return Choice("foreach", "engine.offload_optimizer keeps its state in host memory")
        return _fastest_on_gpu(config.facts.implementations)
    if config.implementation == "foreach":
        return Choice("foreach")
    if offloads:
        raise UserError(
            f"optimizer.implementation {config.implementation} updates GPU memory only, but engine.offload_optimizer "
            f"keeps the optimizer's state in host memory; set optimizer.implementation: auto"
        )
    fault = _fault_of(config.implementation)
    if fault:
        raise UserError(
            f"optimizer.implementation {config.implementation} cannot be used: {fault}; set "
            f"optimizer.implementation: auto, or {_REMEDIES[config.implementation]}"
        )
    return Choice(config.implementation)


_REMEDIES = {
    "apex": "install NVIDIA's apex from source with its CUDA extensions (the package of that name on PyPI is another)",
    "deepspeed": "install the CUDA toolkit of torch's version, with nvcc and its headers",
}


def _fastest_on_gpu(implementations: tuple[str, ...]) -> Choice:
    candidates = []
    if "apex" in implementations and has_nvidia_apex():
        candidates.append(Candidate("apex", "NVIDIA's apex", lambda: _fault_of("apex")))
    if "deepspeed" in implementations:
        candidates.append(Candidate("deepspeed", "DeepSpeed's FusedAdam", lambda: _fault_of("deepspeed")))
    return first_that_works(candidates, fallback="foreach")


def _fault_of(implementation: str) -> str:
    """Return in one line why "apex" or "deepspeed" cannot be used on this machine, or "" if it can."""
    if implementation == "apex" and not has_nvidia_apex():
        return "NVIDIA's apex with its CUDA extension amp_C is not installed"
    # This imports the CUDA extension, and compiles DeepSpeed's first. A lack of nvcc, headers, ninja or cudart shows
    # in errors of many classes, so all of them count.
    try:
        fused_adam_class, _ = _import_fused_adam(implementation)
        fused_adam_class([nn.Parameter(torch.zeros(1))], lr=0.0)
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a loader raises, there is another optimizer
        lines = str(error).strip().splitlines() or ["no message"]
        return f"{type(error).__name__}: {lines[0]}"
    return ""


_FOREACH = {"adamw": ForeachAdamW, "lamb": ForeachLamb, "muon": ForeachMuon}  # by `optimizer.name`


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, device_type: str, *, implementation: str | None = None
) -> tuple[torch.optim.Optimizer, str]:
    """Build the optimizer of a module for `deepspeed.initialize`, with learning rate 0; also return its name for logs.

    `implementation` is "apex", "deepspeed" or "foreach"; None lets `choose_implementation` decide.
    """
    generator = config.for_generator if config.generator is not None else None
    groups = parameter_groups(
        module,
        config.weight_decay,
        generator,
        use_muon=config.name == "muon",
        aligned=device_type in _DEVICES_THAT_NEED_ALIGNMENT,
    )
    if implementation is None:
        implementation = choose_implementation(config, device_type).name
    betas = (config.beta1, config.beta2)
    settings = {"eps": config.eps, "weight_decay": config.weight_decay}
    if implementation == "foreach":
        optimizer_class = _FOREACH[config.name]
        return optimizer_class(groups, lr=0.0, betas=betas, **settings), f"{optimizer_class.__name__} (electra-dist)"
    if config.name == "lamb":
        return _build_apex_lamb(groups, betas, settings)
    assert config.name == "adamw", config.name
    fused_adam_class, name = _import_fused_adam(implementation)
    optimizer = fused_adam_class(groups, lr=0.0, betas=betas, bias_correction=False, adam_w_mode=True, **settings)
    return optimizer, name


def _build_apex_lamb(
    groups: list[dict[str, Any]], betas: tuple[float, float], settings: dict[str, float]
) -> tuple[torch.optim.Optimizer, str]:
    """Return apex's fused LAMB without its own clipping, and its name for the log."""
    from apex.optimizers import FusedLAMB

    optimizer = FusedLAMB(
        groups,
        lr=0.0,
        betas=betas,
        bias_correction=False,
        adam_w_mode=True,
        grad_averaging=True,  # the factor (1 - beta1) on the gradient in the first moment
        max_grad_norm=1e30,  # never reached: the engine has clipped already
        use_nvlamb=False,  # parameters without decay are not scaled by norms
        **settings,
    )
    return optimizer, "FusedLAMB (apex)"


def _import_fused_adam(implementation: str) -> tuple[Any, str]:
    """Import the class FusedAdam of "apex" or "deepspeed"; return it with its name for logs."""
    if implementation == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam, "FusedAdam (apex)"
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam, "FusedAdam (DeepSpeed)"


def has_nvidia_apex() -> bool:
    """Return whether NVIDIA's apex with its CUDA extension `amp_C` is installed, without importing it."""
    return all(importlib.util.find_spec(name) is not None for name in ("apex", "amp_C"))

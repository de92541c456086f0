"""Build the optimizer: AdamW as the ELECTRA paper used it, or LAMB.

AdamW has no bias correction, a decoupled decay times lr, and no decay on LayerNorm and bias. There are three
implementations of this one update rule; `build_optimizer` takes the first that this machine has and returns its name:

1. apex FusedAdam (NVIDIA's: it must bring the `amp_C` extension; the PyPI package named `apex` is another project),
2. DeepSpeed FusedAdam (compiled once on the first use on a GPU),
3. `ForeachAdamW` of `adamw.py`, which states the rule: torch._foreach, no compilation; CPUs run it.

`optimizer.name: lamb` is `ForeachLamb` of `lamb.py`, or apex FusedLAMB. It runs at ZeRO stage 0 only: each step is
scaled by the norm of its parameter, and at the other stages an optimizer gets flat pieces of many parameters; apex's
would silently take the norm of a piece for the norm of a parameter.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from electra_dist.config import OptimizerConfig
from electra_dist.engine.adamw import ForeachAdamW
from electra_dist.engine.lamb import ForeachLamb
from electra_dist.errors import UserError
from electra_dist.objectives.two_stage import TwoStageDetection, is_generators


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: one with weight decay and one without.

    LayerNorm parameters and biases are not decayed; all other parameters are, embeddings included. A shared parameter
    is in one group only. For two-stage training (`TwoStageDetection`) each tower has two groups of its own, so that
    either tower can get a learning rate of 0.

    Args:
        module: the module whose parameters are trained.
        weight_decay: decay of the decayed groups.

    Returns:
        Dicts with `params`, `weight_decay` and `is_generators`, which is True for the groups of the generator in
        two-stage training. Groups without parameters are left out.
    """
    layer_norms = [submodule for submodule in module.modules() if isinstance(submodule, nn.LayerNorm)]
    layer_norm_ids = {id(parameter) for norm in layer_norms for parameter in norm.parameters(recurse=False)}
    towers_take_turns = isinstance(module, TwoStageDetection)
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        is_bias = name.rsplit(".", 1)[-1] == "bias"
        is_undecayed = is_bias or id(parameter) in layer_norm_ids
        in_generator = towers_take_turns and is_generators(name)
        members.setdefault((in_generator, is_undecayed), []).append(parameter)
    groups = []
    for in_generator, is_undecayed in sorted(members):
        groups.append(
            {
                "params": members[in_generator, is_undecayed],
                "weight_decay": 0.0 if is_undecayed else weight_decay,
                "is_generators": in_generator,
            }
        )
    return groups


def check_optimizer(config: OptimizerConfig, zero_stage: int) -> None:
    """Refuse optimizer settings that cannot work: LAMB with partitioned parameters, or DeepSpeed's LAMB.

    LAMB needs the norm of each whole parameter, and at ZeRO stages 1 to 3 an optimizer gets pieces of parameters.

    Args:
        config: gives the optimizer and its implementation.
        zero_stage: 0 to 3.

    Raises:
        UserError: names the keys that do not fit together and the value to set.
    """
    if config.name != "lamb":
        return
    if zero_stage:
        raise UserError(
            f"optimizer.name lamb needs whole parameters for its norms, but engine.zero_stage is {zero_stage}; set "
            f"engine.zero_stage: 0 (at ELECTRA-Large's size all state takes 5.7 GB per GPU)"
        )
    if config.implementation == "deepspeed":
        raise UserError(
            "optimizer.implementation deepspeed is not available for optimizer.name lamb, which has the "
            "implementations apex and foreach; set optimizer.implementation: auto"
        )


def build_optimizer(module: nn.Module, config: OptimizerConfig, device_type: str) -> tuple[torch.optim.Optimizer, str]:
    """Build the optimizer that DeepSpeed will call.

    Args:
        module: the module whose parameters are trained.
        config: gives the optimizer, its implementation and its settings.
        device_type: "cuda" or "cpu"; decides what `implementation: auto` means.

    Returns:
        The optimizer, and the name of its implementation for logs. Its learning rate is 0 until the caller sets it,
        which `Engine.step` does at every step.

    Raises:
        ImportError: the config demands apex, which is not installed.
    """
    groups = parameter_groups(module, config.weight_decay)
    implementation = _choose_implementation(config, device_type)
    betas = (config.beta1, config.beta2)
    settings = {"eps": config.eps, "weight_decay": config.weight_decay}
    if config.name == "lamb":
        return _build_lamb(groups, implementation, betas, settings)
    if implementation == "foreach":
        return ForeachAdamW(groups, lr=0.0, betas=betas, **settings), "ForeachAdamW (electra-dist)"
    fused_adam, name = _import_fused_adam(implementation)
    optimizer = fused_adam(groups, lr=0.0, betas=betas, bias_correction=False, adam_w_mode=True, **settings)
    return optimizer, name


def _choose_implementation(config: OptimizerConfig, device_type: str) -> str:
    """Return "apex", "deepspeed" or "foreach": the configured one, or for `auto` the fastest that this machine has.

    On a CPU only foreach runs. On a GPU apex comes first; without it AdamW is DeepSpeed's, and LAMB is foreach.
    """
    if config.implementation != "auto":
        return config.implementation
    if device_type != "cuda":
        return "foreach"
    if has_nvidia_apex():
        return "apex"
    return "deepspeed" if config.name == "adamw" else "foreach"


def _build_lamb(
    groups: list[dict[str, Any]], implementation: str, betas: tuple[float, float], settings: dict[str, float]
) -> tuple[torch.optim.Optimizer, str]:
    """Build LAMB of this package ("foreach") or of apex, without bias correction and without apex's own clipping.

    Args:
        groups: parameter groups, as of `parameter_groups`.
        implementation: "foreach"; any other value means apex.
        betas: decay rates of the first and of the second moment.
        settings: `eps` and `weight_decay`.

    Returns:
        The optimizer, and the name of its implementation for logs.
    """
    if implementation == "foreach":
        return ForeachLamb(groups, lr=0.0, betas=betas, **settings), "ForeachLamb (electra-dist)"
    from apex.optimizers import FusedLAMB

    # The engine has clipped already; a bound that is never reached switches apex's own clipping off.
    options = {"bias_correction": False, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1e30}
    return FusedLAMB(groups, lr=0.0, betas=betas, use_nvlamb=False, **options, **settings), "FusedLAMB (apex)"


def _import_fused_adam(implementation: str) -> tuple[Any, str]:
    """Import the FusedAdam class of apex or of DeepSpeed; return it with the name of its implementation for logs.

    The import is late, because either package may be absent, and DeepSpeed's compiles a CUDA extension at first use.
    """
    if implementation == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam, "FusedAdam (apex)"
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam, "FusedAdam (DeepSpeed)"


def has_nvidia_apex() -> bool:
    """Return whether NVIDIA's apex with its CUDA extension `amp_C` is installed.

    The PyPI package of the same name is another project and does not count. Nothing is imported.
    """
    return all(importlib.util.find_spec(name) is not None for name in ("apex", "amp_C"))

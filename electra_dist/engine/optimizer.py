"""AdamW as the paper used it: no bias correction, decoupled decay times lr, none on LayerNorm and bias. And LAMB.

Three implementations of one update rule; `build_optimizer` takes the first that this machine has and says which:

1. apex FusedAdam (NVIDIA's: it must bring the `amp_C` extension; the PyPI package named `apex` is something else),
2. DeepSpeed FusedAdam (compiled once on the first use on a GPU),
3. `ForeachAdamW` of `adamw.py`, which states the rule: torch._foreach, no compilation, what a CPU runs.

`optimizer.name: lamb` is `lamb.py`'s, or apex FusedLAMB. It runs at ZeRO stage 0 only: each parameter's step is scaled
by the parameter's norm, and at the other stages an optimizer sees flat pieces of many parameters; apex's would take
the norm of a piece for the norm of a parameter and say nothing.
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
    """Two groups, decayed and not: LayerNorm and bias parameters are not decayed, embeddings are.

    Of towers that learn in turns each has two groups, `is_generators` True or False, so that each can rest.
    """
    norms = {id(p) for m in module.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters(recurse=False)}
    in_turns = isinstance(module, TwoStageDetection)
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        is_plain = id(parameter) in norms or name.rsplit(".", 1)[-1] == "bias"
        members.setdefault((in_turns and is_generators(name), is_plain), []).append(parameter)
    return [
        {"params": members[key], "weight_decay": 0.0 if key[1] else weight_decay, "is_generators": key[0]}
        for key in sorted(members)
    ]


def check_optimizer(config: OptimizerConfig, zero_stage: int) -> None:
    """Refuse LAMB where it would see pieces of parameters.

    Raises:
        UserError: names the keys and the next step.
    """
    if config.name == "lamb" and zero_stage:
        raise UserError(
            f"optimizer.name lamb needs whole parameters for its norms, but engine.zero_stage is {zero_stage}; set "
            f"engine.zero_stage: 0 (at ELECTRA-Large's size all state takes 5.7 GB a GPU)"
        )
    if config.name == "lamb" and config.implementation == "deepspeed":
        raise UserError("optimizer.name lamb has implementations apex and foreach; set optimizer.implementation: auto")


def build_optimizer(module: nn.Module, config: OptimizerConfig, device_type: str) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer and the name of the implementation that runs. lr starts at 0: the loop sets it every step."""
    groups = parameter_groups(module, config.weight_decay)
    choice: str = config.implementation
    if choice == "auto":
        fused = "deepspeed" if config.name == "adamw" else "foreach"
        choice = "foreach" if device_type != "cuda" else "apex" if has_nvidia_apex() else fused
    betas, rest = (config.beta1, config.beta2), {"eps": config.eps, "weight_decay": config.weight_decay}
    if config.name == "lamb":
        return _lamb(groups, choice, betas, rest)
    if choice == "foreach":
        return ForeachAdamW(groups, lr=0.0, betas=betas, **rest), "ForeachAdamW (electra-dist)"
    fused_adam, name = _fused_adam(choice)
    optimizer = fused_adam(groups, lr=0.0, betas=betas, bias_correction=False, adam_w_mode=True, **rest)
    return optimizer, name


def _lamb(
    groups: list[dict[str, Any]], choice: str, betas: tuple[float, float], rest: dict[str, float]
) -> tuple[torch.optim.Optimizer, str]:
    if choice == "foreach":
        return ForeachLamb(groups, lr=0.0, betas=betas, **rest), "ForeachLamb (electra-dist)"
    from apex.optimizers import FusedLAMB

    # The engine has clipped already; a bound that is never reached switches apex's own clipping off.
    options = {"bias_correction": False, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1e30}
    return FusedLAMB(groups, lr=0.0, betas=betas, use_nvlamb=False, **options, **rest), "FusedLAMB (apex)"


def _fused_adam(choice: str) -> tuple[Any, str]:
    if choice == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam, "FusedAdam (apex)"
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam, "FusedAdam (DeepSpeed)"


def has_nvidia_apex() -> bool:
    """True if NVIDIA's apex with its CUDA extension is installed, not the PyPI package of the same name."""
    return all(importlib.util.find_spec(name) is not None for name in ("apex", "amp_C"))

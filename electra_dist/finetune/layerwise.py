"""The optimizer of fine-tuning: every layer has its own learning rate, and all of them one schedule.

Guarantee: with L layers, d = layer_decay and depth 0 for the embeddings and their projection, i + 1 for layer i and
L + 2 for the head, a parameter's peak is lr * d ** (L + 2 - depth). No depth is L + 1: the reference took the pooler
out and left its place, so the top layer gets d ** 2. Without `lr_decay_quirk` everything below the head moves up by
one: lr * d ** (L + 1 - depth), the top layer d, the embeddings d ** (L + 1).

The schedule is lr * (1 - t / T) * min(1, t / (warmup_fraction * T)), so that the first update has lr 0.

Source: google-research/electra, model/optimization.py (`_get_layer_lrs`), issues 51 and 64; AdamW without bias
correction is the one of pretraining (`engine/optimizer.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import nn

from electra_dist.engine.adamw import ForeachAdamW
from electra_dist.finetune.config import FinetuneConfig

_LAYER = re.compile(r"backbone\.encoder\.layers\.(\d+)\.")


def peak_lr(name: str, num_layers: int, settings: FinetuneConfig) -> float:
    """The highest learning rate of the parameter `name` of a task model (`backbone.*` and `head.*`)."""
    if not name.startswith("backbone."):
        return settings.lr
    layer = _LAYER.match(name)
    depth = int(layer[1]) + 1 if layer else 0
    steps_down = num_layers + 1 - depth + (1 if settings.lr_decay_quirk else 0)
    return settings.lr * settings.layer_decay**steps_down


def schedule(step: int, num_steps: int, settings: FinetuneConfig) -> float:
    """Factor of every peak for the update that turns `step` finished steps into `step` + 1."""
    warmup_steps = settings.warmup_fraction * num_steps
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warmup * (1.0 - step / num_steps)


def layerwise_adamw(model: nn.Module, num_layers: int, settings: FinetuneConfig) -> ForeachAdamW:
    """AdamW with a group for each peak and each of decayed and not; `peak_lr` of a group holds its peak."""
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        decay = 0.0 if owner in norms or kind == "bias" else settings.weight_decay
        groups[peak_lr(name, num_layers, settings), decay].append(parameter)
    listed: list[dict[str, Any]] = [
        {"params": parameters, "lr": 0.0, "peak_lr": peak, "weight_decay": decay}
        for (peak, decay), parameters in groups.items()
    ]
    betas = (settings.beta1, settings.beta2)
    return ForeachAdamW(listed, lr=0.0, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay)


def set_step(optimizer: ForeachAdamW, factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor

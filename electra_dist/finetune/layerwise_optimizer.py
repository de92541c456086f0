"""Builds the optimizer and the schedule of fine-tuning: AdamW with one learning rate per layer.

Guarantee: let L be the number of layers, d the layer_decay, and depth 0 for the embeddings and their projection,
i + 1 for layer i, and L + 2 for the head. The peak learning rate of a parameter is lr * d ** (L + 2 - depth). No
parameter has depth L + 1, which the reference reserves for a pooler that it no longer has, so the top layer gets
d ** 2. With `lr_decay_quirk: false` everything below the head moves up by one: lr * d ** (L + 1 - depth), which is d
for the top layer and d ** (L + 1) for the embeddings.

The schedule multiplies every peak by (1 - t / T) * min(1, t / (warmup_fraction * T)) for update t of T, counted from
0. The first update therefore has a learning rate of 0 if there is a warm-up.

Source: google-research/electra, model/optimization.py (`_get_layer_lrs`), issues 51 and 64. AdamW without bias
correction is the optimizer of pretraining (`engine/optimizer.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import nn

from electra_dist.engine.adamw import ForeachAdamW
from electra_dist.finetune.finetune_config import FinetuneConfig

_LAYER = re.compile(r"backbone\.encoder\.layers\.(\d+)\.")


def peak_lr(name: str, num_layers: int, settings: FinetuneConfig) -> float:
    """Return the highest learning rate that a parameter reaches: that of the head is lr, lower layers have less.

    Each layer has `layer_decay` times the rate of the layer above it, and the embeddings that of a layer below the
    first one. The top layer is two steps below the head (`lr_decay_quirk`), or one.

    Source: `_get_layer_lrs` of google-research/electra, model/optimization.py.

    Args:
        name: name of the parameter in a `TaskModel`: `backbone.*` for the encoder; any other name is the head.
        num_layers: transformer layers of the encoder.
        settings: `lr`, `layer_decay` and `lr_decay_quirk` are used.
    """
    if not name.startswith("backbone."):
        return settings.lr
    # Depth counts from the embeddings (0) over layer 0 (1) to the head. The reference reserves the depth below the
    # head for a pooler that does not exist, hence the quirk.
    head_depth = num_layers + 2 if settings.lr_decay_quirk else num_layers + 1
    layer = _LAYER.match(name)
    if layer:
        layer_number = int(layer[1])
        depth = layer_number + 1
    else:
        depth = 0  # the embeddings and their projection
    return settings.lr * settings.layer_decay ** (head_depth - depth)


def schedule(step: int, num_steps: int, settings: FinetuneConfig) -> float:
    """Return the factor by which one update multiplies every peak learning rate: linear warm-up, linear decay to 0.

    The decay runs over all updates, also during the warm-up, so the factor stays below 1. It is 0 for the first update
    if there is a warm-up.

    Args:
        step: number of finished updates, from 0 to num_steps - 1.
        num_steps: updates of the whole run.
        settings: `warmup_fraction` is used; 0 means no warm-up.
    """
    warmup_steps = settings.warmup_fraction * num_steps
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warmup * (1.0 - step / num_steps)


def layerwise_adamw(model: nn.Module, num_layers: int, settings: FinetuneConfig) -> ForeachAdamW:
    """Build an AdamW optimizer whose learning rates decrease from the head down to the embeddings; see `peak_lr`.

    There is one parameter group per peak learning rate and weight decay. A group stores its peak as `peak_lr` and
    starts with a learning rate of 0: call `set_step` before every update. Biases and LayerNorm weights have no weight
    decay.

    Args:
        model: a `TaskModel`, whose parameter names decide their learning rates.
        num_layers: transformer layers of its encoder.
        settings: learning rate, layer decay and the settings of AdamW are used.
    """
    layer_norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    parameters_of: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)  # keyed by (peak, decay)
    for name, parameter in model.named_parameters():
        # "backbone.embeddings.norm.bias" is the parameter "bias" of the module "backbone.embeddings.norm".
        module_name, _, short_name = name.rpartition(".")
        is_decayed = module_name not in layer_norms and short_name != "bias"
        decay = settings.weight_decay if is_decayed else 0.0
        peak = peak_lr(name, num_layers, settings)
        parameters_of[peak, decay].append(parameter)
    param_groups: list[dict[str, Any]] = []
    for (peak, decay), parameters in parameters_of.items():
        param_groups.append({"params": parameters, "lr": 0.0, "peak_lr": peak, "weight_decay": decay})
    return ForeachAdamW(
        param_groups,
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def set_step(optimizer: ForeachAdamW, factor: float) -> None:
    """Set the learning rate of every parameter group for the next update.

    It becomes `factor` (see `schedule`) times the group's entry `peak_lr`, which `layerwise_adamw` has stored.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor

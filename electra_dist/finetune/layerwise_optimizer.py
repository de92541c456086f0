"""Build the optimizer and the schedule of fine-tuning: AdamW with one learning rate per layer.

Guarantee: the head learns at the peak rate lr, and lower layers learn more slowly. Let L be the number of layers and d
the setting `layer_decay`. Layer i, counted from 0 at the bottom, has the peak rate lr * d ** (L + 1 - i), so the top
layer has lr * d ** 2. The embeddings and their projection have lr * d ** (L + 2). The top layer is two factors d below
the head because the reference counts a pooler between them, which does not exist. With `lr_decay_quirk: false` this
factor is dropped: the top layer has lr * d, and the embeddings have lr * d ** (L + 1).

The schedule multiplies every peak rate by (1 - t / T) * min(1, t / (warmup_fraction * T)), where t is the number of
finished updates and T is their total. With a warm-up, the first update (t = 0) therefore has a learning rate of 0.

Source: google-research/electra, model/optimization.py (`_get_layer_lrs`), issues 51 and 64. AdamW without bias
correction is the optimizer of pretraining (`engine/adamw.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import nn

from electra_dist.engine.adamw import ForeachAdamW
from electra_dist.finetune.finetune_config import FinetuneConfig

_LAYER = re.compile(r"backbone\.encoder\.layers\.(\d+)\.")
_FINAL_NORM = "backbone.encoder.final_norm."


def peak_lr(name: str, num_layers: int, settings: FinetuneConfig) -> float:
    """Return a parameter's peak learning rate: `settings.lr` in the head, and less in each lower layer of the encoder.

    `name` is the parameter's name in a `TaskModel`, where the encoder's names begin with "backbone.". In the
    architecture `modern`, the LayerNorm after the last layer has the peak rate of the top layer.
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
    elif name.startswith(_FINAL_NORM):
        depth = num_layers
    else:
        depth = 0  # the embeddings and their projection
    return settings.lr * settings.layer_decay ** (head_depth - depth)


def schedule(step: int, num_steps: int, settings: FinetuneConfig) -> float:
    """Return the factor by which update `step` (from 0) multiplies every peak learning rate: warm-up times decay.

    Both are linear. The decay also runs during the warm-up, so with a warm-up the factor never reaches 1.
    """
    warmup_steps = settings.warmup_fraction * num_steps
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warmup * (1.0 - step / num_steps)


def layerwise_adamw(model: nn.Module, num_layers: int, settings: FinetuneConfig) -> ForeachAdamW:
    """Build an AdamW optimizer whose learning rates decrease from the head of a `TaskModel` down to the embeddings.

    All parameter groups start with a learning rate of 0: call `set_step` before every update, or nothing is learnt.
    Biases and LayerNorm weights have no weight decay.
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
    """Set each parameter group's learning rate for the next update: its peak rate times `factor`, from `schedule`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor

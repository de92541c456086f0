"""Runs one of two ranks, and prints the sum that their exchange of gradients gives at ZeRO stages 1 to 3.

In bf16 rank 0 has the gradient 1 and rank 1 the gradient 2^-9. Their sum needs 10 bits: fp32 has them, bf16 has 8. In
fp16 rank 1 has 2^-12; fp16 has 11 bits. The config of DeepSpeed is once that of a CPU and once that of a GPU; both run
on the CPU.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from electra_dist.config.load import load_config
from electra_dist.engine import engine as engine_module
from electra_dist.engine import zero
from electra_dist.engine.engine import Engine, deepspeed_config
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import owned_fragments

SIZE = 64  # of the only parameter


def summed_gradient(device_type: str, precision: str, stage: int) -> set[float]:
    """Return the values of the gradient that the optimizer got, which is the same for all elements."""
    engine_module.deepspeed_config = lambda train, section, clip, _: deepspeed_config(
        train, section, clip, device_type
    )
    config = load_config(
        Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml",
        [f"engine.zero_stage={stage}", f"train.precision={precision}", "train.global_batch=2", "train.micro_batch=1"]
        + ["optimizer.clip_norm=1e9", "optimizer.beta1=0.5"],
    )
    net = nn.Linear(SIZE, 1, bias=False)
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    small_gradient = 2.0**-9 if precision == "bf16" else 2.0**-12
    own_gradient = 1.0 if dist.get_rank() == 0 else small_gradient
    inputs = torch.full((1, SIZE), own_gradient, dtype=net.weight.dtype)
    engine.backward(engine.deepspeed(inputs).float().sum())
    engine.step(0.0)
    gradients: set[float] = set()
    for fragment in owned_fragments(engine):
        gradients.update((2 * fragment.views["exp_avg"]).tolist())  # (1 - beta1) is a half
    engine.close()
    return gradients


warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses fp16 on CPUs without instructions for it
zero.INITIAL_SCALE = 16.0  # the gradients of this file would overflow with the usual one
init_distributed()
for precision in ("bf16", "fp16"):
    for device_type in ("cpu", "cuda"):
        for stage in (1, 2, 3):
            gradients = summed_gradient(device_type, precision, stage)
            print("MEASURED", precision, device_type, stage, *gradients, flush=True)
dist.destroy_process_group()

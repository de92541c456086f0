"""Runs one of two ranks, and prints the sum that their exchange of gradients gives at ZeRO stages 1 to 3 in bf16.

Rank 0 has the gradient 1 and rank 1 the gradient 2^-9. Their sum needs 10 bits: fp32 has them, bf16 has 8. The config
of DeepSpeed is once that of a CPU and once that of a GPU; both run on the CPU.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from electra_dist.config_file import load_config
from electra_dist.engine import engine as engine_module
from electra_dist.engine.engine import Engine, deepspeed_config
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import owned_fragments

SIZE = 64  # of the only parameter


def summed_gradient(device_type: str, stage: int) -> set[float]:
    """Return the values of the gradient that the optimizer got, which is the same for all elements."""
    engine_module.deepspeed_config = lambda train, section, clip, _: deepspeed_config(
        train, section, clip, device_type
    )
    config = load_config(
        Path(__file__).parents[2] / "configs" / "demo_cpu.yaml",
        [f"engine.zero_stage={stage}", "train.precision=bf16", "train.global_batch=2", "train.micro_batch=1"]
        + ["optimizer.clip_norm=1e9", "optimizer.beta1=0.5"],
    )
    net = nn.Linear(SIZE, 1, bias=False)
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    own_gradient = 1.0 if dist.get_rank() == 0 else 2.0**-9
    inputs = torch.full((1, SIZE), own_gradient, dtype=torch.bfloat16)
    engine.backward(engine.deepspeed(inputs).float().sum())
    engine.step(0.0)
    gradients: set[float] = set()
    for fragment in owned_fragments(engine.deepspeed.module, engine.optimizer):
        gradients.update((2 * fragment.views["exp_avg"]).tolist())  # (1 - beta1) is a half
    engine.close()
    return gradients


warnings.simplefilter("ignore")
init_distributed()
for device_type in ("cpu", "cuda"):
    for stage in (1, 2, 3):
        print("MEASURED", device_type, stage, *summed_gradient(device_type, stage), flush=True)
dist.destroy_process_group()

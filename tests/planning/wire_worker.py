"""One of two ranks that train a few steps at every ZeRO stage and precision; prints the bytes of every collective.

The functions of torch.distributed are wrapped before DeepSpeed is imported, so what is counted is what goes into the
transport. Small messages (norms, overflow flags) are counted with the rest.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

calls: list[tuple[str, int]] = []  # (name of the collective, bytes of its whole message)
# Argument of each collective that holds its whole message: position and name.
MESSAGE_ARGUMENT = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
}


def count_calls_of(name: str) -> None:
    """Replace the collective `name` of torch.distributed by one that adds each call to `calls`."""
    collective = getattr(dist, name)
    position, keyword = MESSAGE_ARGUMENT[name]

    def counted(*args: Any, **kwargs: Any) -> Any:
        message = kwargs[keyword] if keyword in kwargs else args[position]
        tensors = message if isinstance(message, (list, tuple)) else [message]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        calls.append((name, num_bytes))
        return collective(*args, **kwargs)

    setattr(dist, name, counted)


for collective_name in MESSAGE_ARGUMENT:
    count_calls_of(collective_name)

# DeepSpeed keeps the functions that it finds when it is imported.
from deepspeed.accelerator import get_accelerator  # noqa: E402

from electra_dist.config.load import load_config  # noqa: E402
from electra_dist.engine.engine import Engine  # noqa: E402
from electra_dist.engine.process_group import init_distributed  # noqa: E402

RANKS = 2
MICRO_BATCH = 2
MICRO_BATCHES = 2
NUM_STEPS = 3
# Two tensors that stage 3 partitions, and one that is too small for it.
WEIGHT_SHAPES = [(400, 400), (400, 400), (400, 50)]


def count_step(stage: int, precision: str) -> dict[str, Any]:
    """Return the collectives of a third step; the first two steps are left out, because they also set up."""
    net = torch.nn.Sequential(*(torch.nn.Linear(*shape, bias=False) for shape in WEIGHT_SHAPES))
    sizes = [parameter.numel() for parameter in net.parameters()]
    overrides = [
        f"engine.zero_stage={stage}",
        f"train.precision={precision}",
        f"train.global_batch={RANKS * MICRO_BATCH * MICRO_BATCHES}",
        f"train.micro_batch={MICRO_BATCH}",
    ]
    config = load_config(Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml", overrides)
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    # Stage 0 trains in 16 bits by autocast, so its weights and inputs are fp32.
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32) if stage else torch.float32
    for _ in range(NUM_STEPS):
        calls.clear()
        for _ in range(engine.num_micro_batches):
            inputs = torch.ones(MICRO_BATCH, 400, dtype=dtype)
            engine.backward(engine.deepspeed(inputs).float().pow(2).mean())
        engine.step(1e-3)
    engine.close()
    return {"stage": stage, "precision": precision, "sizes": sizes, "calls": list(calls)}


warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses fp16 on CPUs without instructions for it
init_distributed()
# Stage 0 comes last: its autocast stays in effect for the exchange of later engines of the same process.
runs = [count_step(stage, precision) for stage in (1, 2, 3, 0) for precision in ("fp32", "bf16", "fp16")]
if os.environ["RANK"] == "0":
    print("COUNTED", json.dumps({"micro_batches": MICRO_BATCHES, "runs": runs}), flush=True)
dist.destroy_process_group()

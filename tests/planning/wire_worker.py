"""One of two ranks that train a few steps at every ZeRO stage and precision; prints every byte given to a collective.

torch.distributed's functions are wrapped before DeepSpeed sees them, so what is counted is what goes into the
transport; small messages (norms, overflow flags) are counted with the rest.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

calls: list[tuple[str, int]] = []  # collective, bytes of its whole message
# Where the whole message is among the arguments: its position, its name.
WHOLE = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
}


def wrap(name: str) -> None:
    inner, (position, keyword) = getattr(dist, name), WHOLE[name]

    def counted(*args: Any, **kwargs: Any) -> Any:
        message = kwargs[keyword] if keyword in kwargs else args[position]
        tensors = message if isinstance(message, (list, tuple)) else [message]
        calls.append((name, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return inner(*args, **kwargs)

    setattr(dist, name, counted)


for collective in WHOLE:
    wrap(collective)

# DeepSpeed keeps the functions that it finds when it is imported.
from electra_dist.config_file import load_config  # noqa: E402
from electra_dist.engine.engine import Engine  # noqa: E402
from electra_dist.engine.process_group import init_distributed  # noqa: E402

MICRO_BATCHES = 2
WIDTHS = [(400, 400), (400, 400), (400, 50)]  # two tensors that stage 3 cuts up, and one that it does not


def count(stage: int, precision: str) -> dict[str, Any]:
    """The calls of a third step (the first ones also set up)."""
    net = torch.nn.Sequential(*(torch.nn.Linear(*width, bias=False) for width in WIDTHS))
    sizes = [p.numel() for p in net.parameters()]
    settings = [f"engine.zero_stage={stage}", f"train.precision={precision}"]
    settings += [f"train.global_batch={4 * MICRO_BATCHES}", "train.micro_batch=2"]
    config = load_config(Path(__file__).parents[2] / "configs" / "demo_cpu.yaml", settings)
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    for _ in range(3):
        calls.clear()
        for micro in range(engine.num_micro_batches):
            inputs = torch.ones(2, 400, dtype=torch.bfloat16 if stage and precision == "bf16" else torch.float32)
            engine.backward(engine.deepspeed(inputs).float().pow(2).mean())
            if micro + 1 < engine.num_micro_batches:
                engine.step_micro_batch()
        engine.step(1e-3)
    engine.close()
    return {"stage": stage, "precision": precision, "sizes": sizes, "calls": list(calls)}


warnings.simplefilter("ignore")
init_distributed()
found = [count(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
if os.environ["RANK"] == "0":
    print("COUNTED", json.dumps({"micro_batches": MICRO_BATCHES, "runs": found}), flush=True)
dist.destroy_process_group()

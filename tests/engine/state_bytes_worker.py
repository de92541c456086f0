"""One rank that trains a model of 1 M parameters at one ZeRO stage in bf16 and prints the bytes that stay live."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from electra_dist.config_file import load_config
from electra_dist.engine.distributed import init_distributed
from electra_dist.engine.engine import Engine


def live_bytes() -> int:
    """Bytes of all storages that a Python object holds, each once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes_per_parameter(stage: int) -> float:
    """The most that was live after any backward pass of two steps of two micro-batches."""
    before = live_bytes()
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    num_parameters = sum(p.numel() for p in net.parameters())
    config = load_config(
        Path(__file__).parents[2] / "configs" / "demo_cpu.yaml",
        [f"engine.zero_stage={stage}", "train.precision=bf16", "train.global_batch=8", "train.micro_batch=2"],
    )
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    peak = 0
    for _ in range(2):
        for micro in range(engine.num_micro_batches):
            inputs = torch.ones(2, 512, dtype=torch.bfloat16 if stage else torch.float32)
            engine.backward(engine.deepspeed(inputs).float().pow(2).mean())
            peak = max(peak, live_bytes())
            if micro + 1 < engine.num_micro_batches:
                engine.step_micro_batch()
        engine.step(1e-3)
    engine.close()
    return (peak - before) / num_parameters


warnings.simplefilter("ignore")
init_distributed()
measured = peak_bytes_per_parameter(stage=int(sys.argv[1]))
if dist.get_rank() == 0:
    print("MEASURED", measured, flush=True)
dist.destroy_process_group()

"""Runs one rank that trains 1 M parameters at a ZeRO stage and precision; prints its peak live bytes per parameter."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed


def live_bytes() -> int:
    """Return the bytes of all tensor storages that Python objects hold, each counted once."""
    gc.collect()
    nbytes_by_address: dict[int, int] = {}
    for candidate in gc.get_objects():
        if type(candidate) not in (torch.Tensor, nn.Parameter):
            continue
        grad = candidate.grad if candidate.is_leaf else None
        for tensor in (candidate, grad):
            if tensor is not None:
                storage = tensor.untyped_storage()
                nbytes_by_address[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes_by_address.values())


def peak_bytes_per_parameter(precision: str, stage: int) -> float:
    """Return the largest live bytes per parameter after a backward pass, over two steps of two micro-batches."""
    before = live_bytes()
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    num_parameters = sum(p.numel() for p in net.parameters())
    config = load_config(
        Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml",
        [f"engine.zero_stage={stage}", f"train.precision={precision}", "train.global_batch=8", "train.micro_batch=2"],
    )
    engine = Engine(net, config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32) if stage else torch.float32
    peak = 0
    for _ in range(2):
        for _ in range(engine.num_micro_batches):
            inputs = torch.ones(2, 512, dtype=dtype)
            engine.backward(engine.deepspeed(inputs).float().pow(2).mean())
            peak = max(peak, live_bytes())
        engine.step(1e-3)
    engine.close()
    return (peak - before) / num_parameters


warnings.simplefilter("ignore")
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses fp16 on CPUs without instructions for it
init_distributed()
measured = peak_bytes_per_parameter(precision=sys.argv[1], stage=int(sys.argv[2]))
if dist.get_rank() == 0:
    print("MEASURED", measured, flush=True)
dist.destroy_process_group()

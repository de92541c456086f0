"""Where a step of the large model goes on a GPU, and what others take for it: parts of `gpu.py`.

    breakdown  64 rows: milliseconds by tower and direction, and of kernels by kind
    rivals     64 rows: Hugging Face's modules doing the same step, plain and under DeepSpeed, where they are installed

Both sides are bf16 throughout, with the config's dropout and the same weights, masks and samples' distribution;
DeepSpeed adds fp32 master weights, as it always does.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_parts.steps import SPECIAL, Rows, StepBench, free, step_input, train

from electra_dist.objectives.rtd import ReplacedTokenDetection

KINDS = {  # of kernels, by a word in their names; the first that fits
    "attention": ("flash", "fmha", "attention", "sdpa", "flex"),
    "head": ("mlm_head", "head_"),
    "dropout + norm": ("dropout_add_norm", "layer_norm", "dropout"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "_mm_"),
    "optimizer": ("adam", "multi_tensor"),
    "GELU": ("gelu",),
    "element-wise and copies": ("elementwise", "copy", "memcpy", "memset", "triton_poi", "fill"),
    "reductions": ("reduce", "triton_red", "triton_per"),
}


def breakdown(bench: StepBench) -> Rows:
    """Where a step's time goes: by part of the model (the generator's backward early), and by kind of kernel."""
    batch = bench.batches[1]
    module, ids_BS = bench.module(bench.backend), bench.ids(batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not bench.smoke)
    train(module, optimizer, ids_BS)  # states of the optimizer, compiled kernels
    rows: Rows = []
    for _ in range(1 if bench.smoke else 3):
        rows = [_part(bench, *each) for each in _parts(module, optimizer, ids_BS)]
    activities = [torch.profiler.ProfilerActivity.CPU if bench.smoke else torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        train(module, optimizer, ids_BS)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "the rest")
        spent[kind] += (event.self_cpu_time_total if bench.smoke else event.self_device_time_total) / 1e3
    rows += [{"operation": "kernels", "by": kind, "ms": ms, "peak_bytes": 0} for kind, ms in spent.most_common()]
    free()
    return rows


def _parts(
    module: ReplacedTokenDetection, optimizer: torch.optim.Optimizer, ids_BS: torch.Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what it does), to be done in order; values go from one to the next."""
    kept: dict[str, Any] = {}
    given = step_input(module, ids_BS)

    def keep(name: str, make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: kept.__setitem__(name, make())

    yield "positions and attention mask", keep("batch", lambda: module.batch(given))
    kept["masking"] = module.mask(kept["batch"])
    yield "generator, forward", keep("states", lambda: module.generator_states(kept["batch"], kept["masking"]))
    yield "head, forward", keep("mlm", lambda: module.fill(kept["batch"], kept["masking"], kept["states"]))
    yield "generator and head, backward", lambda: (given.first_scale * kept["mlm"].loss_sum).backward()
    replaced = keep("new", lambda: module.replace(kept["batch"], kept["masking"], kept["mlm"].sampled_M))
    yield "replacing", replaced
    yield "discriminator, forward", keep("read", lambda: module.read(kept["batch"], kept["new"][0]))
    tail, real_BS = module.towers.discriminator_head, kept["batch"].layout.is_real_BS
    yield "tail, forward", keep("rtd", lambda: tail(kept["read"], kept["new"][1], real_BS, backend=module.backend))
    weight = module.objective.rtd_weight * given.second_scale
    yield "discriminator and tail, backward", lambda: (weight * kept["rtd"].loss_sum).backward()
    yield "optimizer", lambda: (optimizer.step(), optimizer.zero_grad())


def _part(bench: StepBench, name: str, do: Callable[[], Any]) -> dict[str, Any]:
    if bench.smoke:
        do()
        return {"operation": "part", "by": name, "ms": 0.0, "peak_bytes": 0}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    begin.record()
    do()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"operation": "part", "by": name, "ms": begin.elapsed_time(end), "peak_bytes": peak}


def time_rivals(bench: StepBench) -> Rows:
    """Hugging Face's joint step from the same weights; `gathered` takes the masked slots before the vocabulary."""
    batch, operation = bench.batches[1], f"step B={bench.batches[1]}"
    if importlib.util.find_spec("transformers") is None:
        return [{"operation": operation, "by": "Hugging Face", "failed": "transformers is not installed here"}]
    found = []
    for gathered in (False, True):
        for engine in ("torch", "DeepSpeed ZeRO-1"):
            by = f"Hugging Face{', gathered' if gathered else ''} ({engine})"
            if engine != "torch" and (bench.smoke or importlib.util.find_spec("deepspeed") is None):
                found.append({"operation": operation, "by": by, "failed": "deepspeed is not used here"})
                continue
            step = _rival(bench, bench.ids(batch), gathered=gathered, under_deepspeed=engine != "torch")
            found.append(bench.time(operation, by, batch, step))
            del step
            free()
    return found


def _rival(bench: StepBench, ids_BS: torch.Tensor, *, gathered: bool, under_deepspeed: bool) -> Callable[[], None]:
    """A step; everything is made in the first, so that what it fails of is the row's."""
    objective, made = bench.config.objective, []

    def make() -> Any:
        from step_parts.rival import HuggingFace

        module = HuggingFace(copy.deepcopy(bench.towers), objective, SPECIAL, gathered=gathered)
        module = module.to(bench.device, bench.dtype).train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not bench.smoke)
        if not under_deepspeed:
            return module, optimizer.step, optimizer.zero_grad, lambda loss: loss.backward()
        import deepspeed

        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, str(value))
        os.environ.setdefault("MASTER_PORT", "29555")
        config = {
            "train_batch_size": len(ids_BS),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        return engine, engine.step, lambda: None, engine.backward

    def step() -> None:
        if not made:
            made.extend(make())
        module, update, clear, backward = made
        losses = module(ids_BS, torch.arange(len(ids_BS), device=ids_BS.device), 0, 1)
        backward(objective.mlm_weight * losses.mlm + objective.rtd_weight * losses.rtd)
        update()
        clear()

    return step

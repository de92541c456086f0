"""For how long does a save stall training, beside memcpy of the same bytes, DeepSpeed's save and torch.save?

    python benchmarks/run.py checkpoint                                          # a third of the next line's needs
    python benchmarks/run.py checkpoint --config configs/large_25pct_mask.yaml   # 18 GB of memory, 12 GB of disk

It builds both towers under DeepSpeed ZeRO-1 in bf16 on one CPU rank and measures four ways in turn, in one process:

    ours        CheckpointWriter.save until it returns; the write in the background is timed separately
    memcpy      of the same fp32 state into the same host buffer, the lower bound for a copying save
    DeepSpeed   engine.save_checkpoint, which writes before it returns (without sync and without digests)
    torch.save  the same fp32 state in one file (without sync and without digests)

Guarantee: the exit code is 1 if our median is more than 1.5 times memcpy's; the smoke run only reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from measure import REPOSITORY, TOY, Found, Json, ResultLine, alternate, print_table, timed

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.stored_copies import checkpoints
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig, Config
from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import owned_fragments, parameter_shapes
from electra_dist.model.towers import build_towers
from electra_dist.store.open_store import open_store

ROUNDS = 7
MOST = 1.5  # Largest allowed ratio of our stall to memcpy's time.


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (1); memcpy always uses one")
    parser.add_argument("--config", default="configs/base_size.yaml", help="config of the model (%(default)s)")


class CheckpointBench:
    """An engine with ELECTRA's towers, and four ways to save its fp32 state; each returns the seconds of the stall."""

    def __init__(self, config: Config, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.engine = Engine(build_towers(config.model, config.seed), config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
        self.fragments = owned_fragments(self.engine)
        self.views = [view for fragment in self.fragments for view in fragment.views.values()]
        for view in self.views:
            view.add_(0.5)  # New moments are one shared page of zeros, which is faster to read than memory.
        self.num_bytes = sum(view.nbytes for view in self.views)  # master weights and both moments
        self.store = open_store(str(folder / "checkpoints"))
        self.writer = CheckpointWriter([self.store], 0, CheckpointConfig(keep_last=1))
        self.writer.reserve(self.fragments)
        self.write_s: list[float] = []
        self.writer.on_commit = lambda state, timing, seconds: self.write_s.append(seconds)
        self.state = RunState(
            step=0,
            attempt=1,
            identity_sha256="0" * 64,
            corpus_fingerprint="",
            world_size=1,
            zero_stage=1,
            shapes=parameter_shapes(self.engine.deepspeed.module),
            shared={},
            versions={},
            bit_settings={},
        )

    def ours(self) -> float:
        """Save with our writer; afterwards, wait until the checkpoint is committed."""
        self.state = self.state.model_copy(update={"step": self.state.step + 1})
        stall_s = timed(self.writer.save, self.state, self.fragments)
        self.writer.wait()
        return stall_s

    def memcpy(self) -> None:
        """Copy the state into our writer's host buffer, whose pages exist already, because `reserve` touched them."""
        assert self.writer._buffer is not None
        address = self.writer._buffer.data_ptr()
        for view in self.views:
            ctypes.memmove(address, view.data_ptr(), view.nbytes)
            address += view.nbytes

    def deepspeed(self) -> float:
        """Save with DeepSpeed's `save_checkpoint`, whose messages go to stderr; delete the files afterwards."""
        with contextlib.redirect_stdout(sys.stderr):
            elapsed = timed(self.engine.deepspeed.save_checkpoint, str(self.folder / "deepspeed"), "x")
        shutil.rmtree(self.folder / "deepspeed")
        return elapsed

    def torch_save(self) -> float:
        """Save the same tensors with `torch.save`; delete the file afterwards."""
        views = [fragment.views for fragment in self.fragments]
        elapsed = timed(torch.save, views, self.folder / "torch.pt")
        (self.folder / "torch.pt").unlink()
        return elapsed


@contextlib.contextmanager
def opened(config_file: str, smoke: bool) -> Iterator[CheckpointBench]:
    """Build the towers of a config in a process group of one rank, or of toy size if `smoke`."""
    toy = TOY if smoke else []
    config = load_config(REPOSITORY / config_file, ["train.global_batch=1", "train.micro_batch=1", *toy])
    init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        bench = CheckpointBench(config, Path(folder))
        yield bench
        bench.engine.close()
    dist.destroy_process_group()


def time_ways(bench: CheckpointBench, rounds: int) -> Json:
    """Save the state in each of the four ways, in turn; return way -> its seconds and their median."""
    ways = {
        "ours": bench.ours,
        "memcpy": functools.partial(timed, bench.memcpy),
        "DeepSpeed": bench.deepspeed,
        "torch.save": bench.torch_save,
    }

    def synced(way: Callable[[], float]) -> float:
        stall_s = way()
        os.sync()  # Pages that the kernel has not yet written would slow the next way.
        return stall_s

    seconds = alternate({name: functools.partial(synced, way) for name, way in ways.items()}, rounds, warm_up=0)
    committed_steps = [checkpoint.step for checkpoint in checkpoints([bench.store])]
    assert committed_steps == [rounds], f"the store has steps {committed_steps}, expected only step {rounds}"
    return {name: {"seconds": times, "median_s": statistics.median(times)} for name, times in seconds.items()}


def measure(arguments: argparse.Namespace) -> Found:
    torch.set_num_threads(arguments.threads)
    with opened(arguments.config, arguments.smoke) as bench:
        ways = time_ways(bench, arguments.rounds)
    num_parameters = bench.num_bytes // 12
    write_s = statistics.median(bench.write_s)
    facts = f"{num_parameters / 1e6:.1f} M parameters, {bench.num_bytes / 1e9:.2f} GB of fp32 state"
    print(f"{facts}, ZeRO-1 bf16, 1 rank, {arguments.threads} thread(s), {arguments.rounds} rounds\n")
    of_memcpy = {name: way["median_s"] / ways["memcpy"]["median_s"] for name, way in ways.items()}
    of_ours = {name: way["median_s"] / ways["ours"]["median_s"] for name, way in ways.items()}
    rows = []
    for name, way in ways.items():
        times = [f"{seconds:.3f}" for seconds in (way["median_s"], min(way["seconds"]), max(way["seconds"]))]
        rows.append([name, *times, f"{of_memcpy[name]:.2f}", f"{of_ours[name]:.2f}"])
    print_table(["", "median s", "least", "most", "x memcpy", "x ours"], rows)
    print(f"ours, in the background: hashed, written, synced and committed after {write_s:.2f} s (median)")
    print(f"stall / memcpy: {of_memcpy['ours']:.2f} (at most {MOST})")
    fault = ""
    if of_memcpy["ours"] > MOST and not arguments.smoke:
        fault = "the stall is TOO LONG, look for the cause in electra_dist/checkpoint/writer.py"
    line = ResultLine(
        f"save, stall of the training, {facts}",
        f"{ways['ours']['median_s']:.2f} s, {of_memcpy['ours']:.2f} x memcpy of the same bytes",
        f"{of_ours['DeepSpeed']:.1f} x DeepSpeed's save, {of_ours['torch.save']:.1f} x torch.save",
    )
    sizes = {"threads": arguments.threads, "parameters": num_parameters, "state_bytes": bench.num_bytes}
    found = sizes | {"ways": ways, "ratio_to_memcpy": of_memcpy, "write_behind_s": write_s}
    return Found([line], found, fault)

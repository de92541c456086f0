"""Measure for how long a save stalls the training step: ours, memcpy of the same bytes, DeepSpeed's and torch.save.

    python benchmarks/checkpoint.py --save                                   # 18 GB of memory, 12 GB of disk
    python benchmarks/checkpoint.py --save --config configs/base_size.yaml   # a third of both

It builds ELECTRA-Large (both towers) under DeepSpeed ZeRO-1 in bf16 on one CPU rank and measures four ways in turn,
round after round, in one process:

    ours        CheckpointWriter.save until it returns; the write continues in the background and is timed separately,
                until the checkpoint is committed
    memcpy      libc's memmove of the same fp32 state into the same host buffer, the lower bound for a copying save
    DeepSpeed   engine.save_checkpoint, which writes before it returns (without sync and without digests)
    torch.save  the same fp32 state in one file (without sync and without digests)

It prints median, least and largest time, and the resident memory that each way adds at its peak.

Guarantee: it exits with code 1 if our median is more than 1.5 times memcpy's; the smoke run only reports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import psutil
import torch
import torch.distributed as dist
from measure import REPOSITORY, TOY, ResultLine, finish, parser, print_table

from electra_dist.checkpoint.background_writer import CheckpointWriter
from electra_dist.checkpoint.checkpoint import checkpoints
from electra_dist.checkpoint.manifest import RunState
from electra_dist.config import CheckpointConfig, Config
from electra_dist.config_file import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.engine.state_fragments import owned_fragments, parameter_shapes
from electra_dist.model.initial_weights import build_towers
from electra_dist.store.open_store import open_store

LARGE = "configs/large_25pct_mask.yaml"
MOST = 1.5  # Largest allowed ratio of our stall to memcpy's time.


@contextlib.contextmanager
def peak_memory(found: list[int], base: int | None = None) -> Iterator[None]:
    """Measure the peak of the process's resident memory during the `with` block, by a thread that samples it.

    The memory is sampled every 5 ms, so a shorter peak can be missed.

    Args:
        found: List to which the growth in bytes is appended when the block ends.
        base: Resident bytes above which the growth is counted; None means those at the start of the block.
    """
    process = psutil.Process()
    stop = threading.Event()
    start = base or process.memory_info().rss
    peak = start

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        found.append(peak - start)


class CheckpointBench:
    """An engine with ELECTRA's towers, and the four ways to save its fp32 state.

    Each of the four methods saves once and returns the seconds for which training would wait.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        """Build the engine and reserve the host buffer of our writer.

        Args:
            config: Model, optimizer and engine.
            folder: Folder for all checkpoints.
        """
        torch.manual_seed(0)
        self.folder = folder
        self.engine = Engine(build_towers(config.model, config.seed), config.train, config.engine, config.optimizer)  # type: ignore[arg-type]
        self.fragments = owned_fragments(self.engine.deepspeed.module, self.engine.optimizer)
        for fragment in self.fragments:
            for view in fragment.views.values():
                # New moments are one shared page of zeros, which is faster to read than memory. Writing to them
                # gives each its own pages.
                view.add_(0.5)
        self.before_buffer = psutil.Process().memory_info().rss
        self.store = open_store(str(folder / "checkpoints"))
        self.writer = CheckpointWriter([self.store], folder / "staging", 0, 1, CheckpointConfig(keep_last=1))
        self.writer.reserve(self.fragments)
        self.write_s: list[float] = []
        self.writer.on_commit = lambda state, timing, seconds: self.write_s.append(seconds)
        self.step = 0
        shapes = parameter_shapes(self.engine.deepspeed.module)
        self.state = RunState(
            step=0,
            attempt=1,
            identity_sha256="0" * 64,
            corpus_fingerprint="",
            world_size=1,
            zero_stage=1,
            shapes=shapes,
            shared={},
            versions={},
            bit_settings={},
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the state that is saved: the fp32 master weights and both moments."""
        return sum(view.nbytes for fragment in self.fragments for view in fragment.views.values())

    def ours(self) -> float:
        """Save with our writer and return the seconds until `save` returned; then wait until it is committed."""
        self.step += 1
        begin = time.perf_counter()
        self.writer.save(self.state.model_copy(update={"step": self.step}), self.fragments)
        stall_s = time.perf_counter() - begin
        self.writer.wait()
        return stall_s

    def memcpy(self) -> float:
        """Copy the state into our writer's host buffer with libc's memmove and return the seconds.

        The pages of the buffer exist already, because `reserve` touched them.
        """
        assert self.writer._buffer is not None
        begin = time.perf_counter()
        address = self.writer._buffer.data_ptr()
        for fragment in self.fragments:
            for view in fragment.views.values():
                ctypes.memmove(address, view.data_ptr(), view.nbytes)
                address += view.nbytes
        return time.perf_counter() - begin

    def deepspeed(self) -> float:
        """Save with DeepSpeed's `save_checkpoint` and return the seconds; delete the files afterwards.

        Its messages go to stderr.
        """
        begin = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            self.engine.deepspeed.save_checkpoint(str(self.folder / "deepspeed"), tag="x")
        elapsed = time.perf_counter() - begin
        shutil.rmtree(self.folder / "deepspeed")
        return elapsed

    def torch_save(self) -> float:
        """Save the same tensors with `torch.save` and return the seconds; delete the file afterwards."""
        begin = time.perf_counter()
        torch.save([fragment.views for fragment in self.fragments], self.folder / "torch.pt")
        elapsed = time.perf_counter() - begin
        (self.folder / "torch.pt").unlink()
        return elapsed


def measure(bench: CheckpointBench, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the four ways of saving in turn.

    Args:
        bench: Engine and state.
        rounds: Saves by each way.

    Returns:
        By name of the way: seconds of each save, their median, and the largest growth of resident memory in bytes. The
        growth of ours includes its host buffer.
    """
    ways: dict[str, Callable[[], float]] = {
        "ours": bench.ours,
        "memcpy": bench.memcpy,
        "DeepSpeed": bench.deepspeed,
        "torch.save": bench.torch_save,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, list[int]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            with peak_memory(memory[name], bench.before_buffer if name == "ours" else None):
                seconds[name].append(way())
            os.sync()  # Pages that the kernel has not yet written would slow the next way.
            print(f"round {number + 1}: {name:10} {seconds[name][-1]:7.3f} s", file=sys.stderr, flush=True)
    committed_steps = [checkpoint.step for checkpoint in checkpoints([bench.store])]
    assert committed_steps == [rounds], f"the store has steps {committed_steps}, expected only step {rounds}"
    return {
        name: {
            "seconds": [round(elapsed, 4) for elapsed in seconds[name]],
            "median_s": statistics.median(seconds[name]),
            "extra_peak_bytes": max(memory[name]),
        }
        for name in ways
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record the four ways; return the exit code, 1 if our stall is too long."""
    parse = parser(__doc__, rounds=7)
    parse.add_argument(
        "--threads", type=int, default=1, help="torch's threads (default: %(default)s); memcpy always uses one"
    )
    parse.add_argument("--config", default=LARGE, help="config whose model is saved (default: %(default)s)")
    parse.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the config; may be repeated"
    )
    parse.add_argument(
        "--folder", type=Path, help="folder in which to make the temporary folder of the checkpoints (default: /tmp)"
    )
    arguments = parse.parse_args(argv)
    rounds = 2 if arguments.smoke else arguments.rounds
    torch.set_num_threads(arguments.threads)
    settings = ["train.global_batch=1", "train.micro_batch=1", *(TOY if arguments.smoke else []), *arguments.set]
    config = load_config(REPOSITORY / arguments.config, settings)
    init_distributed()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = CheckpointBench(config, Path(folder))
        num_parameters = bench.num_bytes // 12
        found = measure(bench, rounds)
        write_s = statistics.median(bench.write_s)
        bench.engine.close()
    dist.destroy_process_group()
    ratios = {name: row["median_s"] / found["memcpy"]["median_s"] for name, row in found.items()}
    facts = f"{num_parameters / 1e6:.1f} M parameters, {bench.num_bytes / 1e9:.2f} GB of fp32 state"
    print(f"{facts}, ZeRO-1 bf16, 1 rank, {arguments.threads} thread(s), {rounds} rounds\n")
    report(found, ratios)
    print(f"ours, in the background: hashed, written, synced and committed after {write_s:.2f} s (median)")
    is_within_limit = ratios["ours"] <= MOST
    verdict = (
        "good" if is_within_limit else "TOO SLOW, look for the cause in electra_dist/checkpoint/background_writer.py"
    )
    print(f"stall / memcpy: {ratios['ours']:.2f} (at most {MOST}): {verdict}")
    of_ours = {name: row["median_s"] / found["ours"]["median_s"] for name, row in found.items()}
    line = ResultLine(
        f"save, stall of the training, {facts}",
        f"{found['ours']['median_s']:.2f} s, {ratios['ours']:.2f} x memcpy of the same bytes",
        f"{of_ours['DeepSpeed']:.1f} x DeepSpeed's save, {of_ours['torch.save']:.1f} x torch.save",
    )
    finish(
        "checkpoint",
        arguments,
        argv,
        [line],
        threads=arguments.threads,
        parameters=num_parameters,
        state_bytes=bench.num_bytes,
        ways=found,
        ratio_to_memcpy=ratios,
        write_behind_s=write_s,
    )
    return 0 if is_within_limit or arguments.smoke else 1


def report(found: dict[str, dict[str, Any]], ratios: dict[str, float]) -> None:
    """Print the table of the four ways.

    Args:
        found: Result of `measure`.
        ratios: By name of the way, its median divided by memcpy's.
    """
    rows = []
    for name, row in found.items():
        of_ours = row["median_s"] / found["ours"]["median_s"]
        times = [f"{seconds:.3f}" for seconds in (row["median_s"], min(row["seconds"]), max(row["seconds"]))]
        rows.append([name, *times, f"{ratios[name]:.2f}", f"{of_ours:.2f}", f"{row['extra_peak_bytes'] / 1e9:.2f}"])
    print_table(["", "median s", "least", "most", "x memcpy", "x ours", "extra peak GB"], rows)


if __name__ == "__main__":
    sys.exit(main())

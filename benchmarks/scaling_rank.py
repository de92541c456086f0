"""One rank of `scaling.py`: a process that trains on synthetic rows, and times steps or their collectives.

    scaling_rank.py FOLDER ROWS KEY=VALUE...

How: it waits for the files FOLDER/go-0, go-1, and so on. "steps N" asks for N training steps, "record N" for the same
and for a record of the collectives of the last one, "communication N" for N repetitions of the recorded collectives
without the computation around them, and "end" for the end of the process. Rank 0 answers the file go-K in
FOLDER/done-K, with the seconds of each step or repetition and the mean number of bytes that it sent in one, as counted
by its network interface. ROWS is the number of rows per rank, and the KEY=VALUE words change the config.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import REPOSITORY
from step_parts.variants import SPECIAL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from electra_dist.config_file import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build_objective import build_objective

_SENT_BYTES_COLUMN = 8  # Of the counters in /proc/net/dev.


def sent_bytes() -> int:
    """Return the bytes that the interface eth0 has sent since it came up; 0 if there is no eth0."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == "eth0":
            return int(counters.split()[_SENT_BYTES_COLUMN])
    return 0


def put(file: Path, text: str) -> None:
    """Write a file and give it its name last, because another process polls for the name and then reads the whole."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.rename(file)


class CollectiveRecorder(TorchDispatchMode):
    """Record the collectives that are called in a `with` block, to repeat them without the computation around them.

    Only shapes and dtypes are kept; the repetitions exchange zeros. Functional collectives are not recorded.
    """

    def __init__(self) -> None:
        """Create a recorder that has recorded no collectives."""
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []  # (operator, positional arguments, keyword arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and return its result; if it is a collective, record it with zeros in place of its data."""
        if func.namespace == "c10d":
            self._calls.append(tree_map_only(torch.Tensor, torch.zeros_like, (func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def repeat(self) -> None:
        """Call the recorded collectives again, in their order. All ranks must call this method together.

        Consecutive calls of one operator are started together, as a step with overlap starts its buckets. The next
        operator waits for all of them, because the gather of the parameters needs the summed gradients.
        """
        for _, calls in itertools.groupby(self._calls, key=lambda call: call[0]):
            results = [func(*args, **kwargs) for func, args, kwargs in calls]
            for result in results:
                # An operator returns a handle, or a tuple that ends with it.
                handle = result[-1] if isinstance(result, tuple) else result
                handle.wait()


def time_repetitions(run: Callable[[int], object], count: int) -> tuple[list[float], float]:
    """Return the seconds of each repetition, and the mean number of bytes that this rank has sent in one.

    All ranks must call this function together. They begin the first repetition together, later ones as they come.

    Args:
        run: what to time; called with the number of the repetition, from 0.
        count: number of repetitions, at least 1.
    """
    seconds = []
    dist.barrier()
    before = sent_bytes()
    for number in range(count):
        begin = time.perf_counter()
        run(number)
        seconds.append(time.perf_counter() - begin)
    return seconds, (sent_bytes() - before) / count


def main() -> None:
    """Build the engine, then answer requests until one of them is "end"."""
    folder, rows_word, *settings = sys.argv[1:]
    rows_per_rank = int(rows_word)
    config = load_config(REPOSITORY / "configs/small.yaml", settings)
    init_distributed()
    module = build_objective(config.model, config.objective, SPECIAL, config.seed)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())  # Before the engine changes them.
    engine = Engine(module, config.train, config.engine, config.optimizer)
    rank = dist.get_rank()
    rows_B = torch.arange(rows_per_rank) + rank * rows_per_rank
    ids_BS = torch.randint(5, config.model.vocab_size, (len(rows_B), config.data.seq_len))
    scales = 1.0 / loss_counts(ids_BS, SPECIAL, config.objective).sum(0)
    recorder = CollectiveRecorder()

    def take_step(step: int) -> None:
        """Take one training step. Collective."""
        engine.backward(engine.forward(StepInput(ids_BS, rows_B, step, config.seed, *scales)).loss)
        engine.step(1e-4)

    def record_step(step: int) -> None:
        """Take one training step and record its collectives, in place of those recorded before. Collective."""
        nonlocal recorder
        recorder = CollectiveRecorder()
        with recorder:
            take_step(step)

    tasks = {"steps": take_step, "record": record_step, "communication": lambda _: recorder.repeat()}
    for number in itertools.count():
        request = Path(folder) / f"go-{number}"
        while not request.exists():
            time.sleep(0.02)
        word, _, count = request.read_text().partition(" ")
        if word == "end":
            break
        seconds, sent = time_repetitions(tasks[word], int(count))
        if rank == 0:
            facts = {"seconds": seconds, "sent_bytes": sent, "parameters": num_parameters}
            put(Path(folder) / f"done-{number}", json.dumps(facts))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

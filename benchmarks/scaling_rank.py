"""One rank of `scaling.py`: a process that trains on synthetic rows and times steps on request.

    scaling_rank.py FOLDER ROWS KEY=VALUE...

How: it waits for the files FOLDER/go-0, go-1, and so on. Each holds a number of steps, which it takes and times; 0
ends the process. Rank 0 answers each in FOLDER/done-N with the seconds of each step and the bytes that it sent per
step, as counted by its network interface. ROWS is the number of rows per rank, and the KEY=VALUE words change the
config.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measure import REPOSITORY
from step_parts.variants import SPECIAL

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


def main() -> None:
    """Build the engine, then take and time steps for every request, until a request of 0 steps arrives."""
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
    for number in itertools.count():
        request = Path(folder) / f"go-{number}"
        while not request.exists():
            time.sleep(0.02)
        steps = int(request.read_text())
        if steps == 0:
            break
        seconds = []
        dist.barrier()  # All ranks start the first step together.
        before = sent_bytes()
        for step in range(steps):
            begin = time.perf_counter()
            engine.backward(engine.forward(StepInput(ids_BS, rows_B, step, config.seed, *scales)).loss)
            engine.step(1e-4)
            seconds.append(time.perf_counter() - begin)
        sent = (sent_bytes() - before) / steps
        if rank == 0:
            facts = {"seconds": seconds, "sent_bytes": sent, "parameters": num_parameters}
            put(Path(folder) / f"done-{number}", json.dumps(facts))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

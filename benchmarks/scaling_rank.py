"""A rank of `scaling.py`: trains on synthetic rows, and times a few steps whenever it is told to.

    scaling_rank.py FOLDER ROWS KEY=VALUE...

It waits for FOLDER/go-0, go-1, ...; each holds a number of steps. Rank 0 answers in FOLDER/done-N: seconds a step and
bytes that it sent a step, as its network interface counted them. 0 steps end it.
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
from step_parts.ways import SPECIAL

from electra_dist.config_file import load_config
from electra_dist.engine.distributed import init_distributed
from electra_dist.engine.engine import Engine
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build import build_objective


def sent_bytes() -> int:
    """By eth0 since it is up; 0 where there is none."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    found = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return int(found[0][8]) if found else 0


def put(file: Path, text: str) -> None:
    """Whole or not at all: somebody polls for it."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def main() -> None:
    folder, num_rows, *settings = sys.argv[1:]
    config = load_config(REPOSITORY / "configs/small.yaml", settings)
    init_distributed()
    module = build_objective(config.model, config.objective, SPECIAL, config.seed)
    sizes = [p.numel() for p in module.parameters()]
    engine, rank = Engine(module, config.train, config.engine, config.optimizer), dist.get_rank()
    rows_B = torch.arange(int(num_rows)) + rank * int(num_rows)
    ids_BS = torch.randint(5, config.model.vocab_size, (len(rows_B), config.data.seq_len))
    scales = 1.0 / loss_counts(ids_BS, SPECIAL, config.objective).sum(0)
    for number in itertools.count():
        order = Path(folder) / f"go-{number}"
        while not order.exists():
            time.sleep(0.02)
        steps = int(order.read_text())
        if steps == 0:
            break
        seconds = []
        dist.barrier()
        before = sent_bytes()
        for step in range(steps):
            begin = time.perf_counter()
            engine.backward(engine.forward(StepInput(ids_BS, rows_B, step, config.seed, *scales)).loss)
            engine.step(1e-4)
            seconds.append(time.perf_counter() - begin)
        sent = (sent_bytes() - before) / steps
        if rank == 0:
            facts = {"seconds": seconds, "sent_bytes": sent, "parameters": sum(sizes)}
            put(Path(folder) / f"done-{number}", json.dumps(facts))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

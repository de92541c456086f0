"""What `restart.py` compares with: the same model under DeepSpeed's own save_checkpoint and load_checkpoint.

    deepspeed --num_gpus 1 benchmarks/restart_rival.py --config FILE --folder DIR

A script as one writes it: build, initialise, load what is there, train from there, save. It verifies nothing, reads no
corpus (its rows are random) and writes no log; its module, optimizer and DeepSpeed settings are ours. Two steps from
nothing, then it saves; two more from a checkpoint. The last line is JSON: when the first step was done, and seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from electra_dist.config_file import load_config
from electra_dist.engine.distributed import init_distributed
from electra_dist.engine.engine import Engine
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build import build_objective

STEPS = 2


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--config", required=True)
    parse.add_argument("--folder", type=Path, required=True)
    parse.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parse.parse_args()
    times = [time.time()]
    config = load_config(arguments.config, [])
    init_distributed()
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    engine = Engine(
        build_objective(config.model, config.objective, special, config.seed),
        config.train,
        config.engine,
        config.optimizer,
    )
    times.append(time.time())
    is_there = (arguments.folder / "latest").exists()
    if is_there:
        engine.deepspeed.load_checkpoint(str(arguments.folder))
    times.append(time.time())
    rows_B = torch.arange(config.train.micro_batch)
    for step in range(STEPS):
        ids_BS = torch.randint(5, config.model.vocab_size, (len(rows_B), config.data.seq_len))
        scales = 1.0 / loss_counts(ids_BS, special, config.objective).sum(0)
        engine.backward(engine.forward(StepInput(ids_BS, rows_B, step, config.seed, *scales)).loss)
        engine.step(1e-4)
        if step == 0:
            times.append(time.time())
    if not is_there:
        engine.deepspeed.save_checkpoint(str(arguments.folder))
    names = ("build", "restore", "first step")
    spent = {name: end - begin for name, begin, end in zip(names, times, times[1:])}
    print(json.dumps({"imported": times[0], "first_step_done": times[-1], "resumed": is_there, "seconds": spent}))


if __name__ == "__main__":
    main()

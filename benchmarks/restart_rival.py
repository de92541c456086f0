"""Plain DeepSpeed training script with which `restart.py` compares the start of our training.

    deepspeed --num_gpus 1 benchmarks/restart_rival.py --config FILE --folder DIR

It loads a checkpoint if there is one, takes two steps, and else saves one. Its module, optimizer and DeepSpeed
settings are ours. It verifies nothing, reads no corpus (its rows are random) and writes no log. Its last line is JSON:
when its imports and its first step were done, and the seconds of its parts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.process_group import init_distributed
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

STEPS = 2  # Of each start.


def main() -> None:
    """Start or resume training, take the steps, and print when each part of the start was done."""
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--config", required=True, help="config with the model and the engine settings")
    parse.add_argument("--folder", type=Path, required=True, help="folder of the DeepSpeed checkpoint")
    parse.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parse.parse_args()
    times = [time.time()]
    config = load_config(arguments.config, [])
    init_distributed()
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    module = build_objective(config.model, config.objective, special, config.seed)
    engine = Engine(module, config.train, config.engine, config.optimizer)
    times.append(time.time())
    has_checkpoint = (arguments.folder / "latest").exists()
    if has_checkpoint:
        engine.deepspeed.load_checkpoint(str(arguments.folder))
    times.append(time.time())
    rows_B = torch.arange(config.train.micro_batch)
    for step in range(STEPS):
        ids_BS = torch.randint(5, config.model.vocab_size, (len(rows_B), config.data.seq_len))
        scales = 1.0 / engine.module.loss_counts(ids_BS).sum(0)
        engine.backward(engine.forward(StepInput(ids_BS, rows_B, step, config.seed, *scales)).loss)
        engine.step(1e-4)
        if step == 0:
            times.append(time.time())
    if not has_checkpoint:
        engine.deepspeed.save_checkpoint(str(arguments.folder))
    names = ("build", "restore", "first step")
    spent = {name: end - begin for name, begin, end in zip(names, times, times[1:])}
    facts = {"imported": times[0], "first_step_done": times[-1], "resumed": has_checkpoint, "seconds": spent}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

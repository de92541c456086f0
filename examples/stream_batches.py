"""Read the rows of a run, step by step and in its order, in a training loop of your own.

    python examples/stream_batches.py RUN [--steps 20] [--first-step 0]

RUN is the folder of a run. The loop trains a new model on the rows that the run has read, and can begin at any step:
the rows of a step do not depend on the steps before it.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import electra_dist as ed


def main() -> None:
    """Train the run's networks from their initial weights by a plain loop, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--first-step", type=int, default=0)
    arguments = parser.parse_args()

    config = ed.open_run(arguments.run)
    with ed.open_corpus(arguments.run) as corpus:
        objective = ed.build_objective(config, corpus)
        optimizer = torch.optim.AdamW(objective.parameters(), lr=5e-4)
        batches = corpus.batches(first_step=arguments.first_step)
        for step, ids in enumerate(itertools.islice(batches, arguments.steps), start=arguments.first_step):
            output = objective(ed.step_input(objective, ids, step, config.seed))
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: {len(ids)} rows, loss {output.loss.item():.3f}")


if __name__ == "__main__":
    main()

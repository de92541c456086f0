"""Write an objective of your own, and train it in a plain loop.

    python examples/add_an_objective.py CONFIG [--steps 20]

CONFIG is the config of a run; its corpus is read. The objective here is replaced-token detection with label smoothing:
the discriminator's targets are 0.05 and 0.95 in place of 0 and 1. An objective is a class with the method
`compute_loss`. Masks, samples of the generator and dropout are keyed by seed, step and row, so two calls with the same
input have the same loss.

The plain loop is good for a first look. To train at scale, with restarts: put the class into a file in
electra_dist/objectives/, its name into `build_objective.py` and `config/sections/objective.py` (CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import electra_dist as ed
from electra_dist.objectives.base import Batch, StepOutput
from electra_dist.objectives.rtd import ReplacedTokenDetection

SMOOTHING = 0.05


class SmoothedDetection(ReplacedTokenDetection):
    """Replaced-token detection whose targets are SMOOTHING for original tokens and 1 - SMOOTHING for replaced ones."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the generator's loss plus the smoothed loss of the discriminator, both sums times their scales."""
        corruption = self.corrupt(batch)  # masks tokens, and puts the generator's samples in their places
        states_BSH = self.read(batch, corruption.corrupted_BS)
        logit_BS = self.towers.discriminator_head.logits(states_BSH).view_as(batch.ids_BS)
        target_BS = corruption.label_BS.float() * (1 - 2 * SMOOTHING) + SMOOTHING
        loss_BS = F.binary_cross_entropy_with_logits(logit_BS.float(), target_BS, reduction="none")
        is_real_BS = batch.layout.is_real_BS
        detection_sum = loss_BS[is_real_BS].sum()
        loss = corruption.loss + batch.values.rtd_weight * batch.second_scale * detection_sum
        sums = corruption.sums | {"rtd_loss_sum": detection_sum, "rtd_weight": is_real_BS.sum()}
        return self.output(batch, loss, sums, logit_BS, corruption.label_BS)


def main() -> None:
    """Train the objective on the first steps of a corpus and print its loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config of a run")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    config = ed.load_config(arguments.config)
    with ed.open_corpus(config) as corpus:
        objective = SmoothedDetection(ed.build_towers(config), config.objective, corpus.special)
        optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3)
        for step in range(arguments.steps):
            ids = corpus.batch(step, config.train.global_batch)
            output = objective(ed.step_input(objective, ids, step, config.seed))
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            print(f"step {step + 1:>3}  loss {output.loss.item():.4f}")


if __name__ == "__main__":
    main()

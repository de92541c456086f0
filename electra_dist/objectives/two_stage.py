"""Two-stage training: first the generator alone, then the discriminator against a frozen one (section 3.2).

Steps below `generator_only_steps` train the generator by MLM; the discriminator does not run. At that step the
discriminator becomes a copy of the generator, embeddings included, and the generator is frozen: its forward has no
gradient and its learning rate is 0. The copy and the learning rates are the training loop's (`engine/two_stage.py`).
In evaluation both run, whatever the step.

The towers must be of one size and share nothing (`model.sharing: none`).
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.rtd import ReplacedTokenDetection


def is_generators(name: str) -> bool:
    """Return whether a parameter of the objective learns in the first stage and rests in the second."""
    return name.startswith(("towers.generator.", "towers.generator_head.", "towers.embeddings."))


class TwoStageDetection(ReplacedTokenDetection):
    """Replaced-token detection whose towers learn one after the other."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return one of the two losses at a time."""
        generator_only = self.training and batch.step < self.objective.generator_only_steps
        with torch.set_grad_enabled(torch.is_grad_enabled() and generator_only):
            corruption = self.corrupt(batch)
        if generator_only:
            return self.output(batch, corruption.loss, corruption.sums)
        rtd = self.detect(batch, corruption)
        loss = self.objective.rtd_weight * batch.second_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)

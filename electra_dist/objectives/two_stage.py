"""Implements two-stage training (ELECTRA paper, section 3.2): first the generator trains, then the discriminator.

In the first `objective.generator_only_steps` steps the generator trains by MLM and the discriminator does not run.
Then the discriminator becomes a copy of the generator, embeddings included, and learns from the generator's samples.
The generator is frozen from there on: its forward pass records no gradient and its learning rate is 0.
`engine/stage_switch.py` makes the copy and sets the learning rates. In evaluation both run, whatever the step.

Limits: the two networks must be of one size and share nothing (`model.sharing: none`).
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.rtd import ReplacedTokenDetection


class TwoStageDetection(ReplacedTokenDetection):
    """Replaced-token detection in two stages: the generator trains alone, then the discriminator."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the loss of the network that trains at this step; in evaluation, the discriminator's loss."""
        in_first_stage = self.training and batch.step < self.objective.generator_only_steps
        # The generator is frozen after the first stage, so its forward pass then records no gradient.
        with torch.set_grad_enabled(torch.is_grad_enabled() and in_first_stage):
            corruption = self.corrupt(batch)
        if in_first_stage:
            return self.output(batch, corruption.loss, corruption.sums)

        rtd = self.detect(batch, corruption)
        loss = batch.values.rtd_weight * batch.second_scale * rtd.loss_sum
        sums = corruption.sums | rtd_sums(rtd)
        return self.output(batch, loss, sums, rtd.logits_T, corruption.label_BS, corruption.corrupted_BS)

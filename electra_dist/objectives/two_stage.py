"""Two-stage training: first the generator alone, then the discriminator against a frozen one (section 3.2).

Steps below `generator_only_steps` train the generator by MLM; the discriminator does not run. At that step the
discriminator becomes a copy of the generator, embeddings included, and the generator is frozen: its forward has no
gradient and its learning rate is 0. The copy and the learning rates are the training loop's (`engine/two_stage.py`).
In evaluation both run, whatever the step.

The towers must be of one size and share nothing (`model.sharing: none`).
"""

from __future__ import annotations

import torch

from electra_dist.objectives.base import StepOutput, rtd_sums
from electra_dist.objectives.rtd import ReplacedTokenDetection


def is_generators(name: str) -> bool:
    """Whether a parameter of the objective learns in the first stage and rests in the second."""
    return name.startswith(("towers.generator.", "towers.generator_head.", "towers.embeddings."))


class TwoStageDetection(ReplacedTokenDetection):
    """Replaced-token detection whose towers learn one after the other."""

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> StepOutput:
        """See `Objective.forward`; one of the two losses at a time."""
        batch = self.batch(ids_BS, row_B, step, seed)
        generator_only = self.training and step < self.objective.generator_only_steps
        with torch.set_grad_enabled(torch.is_grad_enabled() and generator_only):
            corruption = self.corrupt(batch, mlm_scale)
        if generator_only:
            loss = corruption.loss
            return self.output(batch, loss, corruption.sums)
        rtd = self.detect(batch, corruption, batch.layout.is_real_BS)
        loss = self.objective.rtd_weight * rtd_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)

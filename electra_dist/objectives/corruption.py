"""From rows to corrupted rows: masks, the generator's loss and samples, and which tokens changed by them.

Guarantee: masks and samples are functions of (seed, step, row). Samples carry no gradient. A label is 1 only where the
id differs from the original, so a right guess is "original". Without a network (`objective.generator`) there is no MLM
loss.

Shapes: B rows, S tokens, N slots a row, M = B * N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.mlm_head import MlmHeadOutput
from electra_kernels.replace import replace_and_label

from electra_dist.config import ObjectiveConfig
from electra_dist.model.rows import SpecialIds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import GENERATOR, Batch, Objective, mlm_sums
from electra_dist.objectives.early_gradients import with_gradients_now
from electra_dist.objectives.fixed_generator import FixedGenerator
from electra_dist.objectives.masking import Masking


class Corruption(NamedTuple):
    """The discriminator's input and where it comes from."""

    masking: Masking
    corrupted_BS: torch.Tensor  # int64
    label_BS: torch.Tensor  # bool, True where the id differs from the original
    loss: torch.Tensor  # the generator's, weighted and scaled, with gradient; 0 without a network
    sums: dict[str, torch.Tensor]


class CorruptingObjective(Objective):
    """An objective whose discriminator reads text with replaced tokens."""

    def __init__(
        self,
        towers: ElectraTowers,
        objective: ObjectiveConfig,
        special: SpecialIds,
        backend: str = "auto",
        fixed_generator: FixedGenerator | None = None,
    ) -> None:
        """See `Objective`; `fixed_generator` stands in for the generator's network."""
        super().__init__(towers, objective, special, backend)
        self.fixed_generator = fixed_generator
        self.early_generator = False  # `engine.early_generator`

    def corrupt(self, batch: Batch) -> Corruption:
        """Mask the rows, fill the masks, put the samples in; `first_scale` is of masked slots."""
        masking = self.mask(batch)
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        if self.fixed_generator is not None:
            sampled = self.fixed_generator(target_BN, batch.row_B, batch.step, batch.seed)
            loss = masking.weight_BN.new_zeros(())
            sums = {"sampled_correct": ((sampled == target_BN) * masking.weight_BN).sum()}
        else:
            mlm = self.fill(batch, masking, self.generator_states(batch, masking))
            sampled, sums = mlm.sampled_M, mlm_sums(mlm)
            loss = self.objective.mlm_weight * batch.first_scale * mlm.loss_sum
            if self.early_generator and loss.requires_grad:
                loss = with_gradients_now(loss, list(self.parameters()))
        corrupted_BS, label_BS = self.replace(batch, masking, sampled)
        return Corruption(masking, corrupted_BS, label_BS, loss, sums)

    def generator_states(self, batch: Batch, masking: Masking) -> torch.Tensor:
        """Return [M, H]: the generator's states of the slots."""
        embedded = self.towers.embed(masking.input_BS, batch.layout)
        hidden = self.towers.generator(embedded, batch.scope, self.noise(batch, GENERATOR))
        return gather_masked(hidden, masking.position_BN, backend=self.backend)

    def fill(self, batch: Batch, masking: Masking, hidden_MH: torch.Tensor) -> MlmHeadOutput:
        """Return MLM loss and samples of the slots, whose states are `hidden_MH`."""
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        return self.predict(batch, hidden_MH, target_BN, masking.weight_BN)

    def predict(
        self, batch: Batch, hidden_MH: torch.Tensor, target_BN: torch.Tensor, weight_BN: torch.Tensor
    ) -> MlmHeadOutput:
        """Return the loss of the generator's head and a sample for each slot.

        Args:
            batch: names the step and the rows, which key the samples.
            hidden_MH: the generator's states of the slots.
            target_BN: int64 true tokens.
            weight_BN: float32 weights in the loss.
        """
        return self.towers.generator_head(
            hidden_MH,
            self.towers.embeddings.word.weight,
            target_BN.flatten(),
            weight_BN.flatten(),
            seed=batch.seed,
            step=batch.step,
            row_M=batch.slot_number_M(target_BN.shape[1]),
            temperature=self.objective.temperature,
            disallow_correct=self.objective.disallow_correct,
            backend=self.backend,
        )

    def replace(self, batch: Batch, masking: Masking, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows with the samples in their slots, and where ids changed."""
        return replace_and_label(batch.ids_BS, masking.position_BN, masking.weight_BN, sampled, backend=self.backend)

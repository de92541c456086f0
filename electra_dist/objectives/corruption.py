"""Corrupts rows: masks tokens, samples replacements from the generator, and labels the tokens that changed.

Guarantee: masks and samples are functions of (seed, step, row). Samples carry no gradient. A label is 1 only where the
id differs from the original, so a sample that equals the original counts as original. With a fixed generator
(`objective.generator`) there is no MLM loss.

Shapes: B rows, S tokens, N slots a row, M = B * N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.mlm_head import MlmHeadOutput
from electra_kernels.replace_tokens import replace_and_label

from electra_dist.config import ObjectiveConfig
from electra_dist.model.row_layout import SpecialIds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import GENERATOR, Batch, Objective, mlm_sums
from electra_dist.objectives.frequency_generator import FixedGenerator
from electra_dist.objectives.gradients_in_forward import with_gradients_now
from electra_dist.objectives.masking import Masking


class Corruption(NamedTuple):
    """Corrupted rows of a batch, with their labels and the generator's loss."""

    masking: Masking  # the slots that were masked
    corrupted_BS: torch.Tensor  # int64 ids with the samples in the slots: what the discriminator reads
    label_BS: torch.Tensor  # bool, True where the id differs from the original
    loss: torch.Tensor  # the generator's MLM loss, weighted and scaled, with gradient; 0 with a fixed generator
    sums: dict[str, torch.Tensor]  # metric sums of the generator, by names of `Sums`


class CorruptingObjective(Objective):
    """Base class of objectives whose large tower reads text with replaced tokens."""

    def __init__(
        self,
        towers: ElectraTowers,
        objective: ObjectiveConfig,
        special: SpecialIds,
        backend: str = "auto",
        fixed_generator: FixedGenerator | None = None,
    ) -> None:
        """Store towers and settings.

        The attribute `early_generator` starts as False; the caller sets it to compute the generator's gradients before
        the discriminator runs.

        Args:
            towers: towers that were built for `objective`.
            objective: the config's section `objective`.
            special: ids of the special tokens.
            backend: `kernels.backend` of the config.
            fixed_generator: draws the replacements in place of a network; None if the towers have a generator.
        """
        super().__init__(towers, objective, special, backend)
        self.fixed_generator = fixed_generator
        # `engine.early_generator`: compute the generator's gradients before the discriminator runs.
        self.early_generator = False

    def corrupt(self, batch: Batch) -> Corruption:
        """Mask the rows, let the generator sample tokens for the slots, and put the samples in their place.

        A slot is a place for one masked position of a row. `batch.first_scale` must be 1 / (number of masked slots),
        for a mean of the generator's loss.
        """
        masking = self.mask(batch)
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        if self.fixed_generator is not None:
            sampled = self.fixed_generator(target_BN, batch.row_B, batch.step, batch.seed)
            loss = masking.weight_BN.new_zeros(())
            sums = {"sampled_correct": ((sampled == target_BN) * masking.weight_BN).sum()}
        else:
            mlm = self.fill(batch, masking, self.generator_states(batch, masking))
            sampled = mlm.sampled_M
            sums = mlm_sums(mlm)
            loss = self.objective.mlm_weight * batch.first_scale * mlm.loss_sum
            if self.early_generator and loss.requires_grad:
                loss = with_gradients_now(loss, list(self.parameters()))
        corrupted_BS, label_BS = self.replace(batch, masking, sampled)
        return Corruption(masking, corrupted_BS, label_BS, loss, sums)

    def generator_states(self, batch: Batch, masking: Masking) -> torch.Tensor:
        """Run the generator on the masked rows; return its states at the M masked slots, [M, H]."""
        embedded = self.towers.embed(masking.input_BS, batch.layout)
        hidden = self.towers.generator(embedded, batch.attention_mask, self.dropout_keys(batch, GENERATOR))
        return gather_masked(hidden, masking.position_BN, backend=self.backend)

    def fill(self, batch: Batch, masking: Masking, hidden_MH: torch.Tensor) -> MlmHeadOutput:
        """Return the generator's MLM loss over the masked slots, and a token sampled for each slot.

        Args:
            batch: the original rows, whose ids are the targets.
            masking: slots of each row and their weights.
            hidden_MH: the generator's states of the slots.
        """
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        return self.predict(batch, hidden_MH, target_BN, masking.weight_BN)

    def predict(
        self, batch: Batch, hidden_MH: torch.Tensor, target_BN: torch.Tensor, weight_BN: torch.Tensor
    ) -> MlmHeadOutput:
        """Return the loss of the generator's head over any slots, and a sample for each.

        Args:
            batch: gives seed, step and row numbers, which key the samples.
            hidden_MH: the generator's states of the slots, N per row.
            target_BN: int64 original tokens of the slots.
            weight_BN: float32 weights of the slots in the loss; 0 for empty ones.
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
        """Return the rows with the samples in their slots, int64 [B, S], and which ids changed, bool [B, S].

        Args:
            batch: the original rows.
            masking: slots of each row and their weights.
            sampled: int64 sampled tokens, one per slot, [B, N] or [M].
        """
        return replace_and_label(batch.ids_BS, masking.position_BN, masking.weight_BN, sampled, backend=self.backend)

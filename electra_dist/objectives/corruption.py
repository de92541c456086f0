"""Corrupts rows: masks tokens, samples replacements from the generator, and labels the tokens that changed.

Guarantee: masks and sampled tokens are functions of (seed, step, row) and carry no gradient. A label is 1 only where
the id differs from the original, so a sampled token that equals the original counts as original. A generator with
fixed token probabilities (`objective.generator` "uniform" or "unigram") learns nothing, so it has no MLM loss. A
frozen generator learns nothing either: its MLM loss is measured for the metrics, and is no part of the loss.

Shapes: B rows, S tokens, N slots (places for one masked position each) in every row, M = B * N. Rows with fewer masked
positions leave slots empty. An empty slot is at position 0 and has weight 0 in every loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.mlm_head import MlmHeadOutput
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import gather_masked, replace_and_label

from electra_dist.config import ObjectiveConfig
from electra_dist.model.heads import token_entropies
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import GENERATOR, Batch, Objective, mlm_sums
from electra_dist.objectives.generators import FixedGenerator, FrozenGenerator, RandomReplacements
from electra_dist.objectives.masking import Masking


class Corruption(NamedTuple):
    """Rows in which a generator replaced the masked tokens, with their labels and the generator's loss."""

    masking: Masking  # the masked positions, one per slot, and the slots' weights
    corrupted_BS: torch.Tensor  # int64 ids with the sampled tokens in place: what the discriminator reads
    label_BS: torch.Tensor  # bool, True where the id differs from the original
    loss: torch.Tensor  # the generator's MLM loss, weighted and scaled, with gradient; 0 if it does not learn
    sums: dict[str, torch.Tensor]  # metric sums of the generator, by names of `Sums`


class CorruptingObjective(Objective):
    """Base class of objectives whose discriminator reads text in which a generator replaced tokens.

    `fixed_generator` or `frozen_generator`, if given, draws the replacements in place of a generator that is trained.
    `random_replacements`, if given, draws a share of the replacements at random (`objective.random_share`).
    """

    frozen_generator: FrozenGenerator | None

    def __init__(
        self,
        towers: ElectraTowers,
        objective: ObjectiveConfig,
        special: SpecialIds,
        backend: str = "auto",
        fixed_generator: FixedGenerator | None = None,
        random_replacements: RandomReplacements | None = None,
        frozen_generator: FrozenGenerator | None = None,
    ) -> None:
        super().__init__(towers, objective, special, backend)
        self.fixed_generator = fixed_generator
        self.random_replacements = random_replacements
        # An ordinary attribute would become a submodule, whose parameters DeepSpeed partitions, trains and saves.
        # Writing to __dict__ avoids that.
        self.__dict__["frozen_generator"] = frozen_generator

    def corrupt(self, batch: Batch) -> Corruption:
        """Mask the rows, and put a token drawn by the generator at each masked position.

        The result's `loss` is the generator's MLM loss over these positions, times `batch.first_scale` and
        `mlm_weight`; it is 0 with a fixed or frozen generator.
        """
        masking = self.mask(batch)
        if self.fixed_generator is not None:
            return self._corrupt_by_fixed_generator(batch, masking, self.fixed_generator)
        if self.frozen_generator is not None:
            return self._corrupt_by_frozen_generator(batch, masking)
        states_MH = self.generator_states(batch, masking)
        mlm = self.fill(batch, masking, states_MH)
        sums = mlm_sums(mlm) | self.entropy_sums(batch, states_MH, masking.weight_BN)
        loss = batch.values.mlm_weight * batch.first_scale * mlm.loss_sum
        corrupted_BS, label_BS = self.replace(batch, masking, self._with_random_tokens(batch, masking, mlm.sampled_M))
        return Corruption(masking=masking, corrupted_BS=corrupted_BS, label_BS=label_BS, loss=loss, sums=sums)

    def _with_random_tokens(self, batch: Batch, masking: Masking, sampled_M: torch.Tensor) -> torch.Tensor:
        """Replace some sampled tokens by random ones; return int64 [B, N], or [M] unchanged if the share is 0."""
        share = batch.values.random_share
        if self.random_replacements is None or share == 0:
            return sampled_M
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        sampled_BN = sampled_M.view_as(target_BN)
        return self.random_replacements.mix(sampled_BN, target_BN, share, batch.row_B, batch.step, batch.seed)

    def _corrupt_by_fixed_generator(
        self, batch: Batch, masking: Masking, fixed_generator: FixedGenerator
    ) -> Corruption:
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        sampled_BN = fixed_generator(target_BN, batch.row_B, batch.step, batch.seed)
        sampled_correct = ((sampled_BN == target_BN) * masking.weight_BN).sum()
        corrupted_BS, label_BS = self.replace(batch, masking, sampled_BN)
        return Corruption(
            masking=masking,
            corrupted_BS=corrupted_BS,
            label_BS=label_BS,
            loss=masking.weight_BN.new_zeros(()),
            sums={"sampled_correct": sampled_correct},
        )

    def _corrupt_by_frozen_generator(self, batch: Batch, masking: Masking) -> Corruption:
        with torch.no_grad():
            states_MH = self.generator_states(batch, masking)
            mlm = self.fill(batch, masking, states_MH)
        corrupted_BS, label_BS = self.replace(batch, masking, self._with_random_tokens(batch, masking, mlm.sampled_M))
        return Corruption(
            masking=masking,
            corrupted_BS=corrupted_BS,
            label_BS=label_BS,
            loss=masking.weight_BN.new_zeros(()),
            sums=mlm_sums(mlm) | self.entropy_sums(batch, states_MH, masking.weight_BN),
        )

    def generator_network(self, batch: Batch) -> ElectraTowers | FrozenGenerator:
        """Return the module that holds the generator: the frozen generator, on the batch's device, or `towers`."""
        if self.frozen_generator is None:
            return self.towers
        return self.frozen_generator.placed_like(batch.ids_BS, self.towers.embeddings.word.weight.dtype)

    def generator_states(self, batch: Batch, masking: Masking) -> torch.Tensor:
        """Run the generator on the masked rows; return its states at the masked positions, [M, H]."""
        network = self.generator_network(batch)
        dropout_keys = self.dropout_keys(batch, GENERATOR)
        embedded = network.embed(masking.input_BS, batch.layout, dropout_keys)
        hidden = network.generator(embedded, batch.attention_mask, dropout_keys)
        return gather_masked(hidden, masking.position_BN, backend=self.backend)

    def fill(self, batch: Batch, masking: Masking, hidden_MH: torch.Tensor) -> MlmHeadOutput:
        """Return the generator's MLM loss at the masked positions, and a token sampled for each of them."""
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        return self.predict(batch, hidden_MH, target_BN, masking.weight_BN)

    def predict(
        self, batch: Batch, hidden_MH: torch.Tensor, target_BN: torch.Tensor, weight_BN: torch.Tensor
    ) -> MlmHeadOutput:
        """Compute the generator's loss and draw a token at N positions of each row; weight 0 excludes a position."""
        network = self.generator_network(batch)
        return network.generator_head(
            hidden_MH,
            network.embeddings.word.weight,
            target_BN.flatten(),
            weight_BN.flatten(),
            seed=batch.seed,
            step=batch.step,
            row_M=batch.slot_number_M(target_BN.shape[1]),
            temperature=batch.values.temperature,
            disallow_correct=self.objective.disallow_correct,
            backend=self.backend,
        )

    def entropy_sums(self, batch: Batch, hidden_MH: torch.Tensor, weight_BN: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {"entropy_sum": s}, the weighted sum of the entropies of the generator's distributions, in nats.

        The distributions are those of temperature 1. In training mode the dict is empty, because entropies would take
        another computation of the logits in every step.
        """
        if self.training:
            return {}
        network = self.generator_network(batch)
        head = network.generator_head
        entropy_M = token_entropies(
            head.transform(hidden_MH), network.embeddings.word.weight, head.bias, head.vocab_size
        )
        return {"entropy_sum": (entropy_M * weight_BN.flatten()).sum()}

    def replace(self, batch: Batch, masking: Masking, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put sampled tokens, [B, N] or [M], at the masked positions; return new ids and which ids changed, [B, S].

        If `masking: reference` has drawn a position twice, its new id is the mean of the two sampled ids, rounded
        down, as in Google's code.
        """
        return replace_and_label(batch.ids_BS, masking.position_BN, masking.weight_BN, sampled, backend=self.backend)

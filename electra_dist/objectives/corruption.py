"""Corrupts rows: masks tokens, samples replacements from the generator, and labels the tokens that changed.

Guarantee: masks and sampled tokens are functions of (seed, step, row) and carry no gradient. A label is 1 only where
the id differs from the original, so a sampled token that equals the original counts as original. A generator with
fixed token probabilities has no MLM loss; that of a frozen generator is measured and is no part of the loss.

Fixed probabilities (`objective.generator: uniform` or `unigram`, and `objective.random_share`): token v is drawn with
probability weight_v / (sum of all weights), exact to 2**-31. With `disallow_correct` the original token is never
drawn, and the probabilities of the others keep their ratios. The range of a 32-bit random word is divided into one
interval per token, and a binary search finds the one that contains the word. The ends of the intervals are an int64
buffer, which a cast of the module to bf16 leaves alone, and which no checkpoint holds. `uniform` draws special tokens,
too, as Google's code does; `unigram`, which is in the paper only, never draws [PAD], [CLS], [SEP] and [MASK].

A frozen generator (`objective.generator: frozen`) was trained before and learns no more (Fast-ELECTRA, Dong et al.,
ICLR 2024, arXiv 2310.07347). Neither the optimizer, nor ZeRO, nor a checkpoint has its parameters. It runs its forward
pass only, without gradients and dropout, in the dtype and on the device of the towers. It costs a forward pass in
every step, and its weights once on every rank, whatever the ZeRO stage. `engine.compile` and
`engine.activation_checkpointing` leave it as it is.

Shapes: B rows, S tokens, N slots (places for one masked position each) in every row, M = B * N. Rows with fewer masked
positions leave slots empty. An empty slot is at position 0 and has weight 0 in every loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.mlm_head import MlmHeadOutput
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import gather_masked, replace_and_label
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.heads import token_entropies
from electra_dist.model.towers import PARTS, ElectraTowers, WithoutInitialValues
from electra_dist.objectives.base import GENERATOR, Batch, Objective, mlm_sums
from electra_dist.objectives.masking import Masking

_RANGE = 1 << 32  # number of different 32-bit random words


class FrozenGenerator(nn.Module):
    """Generator that learns no more, with its own embeddings and head; submodules are named as in `ElectraTowers`."""

    def __init__(self, model: ModelConfig) -> None:
        """Create the network in fp32 on the host, with weights of zero, which the caller overwrites."""
        super().__init__()
        width = model.generator_embedding_width
        parts = PARTS[model.architecture]
        with torch.device("meta"), WithoutInitialValues():
            self.embeddings = parts.embeddings(model, width)
            self.generator = parts.encoder(model, model.generator, width)
            self.generator_head = parts.token_head(model, model.generator.hidden_size, width)
        self.requires_grad_(False)
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            parameter.zero_()
        self.eval()

    def placed_like(self, ids_BS: torch.Tensor, dtype: torch.dtype) -> FrozenGenerator:
        """Move this module to the device of `ids_BS` and cast it to `dtype`, where needed; return this module."""
        table = self.embeddings.word.weight
        if table.device != ids_BS.device or table.dtype != dtype:
            self.to(ids_BS.device, dtype)
        return self


class FixedGenerator(nn.Module):
    """Generator that draws tokens with fixed probabilities, whatever the text is. It has no parameters."""

    purpose = Purpose.SAMPLE  # part of the key of the random draws

    ends_V: torch.Tensor  # int64: token v owns the random words from ends_V[v - 1] (0 for v = 0) below ends_V[v]

    def __init__(self, weight_V: np.ndarray, disallow_correct: bool) -> None:
        """Give each token a probability proportional to its weight; weights are at least 0 and need not sum to 1."""
        super().__init__()
        self.disallow_correct = disallow_correct
        cumulative_probability_V = np.cumsum(weight_V / weight_V.sum())
        ends = np.round(cumulative_probability_V * _RANGE).astype(np.int64)
        # Rounding may leave the last sum short of 1. Every word must fall into the interval of a token with a weight.
        last_token = np.flatnonzero(weight_V)[-1]
        ends[last_token:] = _RANGE
        self.register_buffer("ends_V", torch.from_numpy(ends), persistent=False)

    def forward(self, target_BN: torch.Tensor, row_B: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        """Draw a token for each masked position, int64 [B, N], by (seed, step, row number, place).

        With `disallow_correct`, the original token, `target_BN`, is not drawn. `row_B` are the row numbers within the
        global batch.
        """
        word_BN = bits_grid(seed, self.purpose, step, row_B, target_BN.shape[1])
        if self.disallow_correct:
            word_BN = self._skip_original(word_BN, target_BN)
        # The first token whose interval ends above the word.
        return torch.searchsorted(self.ends_V, word_BN.contiguous(), right=True)

    def _skip_original(self, word_BN: torch.Tensor, target_BN: torch.Tensor) -> torch.Tensor:
        # The words are scaled down to a range that is shorter by the original token's interval [begin, end), and those
        # from `begin` on are moved behind it. The other tokens keep the ratios of their probabilities. Example: 8
        # words and the interval [2, 4) leave a range of 6. Word 2 is scaled to 2 * 6 / 8 = 1 (rounded down) and
        # stays; word 4 is scaled to 3 and becomes 5.
        end_BN = self.ends_V[target_BN]
        begin_BN = torch.where(target_BN > 0, self.ends_V[(target_BN - 1).clamp(min=0)], 0)
        length_BN = end_BN - begin_BN
        # word * (2**32 - length) / 2**32. The factor is halved, and the shift is 31 instead of 32, so that the product
        # fits into int64.
        half_range_BN = (_RANGE - length_BN) >> 1
        scaled_word_BN = (word_BN * half_range_BN) >> 31
        return scaled_word_BN + torch.where(scaled_word_BN >= begin_BN, length_BN, 0)


class RandomReplacements(FixedGenerator):
    """Generator with fixed probabilities. Its tokens take the place of some that a generator network has drawn."""

    purpose = Purpose.RANDOM_TOKEN

    def mix(
        self,
        sampled_BN: torch.Tensor,
        target_BN: torch.Tensor,
        share: float,
        row_B: torch.Tensor,
        step: int,
        seed: int,
    ) -> torch.Tensor:
        """Replace each sampled token with probability `share` by a token drawn with fixed probabilities, [B, N].

        `target_BN` are the original tokens; the other arguments are those of `forward`.
        """
        word_BN = bits_grid(seed, Purpose.RANDOM_SHARE, step, row_B, sampled_BN.shape[1])
        is_random_BN = word_BN.double() < share * float(_RANGE)
        return torch.where(is_random_BN, self(target_BN, row_B, step, seed), sampled_BN)


def ordinary_weights(vocab_size: int, special: SpecialIds) -> np.ndarray:
    """Return sampling weights, float64 [vocab_size]: 1 for each ordinary token, and 0 for the five special tokens."""
    weight_V = np.ones(vocab_size)
    weight_V[list(special)] = 0.0
    return weight_V


def unigram_weights(count_V: np.ndarray | None, special: SpecialIds, temperature: float = 1.0) -> np.ndarray:
    """Return sampling weights, count ** (1 / temperature), float64 [V]; 0 for [PAD], [CLS], [SEP] and [MASK]."""
    assert count_V is not None, "tokens are drawn by their frequency, which needs token counts; pass count_V"
    weight_V = count_V.astype(np.float64) ** (1.0 / temperature)
    weight_V[count_V == 0] = 0.0
    weight_V[[special.pad, special.cls, special.sep, special.mask]] = 0.0
    return weight_V


class Corruption(NamedTuple):
    """Rows in which a generator replaced the masked tokens, with their labels and the generator's loss."""

    masking: Masking  # the masked positions, one per slot, and the slots' weights
    corrupted_BS: torch.Tensor  # int64 ids with the sampled tokens in place: what the discriminator reads
    label_BS: torch.Tensor  # bool, True where the id differs from the original
    loss: torch.Tensor  # the generator's MLM loss, weighted and scaled, with gradient; 0 if it does not learn
    sums: dict[str, torch.Tensor]  # metric sums of the generator, by names of `Sums`


# Tokens that a generator has drawn for the masked positions, int64 [B, N] or [M]; `loss` and `sums` of `Corruption`.
_Drawn = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


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
        """Mask the rows, and put a token drawn by the generator at each masked position."""
        masking = self.mask(batch)
        if self.fixed_generator is not None:
            sampled, loss, sums = self._draw_with_fixed_probabilities(self.fixed_generator, batch, masking)
        else:
            sampled, loss, sums = self._draw_by_network(batch, masking)
        corrupted_BS, label_BS = replace_and_label(
            batch.ids_BS, masking.position_BN, masking.weight_BN, sampled, backend=self.backend
        )
        return Corruption(masking=masking, corrupted_BS=corrupted_BS, label_BS=label_BS, loss=loss, sums=sums)

    def _draw_with_fixed_probabilities(self, generator: FixedGenerator, batch: Batch, masking: Masking) -> _Drawn:
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        sampled_BN = generator(target_BN, batch.row_B, batch.step, batch.seed)
        sums = {"sampled_correct": ((sampled_BN == target_BN) * masking.weight_BN).sum()}
        return sampled_BN, masking.weight_BN.new_zeros(()), sums

    def _draw_by_network(self, batch: Batch, masking: Masking) -> _Drawn:
        learns = self.frozen_generator is None
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
            states_MH = self.generator_states(batch, masking)
            mlm = self.predict(batch, states_MH, batch.ids_BS.gather(1, masking.position_BN), masking.weight_BN)
        sums = mlm_sums(mlm) | self.entropy_sums(batch, states_MH, masking.weight_BN)
        if learns:
            loss = batch.values.mlm_weight * batch.first_scale * mlm.loss_sum
        else:
            loss = masking.weight_BN.new_zeros(())
        sampled = mlm.sampled_M
        share = batch.values.random_share
        if self.random_replacements is not None and share > 0:
            target_BN = batch.ids_BS.gather(1, masking.position_BN)  # again: kept, it would raise the peak of memory
            sampled = self.random_replacements.mix(
                sampled.view_as(target_BN), target_BN, share, batch.row_B, batch.step, batch.seed
            )
        return sampled, loss, sums

    def generator_network(self, batch: Batch) -> ElectraTowers | FrozenGenerator:
        """Return the module that holds the generator: the frozen generator, moved to the device, or `towers`."""
        if self.frozen_generator is None:
            return self.towers
        return self.frozen_generator.placed_like(batch.ids_BS, self.towers.embeddings.word.weight.dtype)

    def generator_states(self, batch: Batch, masking: Masking) -> torch.Tensor:
        """Run the generator on the masked rows; return its states at the masked positions, [M, H]."""
        network = self.generator_network(batch)
        dropout_keys = self.dropout_keys(batch, GENERATOR)
        embedded = network.embeddings(masking.input_BS, batch.layout, dropout_keys)
        hidden = network.generator(embedded, batch.attention_mask, dropout_keys)
        return gather_masked(hidden, masking.position_BN, backend=self.backend)

    def predict(
        self, batch: Batch, hidden_MH: torch.Tensor, target_BN: torch.Tensor, weight_BN: torch.Tensor
    ) -> MlmHeadOutput:
        """Compute the generator's loss and draw a token at N positions of each row, where its states are `hidden_MH`.

        `target_BN` are the original tokens. A position of weight 0 does not count in the loss.
        """
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

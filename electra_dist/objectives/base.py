"""What every objective has in common: its input, its output and its forward.

    StepInput -> forward: Batch, which adds examples, positions and attention -> compute_loss -> StepOutput

Guarantee: `forward` is a function of the rows, (seed, step, row) and the weights; never of the batch around a row.
Losses are fp32 sums times the scales that the caller gives: 1 / global counts (`loss_counts`) for a mean over the
global batch, whatever the number of ranks and micro-batches, or 1 / local counts for Google's mean per replica.
Nothing waits for the device; shapes are static.

Under ZeRO-3 a table that a head is tied to is read in the objective's own forward, where DeepSpeed finds and gathers
it.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from electra_kernels.discriminator_tail import RtdOutput
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.mlm_head import MlmHeadOutput
from torch import nn

from electra_dist.config import ObjectiveConfig
from electra_dist.model.attention import SDPA, Scope, same_example
from electra_dist.model.encoder import Noise
from electra_dist.model.rows import RowLayout, SpecialIds, derive
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.masking import Masking, is_candidate, mask_rows, num_masked

# Steps that no run reaches, one for each tower: apart from the loop's own seeds.
GENERATOR, DISCRIMINATOR, REVERSE = 2**32 - 1, 2**32 - 2, 2**32 - 3


class Sums(NamedTuple):
    """Sums over a batch: what metrics are made of. Add them over micro-batches and ranks, then divide.

    What an objective does not have is 0.
    """

    loss: float  # what is minimised, scaled: over all ranks and micro-batches the loss of the step
    tokens: float  # real tokens
    mlm_loss_sum: float  # nats, weighted: the generator's (with `mlm` the large tower's)
    mlm_weight: float  # tokens that it is over
    mlm_correct: float  # of these, most probable token is the original
    sampled_correct: float  # slots whose sample is the original
    rtd_loss_sum: float  # nats
    rtd_weight: float  # tokens that it is over
    replaced: float  # of these, label 1
    replaced_correct: float  # of these, logit > 0
    original: float  # label 0
    original_correct: float  # of these, logit <= 0
    token_loss_sum: float  # nats: the large tower's, where it predicts tokens beside a generator
    token_weight: float  # tokens that it is over
    token_correct: float  # of these, most probable token of its softmax is the original


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one forward is given: some rows of one optimizer step.

    `loss_counts` says which tokens the means of the first and of the second loss are over.
    """

    # Not a NamedTuple, because DeepSpeed's hooks look into tuples and build them anew: ZeRO-3's with other tensor
    # objects, fp16's with scales cut to 16 bits and by a call that a NamedTuple does not take. They hand a dataclass
    # on as it is. No tensor in here needs a gradient, so there is nothing for them to find.

    ids_BS: torch.Tensor  # int64: token ids
    row_B: torch.Tensor  # int64: numbers of the rows within the step's global batch
    step: int  # number of the optimizer step
    seed: int  # the run's
    first_scale: float | torch.Tensor  # factor of the first loss's sum, 1 / (tokens of its mean); a scalar
    second_scale: float | torch.Tensor  # the same of the second loss's sum


class StepOutput(NamedTuple):
    """What one forward gives. Only `loss` carries a gradient."""

    loss: torch.Tensor  # fp32 scalar
    sums: torch.Tensor  # float64 [len(Sums._fields)], in that order; `Sums(*sums.tolist())`
    rtd_logit_BS: torch.Tensor  # fp32; 0 where nothing is detected
    label_BS: torch.Tensor  # bool, True where replaced
    is_real_BS: torch.Tensor  # bool


@dataclass(frozen=True, slots=True)
class Batch(StepInput):
    """A step input with what follows from its rows."""

    layout: RowLayout  # examples, positions and real tokens
    scope: Scope  # which tokens attend to which

    def slot_number_M(self, num_slots: int) -> torch.Tensor:
        """Return int64 [B * num_slots]: the numbers of this batch's slots within the step's global batch.

        They key the random words of the slots' samples.

        Args:
            num_slots: slots of every row.
        """
        slot_N = torch.arange(num_slots, device=self.row_B.device)
        return (self.row_B[:, None] * num_slots + slot_N).flatten()


def loss_counts(ids_BS: torch.Tensor, special: SpecialIds, objective: ObjectiveConfig) -> torch.Tensor:
    """Return int64 [B, 2]: tokens of each row that the first and the second loss are means over.

    The first loss is the generator's, or the only tower's; the second is the larger tower's beside a generator. The
    counts follow from the ids alone, for all rows of a step before its first forward.

    Args:
        ids_BS: int64 rows.
        special: ids of the special tokens.
        objective: its name says which tokens count, its masking how many are masked.
    """
    masked_B = num_masked(ids_BS, special, objective)
    first_B = is_candidate(ids_BS, special).sum(1) if objective.name == "electric" else masked_B
    on_masked = objective.name in ("rtd_masked_only", "replace_mlm")
    return torch.stack([first_B, masked_B if on_masked else (ids_BS != special.pad).sum(1)], -1)


class Objective(nn.Module, ABC):
    """Towers and a loss. What the engine wraps."""

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, backend: str = "auto"
    ) -> None:
        """Keep the parts; attention is torch's own until `attention` is set.

        Args:
            towers: built for `objective`.
            objective: what is learnt.
            special: ids of the special tokens.
            backend: `kernels.backend` of the config.
        """
        super().__init__()
        self.towers = towers
        self.objective = objective
        self.special = special
        self.backend = backend
        self.attention = SDPA

    def forward(self, given: StepInput) -> StepOutput:
        """Return the loss and the sums of one forward of all towers."""
        return self.compute_loss(self.batch(given))

    @abstractmethod
    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return what `forward` does; every objective has its own."""

    def batch(self, given: StepInput) -> Batch:
        """Return the input with the examples, positions and scope of attention of its rows."""
        layout = derive(given.ids_BS, self.special)
        return Batch(
            ids_BS=given.ids_BS,
            row_B=given.row_B,
            step=given.step,
            seed=given.seed,
            first_scale=given.first_scale,
            second_scale=given.second_scale,
            layout=layout,
            scope=same_example(layout, self.towers.embeddings.word.weight.dtype, self.attention.backend),
        )

    def mask(self, batch: Batch) -> Masking:
        """Return the masked slots of each row and the masked rows."""
        return mask_rows(batch.ids_BS, self.special, self.objective, batch.seed, batch.step, batch.row_B)

    def noise(self, batch: Batch, tower: int) -> Noise:
        """Return what a tower's dropout is keyed by."""
        return Noise(derive_seed(batch.seed, Purpose.DROPOUT, tower), batch.step, batch.row_B, self.backend)

    def read(self, batch: Batch, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return [B, S, H]: the discriminator's states of a masked or corrupted version of the batch."""
        embedded = self.towers.embed_discriminator(ids_BS, batch.layout)
        return self.towers.discriminator(embedded, batch.scope, self.noise(batch, DISCRIMINATOR))

    def output(
        self,
        batch: Batch,
        loss: torch.Tensor,
        sums: dict[str, torch.Tensor],
        rtd_logit_BS: torch.Tensor | None = None,
        label_BS: torch.Tensor | None = None,
    ) -> StepOutput:
        """Return the output with the sums in their order, 0 where there are none.

        Args:
            batch: what was read.
            loss: fp32 scalar with gradient.
            sums: scalars by names of `Sums`; `loss` and `tokens` are added here.
            rtd_logit_BS: B * S logits of any shape, where tokens are detected.
            label_BS: bool, True where replaced.
        """
        is_real_BS = batch.layout.is_real_BS
        sums = {"loss": loss, "tokens": is_real_BS.sum(), **sums}
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        unknown = sums.keys() - set(Sums._fields)
        assert not unknown, unknown
        return StepOutput(
            loss=loss,
            sums=torch.stack([sums[name].detach().double() if name in sums else zero for name in Sums._fields]),
            rtd_logit_BS=torch.zeros(batch.ids_BS.shape, device=loss.device)
            if rtd_logit_BS is None
            else rtd_logit_BS.detach().float().view_as(batch.ids_BS),
            label_BS=torch.zeros_like(is_real_BS) if label_BS is None else label_BS,
            is_real_BS=is_real_BS,
        )


def mlm_sums(mlm: MlmHeadOutput) -> dict[str, torch.Tensor]:
    """Return the sums of the generator (or of the only tower)."""
    return {
        "mlm_loss_sum": mlm.loss_sum,
        "mlm_weight": mlm.weight_sum,
        "mlm_correct": mlm.correct_sum,
        "sampled_correct": mlm.sampled_correct_sum,
    }


def rtd_sums(rtd: RtdOutput) -> dict[str, torch.Tensor]:
    """Return the sums of the discriminator."""
    return {
        "rtd_loss_sum": rtd.loss_sum,
        "rtd_weight": rtd.mask_sum,
        "replaced": rtd.replaced_count,
        "replaced_correct": rtd.replaced_correct,
        "original": rtd.original_count,
        "original_correct": rtd.original_correct,
    }

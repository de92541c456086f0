"""What every objective has in common: what the training loop calls, and what it is told.

Guarantee: `forward` is a function of the rows, (seed, step, row) and the weights; never of the batch around a row.
Losses are fp32 sums times the scales that the caller gives: 1 / global counts (`loss_counts`) for a mean over the
global batch, whatever the number of ranks and micro-batches, or 1 / local counts for Google's mean per replica.
Nothing waits for the device; shapes are static.

Under ZeRO-3 a table that a head is tied to is read in the objective's own forward, where DeepSpeed finds and gathers
it.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

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
from electra_dist.objectives.masking import is_candidate, num_masked

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


class StepOutput(NamedTuple):
    """What one forward gives. Only `loss` carries a gradient."""

    loss: torch.Tensor  # fp32 scalar
    sums: torch.Tensor  # float64 [len(Sums._fields)], in that order; `Sums(*sums.tolist())`
    rtd_logit_BS: torch.Tensor  # fp32; 0 where nothing is detected
    label_BS: torch.Tensor  # bool, True where replaced
    is_real_BS: torch.Tensor  # bool


class Batch(NamedTuple):
    """Rows and what follows from them."""

    ids_BS: torch.Tensor
    row_B: torch.Tensor
    step: int
    seed: int
    layout: RowLayout
    scope: Scope


def loss_counts(ids_BS: torch.Tensor, special: SpecialIds, objective: ObjectiveConfig) -> torch.Tensor:
    """[B, 2] int64: tokens of each row that the first (`mlm_scale`) and the second loss (`rtd_scale`) are means over.

    From the ids alone, for all rows of a step before its first forward.
    """
    masked_B = num_masked(ids_BS, special, objective)
    first_B = is_candidate(ids_BS, special).sum(1) if objective.name == "electric" else masked_B
    on_masked = objective.name in ("rtd_masked_only", "replace_mlm")
    return torch.stack([first_B, masked_B if on_masked else (ids_BS != special.pad).sum(1)], -1)


class Objective(nn.Module):
    """Towers and a loss. What the engine wraps."""

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, backend: str = "auto"
    ) -> None:
        """`towers` built for `objective`; `backend` is `kernels.backend` of the config."""
        super().__init__()
        self.towers = towers
        self.objective = objective
        self.special = special
        self.backend = backend
        self.attention = SDPA

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> StepOutput:
        """One forward of all towers.

        Args:
            ids_BS: int64 rows.
            row_B: int64 row numbers within the global batch of this step.
            step: number of the optimizer step.
            seed: the run's seed.
            mlm_scale: factor of the first loss's sum, 1 / (tokens that its mean is over).
            rtd_scale: factor of the second's.
        """
        raise NotImplementedError

    def batch(self, ids_BS: torch.Tensor, row_B: torch.Tensor, step: int, seed: int) -> Batch:
        """Examples, positions and the scope of attention of rows."""
        layout = derive(ids_BS, self.special)
        scope = same_example(layout, self.towers.embeddings.word.weight.dtype, self.attention.backend)
        return Batch(ids_BS, row_B, step, seed, layout, scope)

    def noise(self, batch: Batch, tower: int) -> Noise:
        """What a tower's dropout is keyed by."""
        return Noise(derive_seed(batch.seed, Purpose.DROPOUT, tower), batch.step, batch.row_B, self.backend)

    def read(self, batch: Batch, ids_BS: torch.Tensor) -> torch.Tensor:
        """[B, S, H]: the discriminator's states of a masked or corrupted version of the batch."""
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
        """The sums in their order, 0 where there are none."""
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
    """The generator's sums (or those of the only tower)."""
    return {
        "mlm_loss_sum": mlm.loss_sum,
        "mlm_weight": mlm.weight_sum,
        "mlm_correct": mlm.correct_sum,
        "sampled_correct": mlm.sampled_correct_sum,
    }


def rtd_sums(rtd: RtdOutput) -> dict[str, torch.Tensor]:
    """The discriminator's sums."""
    return {
        "rtd_loss_sum": rtd.loss_sum,
        "rtd_weight": rtd.mask_sum,
        "replaced": rtd.replaced_count,
        "replaced_correct": rtd.replaced_correct,
        "original": rtd.original_count,
        "original_correct": rtd.original_correct,
    }

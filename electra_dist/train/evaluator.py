"""Evaluate on held-out rows: the losses and the discriminator's ROC-AUC, with the same rows and masks every time.

Guarantee: rows, masks and samples depend on (corpus, seed) only, so two evaluations differ by the weights alone, and
the number of ranks changes nothing but the order of sums. Collective: every rank calls it at the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.analysis.roc_auc import Separation, separation
from electra_dist.data.verified_shards import ShardCache
from electra_dist.engine.engine import Engine
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.run.step_records import EvalRecord

_NO_RANKING = Separation(auc=math.nan, accuracy=math.nan, precision=math.nan, recall=math.nan)


@dataclass(frozen=True)
class _LocalScores:
    """Sums of losses, and scores of the discriminator with their labels, over the batches that one rank evaluates."""

    sum_K: torch.Tensor  # float64, one for each field of `Sums`
    score_BS: torch.Tensor  # fp32 discriminator logits; NaN where there is no real token
    label_BS: torch.Tensor  # fp32, 1 where the token was replaced


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a model on held-out rows of a corpus: losses, and how well replaced tokens are detected."""

    cache: ShardCache  # of the held-out corpus; the caller closes it
    num_rows: int  # at most so many rows; fewer if the corpus has fewer
    micro_batch: int  # rows per rank and forward pass
    seed: int  # of the run; masks and samples are drawn from it
    special: SpecialIds

    def run(self, engine: Engine, step: int) -> EvalRecord:
        """Evaluate the current weights of `engine` without dropout. Collective; the result is equal on all ranks.

        The same rows with the same masks are used at every call. The engine is in training mode afterwards.

        Args:
            engine: holds the model.
            step: optimizer steps done; it is only copied to the result.

        Returns:
            Token means of the losses, and how well the discriminator separates replaced from original tokens (NaN
            for an objective that detects nothing).
        """
        engine.train(False)
        ids_RS = self._rows()
        local = self._score(engine, ids_RS)
        engine.train(True)
        dist.all_reduce(local.sum_K)
        sums = Sums(*local.sum_K.tolist())
        score_N = _gather_batches(local.score_BS)
        label_N = _gather_batches(local.label_BS)
        ranking = _NO_RANKING
        if sums.rtd_weight:
            is_real_N = ~np.isnan(score_N)
            ranking = separation(score_N[is_real_N], label_N[is_real_N] > 0.5)
        return EvalRecord(
            step=step,
            rows=len(ids_RS),
            mlm_loss=_mean(sums.mlm_loss_sum, sums.mlm_weight),
            mlm_accuracy=_mean(sums.mlm_correct, sums.mlm_weight),
            rtd_loss=_mean(sums.rtd_loss_sum, sums.rtd_weight),
            token_loss=_mean(sums.token_loss_sum, sums.token_weight),
            auc=ranking.auc,
            accuracy=ranking.accuracy,
            precision=ranking.precision,
            recall=ranking.recall,
        )

    def _score(self, engine: Engine, ids_RS: np.ndarray) -> _LocalScores:
        """Run this rank's share of the rows through the model, without gradients.

        The ranks take turns, batch by batch. Rows of padding fill the last batches, so that all ranks run the same
        number of forward passes; padding does not count in any sum.

        Args:
            engine: holds the model, in evaluation mode.
            ids_RS: all rows of the evaluation, equal on all ranks.
        """
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        rows_per_round = self.micro_batch * world_size
        num_rounds = math.ceil(len(ids_RS) / rows_per_round)
        padded_RS = np.full((num_rounds * rows_per_round, ids_RS.shape[1]), self.special.pad, np.int64)
        padded_RS[: len(ids_RS)] = ids_RS
        seed = derive_seed(self.seed, Purpose.EVAL)
        sums, scores, labels = [], [], []
        with torch.no_grad():
            for round_number in range(num_rounds):
                row0 = (round_number * world_size + rank) * self.micro_batch
                given = StepInput(
                    ids_BS=torch.from_numpy(padded_RS[row0 : row0 + self.micro_batch]).to(engine.device),
                    row_B=torch.arange(row0, row0 + self.micro_batch, device=engine.device),
                    step=0,
                    seed=seed,
                    first_scale=1.0,  # plain sums, which are divided once all of them are added up
                    second_scale=1.0,
                )
                out = engine.forward(given)
                sums.append(out.sums)
                scores.append(torch.where(out.is_real_BS, out.rtd_logit_BS, torch.nan))
                labels.append(out.label_BS.float())
        return _LocalScores(torch.stack(sums).sum(0), torch.cat(scores), torch.cat(labels))

    def _rows(self) -> np.ndarray:
        """Return the rows of the evaluation, token ids [R, S], evenly spaced over the whole held-out corpus."""
        shard_ends = np.cumsum([shard.rows for shard in self.cache.manifest.shards])
        shard_starts = np.concatenate([[0], shard_ends])
        num_available = int(shard_ends[-1])
        num_chosen = min(self.num_rows, num_available)
        row_numbers = np.linspace(0, num_available, num_chosen, endpoint=False, dtype=np.int64)
        shard_of_row = np.searchsorted(shard_ends, row_numbers, side="right")
        parts = []
        for shard in np.unique(shard_of_row):
            rows_in_shard = row_numbers[shard_of_row == shard] - shard_starts[shard]
            parts.append(self.cache.open(int(shard)).rows(rows_in_shard))
        return np.concatenate(parts)


def _mean(total: float, count: float) -> float:
    """Return `total` / `count`; for a count of 0, as of a loss that the objective does not have, return `total`."""
    return total / max(count, 1.0)


def _gather_batches(local: torch.Tensor) -> np.ndarray:
    """Return the tensors of all ranks joined along their first axis, by rank, on the host. Collective.

    Args:
        local: tensor of this rank; its shape and dtype must be equal on all ranks.
    """
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts).cpu().numpy()

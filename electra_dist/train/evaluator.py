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
    """Sums of losses, and the discriminator's score and the label of each token, for the rows of one rank.

    Axes: K fields of `Sums`; B rows that this rank evaluates, padding rows included; S tokens of a row.
    """

    sum_K: torch.Tensor  # float64
    score_BS: torch.Tensor  # fp32 discriminator logits; NaN where there is no real token
    label_BS: torch.Tensor  # fp32, 1 where the token was replaced


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluation of a model on held-out rows of a corpus: losses, and how well replaced tokens are detected."""

    cache: ShardCache  # of the held-out corpus; the caller closes it
    num_rows: int  # rows to evaluate; all rows if the corpus has fewer
    micro_batch: int  # rows per rank and forward pass
    seed: int  # of the run; masks and samples are drawn from it
    special: SpecialIds  # ids of the special tokens

    def run(self, engine: Engine, step: int) -> EvalRecord:
        """Evaluate the current weights of `engine` without dropout. Collective; the result is equal on all ranks.

        The same rows with the same masks are used at every call. The engine is in training mode afterwards. The name
        suffixes below: R rows and S tokens of the evaluation, K fields of `Sums`, T tokens of all ranks.

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
        score_T = _gather_batches(local.score_BS).reshape(-1)
        label_T = _gather_batches(local.label_BS).reshape(-1)
        ranking = _NO_RANKING
        has_detection_loss = sums.rtd_weight != 0
        if has_detection_loss:
            is_real_T = ~np.isnan(score_T)
            ranking = separation(score_T[is_real_T], label_T[is_real_T] > 0.5)
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

        The ranks take turns: in each round every rank evaluates one batch of consecutive rows. Rows of padding fill
        the last round, so that all ranks run the same number of forward passes; padding does not count in any sum.

        Args:
            engine: holds the model, in evaluation mode.
            ids_RS: token ids of all rows of the evaluation, equal on all ranks.
        """
        num_rows, seq_len = ids_RS.shape
        world_size = dist.get_world_size()
        rows_per_round = self.micro_batch * world_size
        num_rounds = math.ceil(num_rows / rows_per_round)
        padded_RS = np.full((num_rounds * rows_per_round, seq_len), self.special.pad, np.int64)
        padded_RS[:num_rows] = ids_RS
        seed = derive_seed(self.seed, Purpose.EVAL)
        sums = []
        scores = []
        labels = []
        with torch.no_grad():
            for round_number in range(num_rounds):
                batch_number = round_number * world_size + dist.get_rank()
                first = batch_number * self.micro_batch
                end = first + self.micro_batch
                step_input = StepInput(
                    ids_BS=torch.from_numpy(padded_RS[first:end]).to(engine.device),
                    row_B=torch.arange(first, end, device=engine.device),
                    step=0,  # with the seed and the row number the key of masks and samples, equal at every evaluation
                    seed=seed,
                    first_scale=1.0,  # plain sums, which are divided once all of them are added up
                    second_scale=1.0,
                )
                output = engine.forward(step_input)
                sums.append(output.sums)
                scores.append(torch.where(output.is_real_BS, output.rtd_logit_BS, torch.nan))
                labels.append(output.label_BS.float())
        return _LocalScores(sum_K=torch.stack(sums).sum(0), score_BS=torch.cat(scores), label_BS=torch.cat(labels))

    def _rows(self) -> np.ndarray:
        """Return the token ids of the evaluation's rows, [R, S]: rows evenly spaced over the held-out corpus.

        Rows are numbered through all shards: with shards of 10 and 5 rows, row 12 is row 2 of the second shard.
        """
        rows_per_shard = [shard.rows for shard in self.cache.manifest.shards]
        shard_ends = np.cumsum(rows_per_shard)  # number of the first row after each shard
        shard_starts = np.concatenate([[0], shard_ends])
        num_available = int(shard_ends[-1])
        num_chosen = min(self.num_rows, num_available)
        chosen_rows = np.linspace(0, num_available, num_chosen, endpoint=False, dtype=np.int64)
        # The shard of a row is the first one that ends after it.
        shard_of_row = np.searchsorted(shard_ends, chosen_rows, side="right")
        ids_by_shard = []
        for shard in np.unique(shard_of_row):
            rows_in_shard = chosen_rows[shard_of_row == shard] - shard_starts[shard]
            ids_by_shard.append(self.cache.open(int(shard)).rows(rows_in_shard))
        return np.concatenate(ids_by_shard)


def _mean(total: float, count: float) -> float:
    """Return `total` / `count`, a mean over tokens; 0 for a loss that the objective does not have (both are 0)."""
    return total / max(count, 1.0)


def _gather_batches(local: torch.Tensor) -> np.ndarray:
    """Return the tensors of all ranks joined along their first axis, in the order of ranks, on the host. Collective.

    Args:
        local: tensor of this rank; its shape and dtype must be equal on all ranks.
    """
    tensors = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, local.contiguous())
    return torch.cat(tensors).cpu().numpy()

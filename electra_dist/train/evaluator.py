"""Evaluate on held-out rows: the losses and the discriminator's ROC-AUC, with the same rows and masks every time.

Guarantee: rows, masks and the generator's samples depend on the corpus and the seed only. Samples are drawn at
temperature 1, without random replacements, and at the share of masked tokens of the end of the run, whatever the
schedules of the objective are. So two evaluations of a run differ by the weights alone, and the number of ranks
changes nothing except the order in which sums are added up. An evaluation is collective: every rank calls it after the
same step.
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
from electra_dist.model.row_layout import SpecialIds, example_bounds
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.run.step_records import EvalRecord

_NO_RANKING = Separation(auc=math.nan, accuracy=math.nan, precision=math.nan, recall=math.nan)


@dataclass(frozen=True)
class _LocalScores:
    """Result of one rank's share of an evaluation: sums of losses, and score and label of each token.

    Each token's score is the discriminator's logit, and its label is 1 if the token was replaced. Axes: K fields of
    `Sums` (sums over tokens from which means are computed); B rows that this rank evaluates, padding rows included; S
    tokens of a row.
    """

    sum_K: torch.Tensor  # float64
    score_BS: torch.Tensor  # fp32 discriminator logits; NaN where there is no real token
    label_BS: torch.Tensor  # fp32, 1 where the token was replaced


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluation of a model on held-out rows of a corpus: losses, and how well replaced tokens are detected.

    Every rank creates one with equal values, and all ranks call `run` together, as often as the weights are to be
    evaluated.
    """

    cache: ShardCache  # of the held-out corpus; the caller closes it
    num_rows: int  # rows to evaluate; all rows if the corpus has fewer
    micro_batch: int  # rows per rank and forward pass
    seed: int  # of the run; masks and samples are drawn from it
    special: SpecialIds  # ids of the special tokens

    def run(self, engine: Engine, step: int) -> EvalRecord:
        """Evaluate the current weights of `engine` without dropout. Collective; the result is equal on all ranks.

        The same rows with the same masks are used at every call. The engine is in training mode afterwards. The names
        of tensors end in their axes: R rows and S tokens of a row, K fields of `Sums`, T tokens of all ranks.

        Args:
            engine: holds the model.
            step: optimizer steps done; it is only copied to the result.

        Returns:
            Means of the losses over tokens, and ROC-AUC, accuracy, precision and recall of the detection of replaced
            tokens; these are NaN for an objective without detection.
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
        """Run this rank's share of the rows through the model without gradients; return sums, scores and labels.

        The rows are processed in rounds. In a round, rank r evaluates the r-th of W consecutive batches of
        `micro_batch` rows, where W is the number of ranks. Rows of padding fill the last round, so that all ranks run
        the same number of forward passes; padding does not count in any sum.

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
                bounds = None
                if engine.attention.backend == "flash":
                    bounds = example_bounds(padded_RS[first:end], self.special).to(engine.device)
                step_input = StepInput(
                    ids_BS=torch.from_numpy(padded_RS[first:end]).to(engine.device),
                    row_B=torch.arange(first, end, device=engine.device),
                    step=0,  # with the seed and the row number the key of masks and samples, equal at every evaluation
                    seed=seed,
                    first_scale=1.0,  # plain sums, which are divided once all of them are added up
                    second_scale=1.0,
                    bounds=bounds,
                )
                output = engine.forward(step_input)
                sums.append(output.sums)
                scores.append(torch.where(output.is_real_BS, output.rtd_logit_BS, torch.nan))
                labels.append(output.label_BS.float())
        return _LocalScores(sum_K=torch.stack(sums).sum(0), score_BS=torch.cat(scores), label_BS=torch.cat(labels))

    def _rows(self) -> np.ndarray:
        """Return the token ids of the evaluation's rows, [R, S]: evenly spaced over the held-out corpus.

        These are all rows if the corpus has at most `num_rows`. Rows are numbered through all shards: with shards of
        10 and 5 rows, row 12 is row 2 of the second shard.
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
    """Return `total` / `count`, a mean over tokens; 0 if both are 0.

    That is so for a loss that the objective does not have. A count between 0 and 1 is taken as 1.
    """
    return total / max(count, 1.0)


def _gather_batches(local: torch.Tensor) -> np.ndarray:
    """Return the tensors of all ranks joined along their first axis, in the order of ranks, on the host. Collective.

    Args:
        local: tensor of this rank; its shape and dtype must be equal on all ranks.
    """
    tensors = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, local.contiguous())
    return torch.cat(tensors).cpu().numpy()

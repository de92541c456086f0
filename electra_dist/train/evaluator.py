"""The losses and the discriminator's ROC-AUC on held-out rows, the same rows with the same masks at every call.

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
from electra_dist.data.cache import ShardCache
from electra_dist.engine.engine import Engine
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.run.records import EvalRecord

_NO_RANKING = Separation(auc=math.nan, accuracy=math.nan, precision=math.nan, recall=math.nan)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Held-out rows and how to score them."""

    cache: ShardCache
    num_rows: int
    micro_batch: int
    seed: int
    special: SpecialIds

    def run(self, engine: Engine, step: int) -> EvalRecord:
        """Score `engine` after `step` steps."""
        engine.train(False)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ids_RS = self._rows()
        num_batches = -(-len(ids_RS) // (self.micro_batch * world_size))
        padded = np.full((num_batches * world_size * self.micro_batch, ids_RS.shape[1]), self.special.pad, np.int64)
        padded[: len(ids_RS)] = ids_RS  # rows of padding keep the ranks in step; they have no tokens to count
        sums, scores, labels = [], [], []
        seed = derive_seed(self.seed, Purpose.EVAL)
        with torch.no_grad():
            for batch in range(num_batches):
                row0 = (batch * world_size + rank) * self.micro_batch
                given = StepInput(
                    ids_BS=torch.from_numpy(padded[row0 : row0 + self.micro_batch]).to(engine.device),
                    row_B=torch.arange(row0, row0 + self.micro_batch, device=engine.device),
                    step=0,
                    seed=seed,
                    first_scale=1.0,  # sums are added up, and divided when all are there
                    second_scale=1.0,
                )
                out = engine.forward(given)
                sums.append(out.sums)
                scores.append(torch.where(out.is_real_BS, out.rtd_logit_BS, torch.nan))
                labels.append(out.label_BS.float())
        engine.train(True)
        total = torch.stack(sums).sum(0)
        dist.all_reduce(total)
        score_N, label_N = _everyone(torch.cat(scores)), _everyone(torch.cat(labels))
        sum_of = Sums(*total.tolist())
        real = ~np.isnan(score_N)
        ranking = separation(score_N[real], label_N[real] > 0.5) if sum_of.rtd_weight else _NO_RANKING
        return EvalRecord(
            step=step,
            rows=len(ids_RS),
            mlm_loss=sum_of.mlm_loss_sum / max(sum_of.mlm_weight, 1.0),
            mlm_accuracy=sum_of.mlm_correct / max(sum_of.mlm_weight, 1.0),
            rtd_loss=sum_of.rtd_loss_sum / max(sum_of.rtd_weight, 1.0),
            token_loss=sum_of.token_loss_sum / max(sum_of.token_weight, 1.0),
            auc=ranking.auc,
            accuracy=ranking.accuracy,
            precision=ranking.precision,
            recall=ranking.recall,
        )

    def _rows(self) -> np.ndarray:
        """[R, S]: rows evenly spaced over the whole held-out corpus."""
        ends = np.cumsum([shard.rows for shard in self.cache.manifest.shards])
        chosen = np.linspace(0, ends[-1], min(self.num_rows, int(ends[-1])), endpoint=False, dtype=np.int64)
        shards = np.searchsorted(ends, chosen, side="right")
        starts = np.concatenate([[0], ends])
        parts = [self.cache.open(int(s)).rows(chosen[shards == s] - starts[s]) for s in np.unique(shards)]
        return np.concatenate(parts)


def _everyone(local: torch.Tensor) -> np.ndarray:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts).cpu().numpy()

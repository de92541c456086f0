"""Evaluate on held-out rows: the losses and the discriminator's ROC-AUC, with the same rows and masks every time.

Guarantee: rows, masks, the generator's samples and the replacements for the context AUC depend on the corpus and the
seed only. Whatever the objective schedules, the generator samples at temperature 1 and without random replacements,
and as many tokens are masked as at the end of the run. So two evaluations of a run differ by the weights alone, and
the number of ranks changes nothing except the order in which sums are added up.

How: an objective with a discriminator reads held-out rows twice. The first time the generator has replaced tokens,
which gives the losses and `auc`. The second time tokens are replaced by tokens from elsewhere in the rows
(`objectives/context_replacements.py`), which gives `context_auc`: how well the discriminator uses context. The second
time the same number of rows is read, or more if fewer than 5,000 tokens would be replaced.

Suffixes of tensor names give the axes: R rows of an evaluation, B rows of a batch, Q rows for the context AUC, S
tokens of a row, T tokens of all ranks, K fields of `Sums`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ObjectiveConfig
from electra_dist.config.schedule import value_at
from electra_dist.data.shard_cache import ShardCache, open_cache
from electra_dist.engine.engine import Engine
from electra_dist.objectives.base import StepInput, StepOutput, Sums
from electra_dist.objectives.context_replacements import NOT_COMPARED, REPLACED, replace_by_other_tokens, rows_needed
from electra_dist.run.context_auc import NUM_REPLACED
from electra_dist.run.metrics import EvalRecord, TextSample
from electra_dist.train.open_cache import shard_folder
from electra_dist.train.roc_auc import Separation, auc_with_standard_error, separation
from electra_dist.train.start import Start

MAX_TOKENS = 64  # of a row that a text sample shows
_PAD = -1.0
_ORIGINAL_TOKEN = 0.0
_REPLACED_TOKEN = 1.0
_NO_RANKING = Separation(auc=math.nan, accuracy=math.nan, precision=math.nan, recall=math.nan)


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """First S tokens of a held-out row: original ids, ids that the discriminator read, and its probabilities."""

    original_S: np.ndarray  # int64 ids of the corpus
    shown_S: np.ndarray  # int64 ids with the generator's replacements
    replaced_probability_S: np.ndarray  # the discriminator's probability that the token was replaced, fp32


@dataclass(frozen=True)
class _LocalScores:
    sum_K: torch.Tensor  # float64 `Sums` over this rank's rows
    score_BS: torch.Tensor  # fp32 discriminator logits
    label_BS: torch.Tensor  # fp32: `_REPLACED_TOKEN`, `_ORIGINAL_TOKEN`, or `_PAD` where there is no real token
    rows: list[ScoredRow] = field(default_factory=list)  # some rows, on rank 0 only


class Evaluation(NamedTuple):
    """Result of an evaluation: the record for the metrics, and some rows to show to people."""

    record: EvalRecord  # equal on all ranks
    fault: str  # which result is not finite, because the model has diverged; empty if none; equal on all ranks
    rows: list[ScoredRow]  # on rank 0; empty on other ranks, and without detection of replaced tokens


@dataclass(frozen=True, kw_only=True)
class _ContextResult:
    auc: float  # NaN for an objective without a discriminator, or without replaced tokens
    standard_error: float  # NaN where it cannot be computed
    num_replaced: int
    fault: str = ""  # as in `Evaluation`


_NO_CONTEXT = _ContextResult(auc=math.nan, standard_error=math.nan, num_replaced=0)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Measures the losses of a model on held-out rows of a corpus, and how well it detects replaced tokens.

    Every rank creates an evaluator with equal values, and all ranks call `run` after the same steps.
    """

    cache: ShardCache  # of the held-out corpus; the caller closes it
    num_rows: int  # rows to evaluate; all rows if the corpus has fewer
    micro_batch: int  # rows per rank and forward pass
    seed: int  # of the run; masks and samples are drawn from it
    special: SpecialIds  # ids of the special tokens
    context_mask_prob: float | None = None  # share of tokens replaced for the context AUC; None: it is not measured
    num_shown_rows: int = 0  # rows to return in `Evaluation.rows`; at most a micro-batch

    def run(self, engine: Engine, step: int) -> Evaluation:
        """Evaluate the weights of `engine` without dropout, and leave it in training mode. Collective.

        AUC, accuracy, precision, recall and context AUC are NaN for an objective without detection of replaced
        tokens, or if an output is not finite; `Evaluation.fault` then names that output. `step` is only recorded.
        """
        engine.train(False)
        ids_RS = self._rows(self.num_rows)
        local = self._score(engine, ids_RS)
        context = _NO_CONTEXT
        if self.context_mask_prob is not None:
            context = self._context_auc(engine, self.context_mask_prob)
        engine.train(True)
        dist.all_reduce(local.sum_K)
        sums = Sums(*local.sum_K.tolist())
        score_T = _gather_batches(local.score_BS).reshape(-1)
        label_T = _gather_batches(local.label_BS).reshape(-1)
        ranking = _NO_RANKING
        fault = ""
        has_detection_loss = sums.rtd_weight != 0
        if has_detection_loss:
            is_real_T = label_T != _PAD
            fault = _outputs_fault(score_T[is_real_T])
            if not fault:
                ranking = separation(score_T[is_real_T], label_T[is_real_T] == _REPLACED_TOKEN)
        record = EvalRecord(
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
            context_auc=context.auc,
            context_auc_se=context.standard_error,
            context_replaced=context.num_replaced,
            generator_entropy=_generator_mean(sums.entropy_sum, sums),
            sampled_correct=_generator_mean(sums.sampled_correct, sums),
        )
        fault = fault or context.fault or _loss_fault(record)
        shows_rows = has_detection_loss and not fault
        return Evaluation(record=record, fault=fault, rows=local.rows if shows_rows else [])

    def _score(self, engine: Engine, ids_RS: np.ndarray) -> _LocalScores:
        """Run the model on this rank's held-out rows; return sums for metrics, and each token's score and label."""
        sums: list[torch.Tensor] = []
        scores = []
        labels = []
        shown_rows: list[ScoredRow] = []
        with torch.no_grad():
            for step_input in self._batches(engine, ids_RS):
                output = engine.forward(step_input)
                is_first_batch = not sums
                if self.num_shown_rows > 0 and is_first_batch and dist.get_rank() == 0:
                    shown_rows = first_rows(step_input.ids_BS.cpu().numpy(), output, self.num_shown_rows)
                sums.append(output.sums)
                scores.append(output.rtd_logit_BS)
                label_BS = torch.where(output.label_BS > 0, _REPLACED_TOKEN, _ORIGINAL_TOKEN)
                labels.append(torch.where(output.is_real_BS, label_BS, _PAD))
        return _LocalScores(
            sum_K=torch.stack(sums).sum(0), score_BS=torch.cat(scores), label_BS=torch.cat(labels), rows=shown_rows
        )

    def _context_auc(self, engine: Engine, mask_prob: float) -> _ContextResult:
        """Replace a share `mask_prob` of held-out tokens by tokens of other places; measure how well they are found.

        All ranks must call this.
        """
        seq_len = self.cache.corpora.seq_len
        num_rows = max(self.num_rows, rows_needed(NUM_REPLACED, mask_prob, seq_len))
        ids_RS = self._rows(num_rows)
        seed = derive_seed(self.seed, Purpose.EVAL, 1)
        context = replace_by_other_tokens(ids_RS, self.special, mask_prob, NUM_REPLACED, seed)
        shown_QS = torch.from_numpy(self._padded(context.shown_QS))
        scores = []
        rows = []
        with torch.no_grad():
            for step_input in self._batches(engine, context.original_QS):
                first = int(step_input.row_B[0])
                shown_BS = shown_QS[first : first + self.micro_batch].to(engine.device)
                scores.append(engine.forward(replace(step_input, shown_BS=shown_BS)).rtd_logit_BS)
                rows.append(step_input.row_B)
        # The batches of the ranks take turns, so the rows are brought back into their order.
        order = np.argsort(_gather_batches(torch.cat(rows)))
        score_QS = _gather_batches(torch.cat(scores))[order][: len(context.original_QS)]

        is_compared_QS = context.label_QS != NOT_COMPARED
        row_QS = np.broadcast_to(context.source_row_Q[:, None], is_compared_QS.shape)
        fault = _outputs_fault(score_QS[is_compared_QS])
        if fault:
            return replace(_NO_CONTEXT, fault=fault)
        auc, standard_error = auc_with_standard_error(
            score_QS[is_compared_QS], context.label_QS[is_compared_QS] == REPLACED, row_QS[is_compared_QS]
        )
        return _ContextResult(auc=auc, standard_error=standard_error, num_replaced=context.num_replaced)

    def _batches(self, engine: Engine, ids_RS: np.ndarray) -> Iterator[StepInput]:
        """Divide the rows among the ranks, and yield this rank's micro-batches; every rank gets the same number."""
        world_size = dist.get_world_size()
        padded_RS = self._padded(ids_RS)
        seed = derive_seed(self.seed, Purpose.EVAL)
        # In a round, rank r evaluates the r-th of as many consecutive batches as there are ranks.
        for first_of_round in range(0, len(padded_RS), self.micro_batch * world_size):
            first = first_of_round + dist.get_rank() * self.micro_batch
            rows_BS = padded_RS[first : first + self.micro_batch]
            ids_BS = torch.from_numpy(rows_BS).to(engine.device)
            # Step 0: masks and samples are equal at every evaluation.
            yield engine.module.step_input(ids_BS, rows_BS, first, (seed, 0))

    def _padded(self, ids_RS: np.ndarray) -> np.ndarray:
        """Append rows of padding, so that all ranks have the same number of batches; return all rows as int64."""
        num_rows, seq_len = ids_RS.shape
        rows_per_round = self.micro_batch * dist.get_world_size()
        num_rounds = math.ceil(num_rows / rows_per_round)
        padded_RS = np.full((num_rounds * rows_per_round, seq_len), self.special.pad, np.int64)
        padded_RS[:num_rows] = ids_RS
        return padded_RS

    def _rows(self, num_rows: int) -> np.ndarray:
        """Read `num_rows` held-out rows [num_rows, seq_len], evenly spaced over the corpus; all if there are fewer."""
        rows_per_shard = [shard.entry.rows for shard in self.cache.corpora.shards]
        shard_ends = np.cumsum(rows_per_shard)  # number of the first row after each shard
        shard_starts = np.concatenate([[0], shard_ends])
        num_available = int(shard_ends[-1])
        num_chosen = min(num_rows, num_available)
        chosen_rows = np.linspace(0, num_available, num_chosen, endpoint=False, dtype=np.int64)
        # The shard of a row is the first one that ends after it.
        shard_of_row = np.searchsorted(shard_ends, chosen_rows, side="right")
        return self.cache.read_rows(shard_of_row, chosen_rows - shard_starts[shard_of_row])


def open_evaluator(start: Start, stack: contextlib.ExitStack) -> Evaluator | None:
    """Return an evaluator on rows of `data.heldout`, or None if that is not set; `stack` closes its shard cache."""
    config = start.config
    heldout = start.inputs.heldout
    if heldout is None:
        return None
    cache = open_cache(heldout, config.data, shard_folder(config, heldout))
    stack.enter_context(contextlib.closing(cache))
    objective = config.objective
    return Evaluator(
        cache=cache,
        num_rows=config.log.eval_rows,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        special=start.engine.module.special,
        context_mask_prob=value_at(objective.mask_prob, 1.0) if not objective.facts.predicts_tokens else None,
        num_shown_rows=config.log.text_samples,
    )


def evaluation_scores(evaluation: EvalRecord, objective: ObjectiveConfig) -> dict[str, float]:
    """Return the scores by which `checkpoint.keep_best` compares checkpoints, named as the fields of `RunState`."""
    if not objective.facts.predicts_tokens:
        return {"eval_context_auc": evaluation.context_auc, "eval_loss": evaluation.rtd_loss}
    if not objective.facts.has_generator:
        return {"eval_loss": evaluation.mlm_loss}
    return {"eval_loss": evaluation.token_loss}


def _outputs_fault(score_T: np.ndarray) -> str:
    """Return a message on how many of the discriminator's outputs are not finite, or "" if all are finite."""
    num_bad = int(np.count_nonzero(~np.isfinite(score_T)))
    return f"{num_bad} of {len(score_T)} outputs of the discriminator are not finite" if num_bad else ""


def _loss_fault(record: EvalRecord) -> str:
    """Return a message on the first loss of an evaluation that is not finite, or "" if all are finite."""
    for name in ("mlm_loss", "rtd_loss", "token_loss"):
        loss = getattr(record, name)
        if not math.isfinite(loss):
            return f"{name} is {loss}"
    return ""


def _mean(total: float, count: float) -> float:
    """Return the mean `total / count` over tokens; it is 0 if there are no tokens."""
    return total / max(count, 1.0)


def _generator_mean(total: float, sums: Sums) -> float:
    """Divide a sum over the generator's predictions by their number; NaN if there is no generator network."""
    if sums.entropy_sum == 0:
        return math.nan
    return total / sums.mlm_weight


def _gather_batches(local: torch.Tensor) -> np.ndarray:
    """Join the tensors of all ranks, of equal shapes, along axis 0; return them as a NumPy array. Collective."""
    tensors = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, local.contiguous())
    return torch.cat(tensors).cpu().numpy()


def first_rows(original_BS: np.ndarray, output: StepOutput, num_rows: int) -> list[ScoredRow]:
    """Return the first `num_rows` rows of a micro-batch, each cut to 64 tokens, without padding.

    Rows that consist of padding only are left out.
    """
    assert output.shown_BS is not None, "`Objective.output` gives the ids"
    scored_rows = []
    for row in range(min(num_rows, len(original_BS))):
        is_real_S = output.is_real_BS[row, :MAX_TOKENS].cpu().numpy()
        if not is_real_S.any():
            continue
        scored_rows.append(
            ScoredRow(
                original_S=original_BS[row, :MAX_TOKENS][is_real_S],
                shown_S=output.shown_BS[row, :MAX_TOKENS].cpu().numpy()[is_real_S],
                replaced_probability_S=output.rtd_logit_BS[row, :MAX_TOKENS].sigmoid().cpu().numpy()[is_real_S],
            )
        )
    return scored_rows


def text_sample(row: ScoredRow, tokens: Sequence[str]) -> TextSample:
    """Turn the ids of a row into text, `tokens[id]` for each id, and round its probabilities to 4 decimals."""
    return TextSample(
        original=[_token(tokens, token_id) for token_id in row.original_S],
        shown=[_token(tokens, token_id) for token_id in row.shown_S],
        replaced_probability=[round(float(probability), 4) for probability in row.replaced_probability_S],
    )


def _token(tokens: Sequence[str], token_id: int) -> str:
    """Return the text of a token, or "[ID]" for an id that is not in the vocabulary but in the model's table."""
    return tokens[token_id] if token_id < len(tokens) else f"[{token_id}]"

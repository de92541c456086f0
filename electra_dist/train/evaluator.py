"""Evaluate on held-out rows: the losses and the discriminator's ROC-AUC, with the same rows and masks every time.

Guarantee: rows, masks, the generator's samples and the replacements for the context AUC depend on the corpus and the
seed only. Whatever the objective schedules, the generator samples at temperature 1 and without random replacements,
and as many tokens are masked as at the end of the run. So two evaluations of a run differ by the weights alone, and
the number of ranks changes nothing except the order in which sums are added up.

How: the first evaluation reads the rows and keeps them on the device for the later ones: 8 bytes a token. An objective
with a discriminator gets two sets of rows. In the first the generator replaces tokens, which gives the losses and
`auc`. In the second tokens are replaced by tokens from elsewhere in the rows (`train/detection_measures.py`),
which gives `context_auc`: how well the discriminator uses context. The second set has as many rows as the first, or
more if fewer than 5,000 tokens would be replaced.

Suffixes of tensor names give the axes: R rows of an evaluation, B rows of a batch, Q rows for the context AUC, S
tokens of a row, T tokens of all ranks, K fields of `Sums`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.operation_types import SpecialIds

from electra_dist.config.schedule import value_at
from electra_dist.config.sections.objective import ObjectiveFacts
from electra_dist.data.shard_cache import ShardCache, open_cache
from electra_dist.engine.engine import Engine
from electra_dist.objectives.base import StepInput, StepOutput, Sums, evaluation_values
from electra_dist.run.context_auc import NUM_REPLACED
from electra_dist.run.metrics import EvalRecord, TextSample
from electra_dist.train.detection_measures import (
    NOT_COMPARED,
    REPLACED,
    ContextRows,
    Separation,
    auc_with_standard_error,
    replace_by_other_tokens,
    rows_needed,
    separation,
)
from electra_dist.train.open_cache import shard_folder
from electra_dist.train.start import Start

MAX_TOKENS = 64  # of a row that a text sample shows
_PAD = -1.0
_ORIGINAL_TOKEN = 0.0
_REPLACED_TOKEN = 1.0
_NO_RANKING = Separation(auc=math.nan, accuracy=math.nan, precision=math.nan, recall=math.nan)


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """Held-out rows that every evaluation of a run uses, as inputs of the model in micro-batches of this rank."""

    num_rows: int  # of all ranks
    inputs: list[StepInput]
    context: ContextRows | None  # rows of all ranks for the context AUC; None: it is not measured
    context_inputs: list[StepInput]  # of these rows


@dataclass(frozen=True)
class _LocalScores:
    sum_K: torch.Tensor  # float64 `Sums` over this rank's rows
    score_BS: torch.Tensor  # fp32 discriminator logits
    label_BS: torch.Tensor  # fp32: `_REPLACED_TOKEN`, `_ORIGINAL_TOKEN`, or `_PAD` where there is no real token
    first: StepOutput  # of the first micro-batch


class Evaluation(NamedTuple):
    """Result of an evaluation: the record for the metrics, and some rows as text to show to people."""

    record: EvalRecord  # equal on all ranks
    fault: str  # which result is not finite, because the model has diverged; empty if none; equal on all ranks
    samples: list[TextSample]  # on rank 0; empty on other ranks, and without detection of replaced tokens


@dataclass(kw_only=True)
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
    num_samples: int = 0  # rows to return as text in `Evaluation.samples`; at most a micro-batch
    tokens: Sequence[str] = ()  # text of each id, for these samples
    _held_out: _HeldOut | None = field(default=None, init=False)  # made by the first evaluation

    def run(self, engine: Engine, step: int) -> Evaluation:
        """Evaluate the weights of `engine` without dropout, and leave it in training mode. Collective.

        AUC, accuracy, precision, recall and context AUC are NaN for an objective without detection of replaced
        tokens, or if an output is not finite; `Evaluation.fault` then names that output. `step` is only recorded.
        """
        if self._held_out is None:
            self._held_out = self._read_held_out(engine)
        held_out = self._held_out
        engine.train(False)
        local = self._score(engine, held_out.inputs)
        context_fields: dict[str, Any] = {}  # of the record
        context_fault = ""
        if held_out.context is not None:
            context_fields, context_fault = self._context_auc(engine, held_out.context, held_out.context_inputs)
        engine.train(True)
        dist.all_reduce(local.sum_K)
        sums = Sums(*local.sum_K.tolist())
        score_T = self._gather_rows(local.score_BS).reshape(-1)
        label_T = self._gather_rows(local.label_BS).reshape(-1)
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
            rows=held_out.num_rows,
            mlm_accuracy=sums.mlm_correct / max(sums.mlm_weight, 1.0),
            generator_entropy=_generator_mean(sums.entropy_sum, sums),
            sampled_correct=_generator_mean(sums.sampled_correct, sums),
            **sums.mean_losses(),
            **vars(ranking),
            **context_fields,
        )
        fault = fault or context_fault or _loss_fault(record)
        samples = []
        if self.num_samples > 0 and has_detection_loss and not fault and dist.get_rank() == 0:
            ids_BS = held_out.inputs[0].ids_BS.cpu().numpy()
            samples = text_samples(ids_BS, local.first, self.num_samples, self.tokens)
        return Evaluation(record=record, fault=fault, samples=samples)

    def _read_held_out(self, engine: Engine) -> _HeldOut:
        """Read the held-out rows, and replace tokens in a second set of rows for the context AUC."""
        ids_RS = self._read_rows(self.num_rows)
        inputs = self._inputs(engine, ids_RS)
        mask_prob = self.context_mask_prob
        if mask_prob is None:
            return _HeldOut(len(ids_RS), inputs, context=None, context_inputs=[])
        num_rows = max(self.num_rows, rows_needed(NUM_REPLACED, mask_prob, ids_RS.shape[1]))
        seed = derive_seed(self.seed, Purpose.EVAL, 1)
        context = replace_by_other_tokens(self._read_rows(num_rows), self.special, mask_prob, NUM_REPLACED, seed)
        context_inputs = self._inputs(engine, context.original_QS, context.shown_QS)
        return _HeldOut(len(ids_RS), inputs, context, context_inputs)

    def _score(self, engine: Engine, inputs: Sequence[StepInput]) -> _LocalScores:
        """Run the model on this rank's held-out rows; return sums of losses, and each token's score and label."""
        outputs = []
        labels = []
        with torch.no_grad():
            for step_input in inputs:
                output = engine.forward(step_input)
                outputs.append(output)
                label_BS = torch.where(output.label_BS > 0, _REPLACED_TOKEN, _ORIGINAL_TOKEN)
                labels.append(torch.where(output.is_real_BS, label_BS, _PAD))
        return _LocalScores(
            sum_K=torch.stack([output.sums for output in outputs]).sum(0),
            score_BS=torch.cat([output.rtd_logit_BS for output in outputs]),
            label_BS=torch.cat(labels),
            first=outputs[0],
        )

    def _context_auc(
        self, engine: Engine, context: ContextRows, inputs: Sequence[StepInput]
    ) -> tuple[dict[str, Any], str]:
        """Return how well the model finds tokens that come from elsewhere in the rows, and a fault. Collective.

        The first result has fields of `EvalRecord`, the second is as in `Evaluation`. `context` has the rows of all
        ranks and says which tokens were replaced; `inputs` are this rank's part.
        """
        with torch.no_grad():
            score_BS = torch.cat([engine.forward(step_input).rtd_logit_BS for step_input in inputs])
        score_QS = self._gather_rows(score_BS)[: len(context.original_QS)]
        is_compared_QS = context.label_QS != NOT_COMPARED
        row_QS = np.broadcast_to(context.source_row_Q[:, None], is_compared_QS.shape)
        fault = _outputs_fault(score_QS[is_compared_QS])
        if fault:
            return {}, fault
        auc, standard_error = auc_with_standard_error(
            score_QS[is_compared_QS], context.label_QS[is_compared_QS] == REPLACED, row_QS[is_compared_QS]
        )
        fields = {"context_auc": auc, "context_auc_se": standard_error, "context_replaced": context.num_replaced}
        return fields, ""

    def _inputs(self, engine: Engine, ids_RS: np.ndarray, shown_RS: np.ndarray | None = None) -> list[StepInput]:
        """Divide the rows `ids_RS` among the ranks, and return this rank's micro-batches; all ranks get equally many.

        If `shown_RS` is given, the generator does not run, and the discriminator reads these ids.
        """
        num_rows, seq_len = ids_RS.shape
        rows_per_round = self.micro_batch * dist.get_world_size()
        num_padded = math.ceil(num_rows / rows_per_round) * rows_per_round
        padding_RS = np.full((num_padded - num_rows, seq_len), self.special.pad, np.int64)
        padded_RS = np.concatenate([ids_RS.astype(np.int64), padding_RS])
        padded_shown_RS = None if shown_RS is None else np.concatenate([shown_RS, padding_RS])
        values = evaluation_values(engine.module.objective)
        key = (derive_seed(self.seed, Purpose.EVAL), 0)  # step 0: masks and samples are equal at every evaluation
        inputs = []
        # In a round, rank r evaluates the r-th of as many consecutive batches as there are ranks.
        for first in range(dist.get_rank() * self.micro_batch, num_padded, rows_per_round):
            rows = slice(first, first + self.micro_batch)
            ids_BS = torch.from_numpy(padded_RS[rows]).to(engine.device)
            step_input = engine.module.step_input(ids_BS, padded_RS[rows], first, key, scheduled=values)
            if padded_shown_RS is not None:
                step_input = replace(step_input, shown_BS=torch.from_numpy(padded_shown_RS[rows]).to(engine.device))
            inputs.append(step_input)
        return inputs

    def _gather_rows(self, local_BS: torch.Tensor) -> np.ndarray:
        """Gather a value for each token from all ranks, [rows, S] in the order of the rows that `_inputs` divided.

        `local_BS` are the values of this rank's rows. Collective.
        """
        tensors = [torch.empty_like(local_BS) for _ in range(dist.get_world_size())]
        dist.all_gather(tensors, local_BS.contiguous())
        # The micro-batches of the ranks take turns.
        batches = [tensor.split(self.micro_batch) for tensor in tensors]
        rounds = [torch.cat(batches_of_round) for batches_of_round in zip(*batches)]
        return torch.cat(rounds).cpu().numpy()

    def _read_rows(self, num_rows: int) -> np.ndarray:
        """Read `num_rows` rows, evenly spaced over the corpus (all if it has fewer): token ids [rows, seq_len]."""
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
        num_samples=config.log.text_samples,
        tokens=start.inputs.vocabulary.shown_tokens if config.log.text_samples > 0 else [],
    )


def evaluation_scores(evaluation: EvalRecord, objective: ObjectiveFacts) -> dict[str, float]:
    """Return the scores by which `checkpoint.keep_best` compares checkpoints, named as the fields of `RunState`."""
    if not objective.predicts_tokens:
        return {"eval_context_auc": evaluation.context_auc, "eval_loss": evaluation.rtd_loss}
    if not objective.has_generator:
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


def _generator_mean(total: float, sums: Sums) -> float:
    """Return the mean of a sum `total` over the generator's predictions; NaN if there is no generator network."""
    if sums.entropy_sum == 0:
        return math.nan
    return total / sums.mlm_weight


def text_samples(
    original_BS: np.ndarray, output: StepOutput, num_rows: int, tokens: Sequence[str]
) -> list[TextSample]:
    """Return the first `num_rows` rows of a micro-batch as text, each cut to 64 tokens, without padding.

    Rows that consist of padding only are left out. `tokens` has the text of each id; probabilities have 4 decimals.
    """
    assert output.shown_BS is not None, "`Objective.output` gives the ids"
    samples = []
    for row in range(min(num_rows, len(original_BS))):
        is_real_S = output.is_real_BS[row, :MAX_TOKENS].cpu().numpy()
        if not is_real_S.any():
            continue
        original_S = original_BS[row, :MAX_TOKENS][is_real_S]
        shown_S = output.shown_BS[row, :MAX_TOKENS].cpu().numpy()[is_real_S]
        probability_S = output.rtd_logit_BS[row, :MAX_TOKENS].sigmoid().cpu().numpy()[is_real_S]
        samples.append(
            TextSample(
                original=[_token(tokens, token_id) for token_id in original_S],
                shown=[_token(tokens, token_id) for token_id in shown_S],
                replaced_probability=[round(float(probability), 4) for probability in probability_S],
            )
        )
    return samples


def _token(tokens: Sequence[str], token_id: int) -> str:
    """Return the text of a token, or "[ID]" for an id that is not in the vocabulary but in the model's table."""
    return tokens[token_id] if token_id < len(tokens) else f"[{token_id}]"

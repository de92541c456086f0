"""Score encoders on held-out rows without training: how well they tell replaced from original tokens.

The two measures differ in where the replacements come from.

The context AUC says how well an encoder finds tokens that do not fit their context. Some tokens of held-out rows are
replaced by tokens of other places (`train/detection_measures.py`). A score that depends on the token alone,
such as its frequency, gives an AUC of 0.5, so a higher AUC shows that the encoder uses the context. All runs of a
comparison read the same rows with the same replacements. A discriminator reads each row once. A masked language model
reads a copy of the row for each of the 10,000 compared tokens, in which this token is masked.

Held-out detection is the task of replaced-token detection itself: the generator of the same checkpoint samples the
replacements, so only an objective with a generator and a discriminator has a score. The rows, the masked positions and
the random numbers of the samples are equal in all runs, which makes the errors of differences small. A better
generator makes the task harder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import is_candidate
from typing_extensions import override

from electra_dist.compare.comparison_config import CONTEXT_AUC, DETECTION, CompareConfig, Criterion
from electra_dist.compare.comparison_runs import Plan
from electra_dist.compare.measures import LoadGenerator, Measure
from electra_dist.config import ObjectiveConfig
from electra_dist.data.corpora import Corpora
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.errors import UserError
from electra_dist.finetune.stored_scores import ItemResults, Measured, digest_of
from electra_dist.finetune.task_metrics import resampled
from electra_dist.finetune.training_loop import Progress, predict, quiet
from electra_dist.pretrained.encoder import Pretrained, device_of_choice
from electra_dist.run.context_auc import NUM_REPLACED
from electra_dist.scoring.token_scores import score_places, token_log_prob_function
from electra_dist.scoring.trigram_model import TrigramModel
from electra_dist.train.detection_measures import (
    NOT_COMPARED,
    REPLACED,
    auc_with_standard_error,
    replace_by_other_tokens,
    roc_auc,
    rows_needed,
)

_REPLACED_SHARE = 0.15  # of the tokens of a row: the share that the paper masks
_SEED = 0  # of the replacements, equal for all runs
_ROWS_PER_BATCH = 16  # of the generator, whose output at a masked position has a number for each token


class _AucMeasure(Measure):
    """Base class of measures that give a ROC-AUC of tokens, with its standard error over the choice of the rows."""

    metric = "ROC-AUC"
    is_task = False

    def _auc(self, scores: torch.Tensor, is_replaced: np.ndarray, rows: np.ndarray) -> Measured:
        """Return the ROC-AUC of the scores of n tokens, high for original ones, with its error and resamples.

        `rows` has the number of each token's row; the rows are the items that are resampled.
        """
        replaced_scores = -scores.numpy()
        auc, standard_error = auc_with_standard_error(replaced_scores, is_replaced, rows)
        if np.isnan(standard_error):  # it is not known with a single row
            return self.measured(auc)
        places_of_rows = [np.flatnonzero(rows == row) for row in np.unique(rows)]

        def auc_of(drawn_rows: np.ndarray) -> float:
            places = np.concatenate([places_of_rows[row] for row in drawn_rows])
            return roc_auc(replaced_scores[places], is_replaced[places])

        values = resampled(len(places_of_rows), auc_of)
        # A resample of few rows may have no two kinds of tokens.
        items = None if np.isnan(values).any() else ItemResults(resamples=values)
        return self.measured(auc, standard_error=standard_error, items=items)


class ContextMeasure(_AucMeasure):
    """Measure of how well an encoder, without fine-tuning, finds tokens replaced by tokens from other places."""

    name = CONTEXT_AUC
    mode = "context"
    scores_trigrams = True

    def __init__(self, heldout: Corpora) -> None:
        """Read the first rows of a held-out corpus, and replace some of their tokens by tokens of other places.

        There are R rows read, and Q shown rows of S tokens: copies of rows, in which some tokens are replaced.
        """
        special = SpecialIds.from_tokens(heldout.tokenizer.special)
        ids_RS = _scored_rows(heldout)
        context = replace_by_other_tokens(ids_RS, special, _REPLACED_SHARE, NUM_REPLACED, _SEED)
        # Replaced tokens are compared with as many original ones; all other tokens have the label NOT_COMPARED.
        is_compared_QS = context.label_QS != NOT_COMPARED
        # Of each compared token: (index of its shown row, position), whether it is replaced, and which row was read.
        self._places = [(int(row), int(position)) for row, position in np.argwhere(is_compared_QS)]
        self._is_replaced = context.label_QS[is_compared_QS] == REPLACED
        self._source_rows = np.broadcast_to(context.source_row_Q[:, None], is_compared_QS.shape)[is_compared_QS]
        self._rows = _without_padding(context.shown_QS, special)
        self.digest = digest_of({"rows": self._rows, "places": self._places})

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        """Return the ROC-AUC of replaced against original tokens; the score is None if no two tokens are different."""
        if not self._is_replaced.any():
            return self.measured(None, failures=("the held-out rows have no two different tokens",))
        scores = score_places(encoder, self._rows, self._places, device_of_choice(), progress)
        return self._auc(scores, self._is_replaced, self._source_rows)

    @override
    def score_trigrams(self, model: TrigramModel, encoder: Pretrained, progress: Progress) -> Measured:
        """Score each place by the log-probabilities of three tokens: its own and the next two, which depend on it."""
        values = [model.log_probs(row) for row in self._rows]
        sums = [values[row][position - 1 : position + 2].sum() for row, position in self._places]
        return self._auc(torch.stack(sums), self._is_replaced, self._source_rows)


class DetectionMeasure(_AucMeasure):
    """Measure of how well a discriminator finds the tokens that the generator of the same checkpoint has sampled."""

    name = DETECTION
    mode = "detection"

    def __init__(self, heldout: Corpora) -> None:
        """Read the first rows of a held-out corpus, and choose the positions in each that show [MASK]."""
        special = SpecialIds.from_tokens(heldout.tokenizer.special)
        ids_RS = _scored_rows(heldout)
        rng = np.random.default_rng(_SEED)
        self._rows: list[list[int]] = []  # without padding
        self._masked: list[list[int]] = []  # of each row: the positions that are masked, ascending
        self._draws: list[list[float]] = []  # the random number from 0 to 1 by which each of them is sampled
        self._places = []  # all tokens that could have been masked, as (index of the row, position)
        for ids_S in _without_padding(ids_RS, special):
            candidates = np.flatnonzero(is_candidate(torch.tensor(ids_S), special).numpy())
            if len(candidates) == 0 or special.mask in ids_S:
                continue
            masked = np.sort(rng.permutation(candidates)[: max(1, round(_REPLACED_SHARE * len(candidates)))])
            self._places += [(len(self._rows), position) for position in candidates.tolist()]
            self._rows.append(ids_S)
            self._masked.append(masked.tolist())
            self._draws.append(rng.random(len(masked)).tolist())
        self.digest = digest_of({"rows": self._rows, "masked": self._masked, "draws": self._draws})

    @override
    def applies_to(self, objective: ObjectiveConfig) -> bool:
        facts = objective.facts
        return objective.trains_generator and not facts.predicts_tokens and not facts.has_cloze_generator

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        """Return the ROC-AUC of replaced against original tokens; a sample that is the original token is original."""
        device = device_of_choice()
        shown_rows = self._sample(load_generator(), device, progress)
        is_replaced = np.array([shown_rows[row][at] != self._rows[row][at] for row, at in self._places], dtype=bool)
        if is_replaced.all() or not is_replaced.any():
            return self.measured(None, failures=("the generator has replaced no token of the held-out rows, or all",))
        scores = score_places(encoder, shown_rows, self._places, device, progress)
        return self._auc(scores, is_replaced, np.array([row for row, _ in self._places]))

    def _sample(self, generator: Pretrained, device: torch.device, progress: Progress) -> list[list[int]]:
        """Return the rows of token ids with a sample of the generator, at temperature 1, at each masked position."""
        special = generator.special
        masked_rows = [row.copy() for row in self._rows]
        for masked_row, positions in zip(masked_rows, self._masked, strict=True):
            for position in positions:
                masked_row[position] = special.mask
        token_log_probs = token_log_prob_function(generator, device)
        backbone = generator.backbone().to(device).eval()

        def probabilities(ids_BS: torch.Tensor) -> torch.Tensor:
            """Return the distribution over the V tokens at each of the n masked positions, [n, V]."""
            probability_nV = token_log_probs(backbone(ids_BS)[ids_BS == special.mask]).double().exp()
            # A token that ends a row or is no text would change how the discriminator reads the row.
            probability_nV[:, [special.pad, special.cls, special.sep, special.mask]] = 0.0
            return probability_nV

        batches = predict(probabilities, masked_rows, special.pad, _ROWS_PER_BATCH, device, progress)
        for rows, probability_nV in batches:
            draw_n = torch.tensor([draw for row in rows for draw in self._draws[row]], dtype=torch.float64)
            end_nV = probability_nV.cpu().cumsum(1)
            # The first token up to which the probabilities add up to more than the draw's share of their sum.
            sampled_n = torch.searchsorted(end_nV, draw_n[:, None] * end_nV[:, -1:], right=True)[:, 0]
            places = [(row, position) for row in rows for position in self._masked[row]]
            for (row, position), token in zip(places, sampled_n.tolist(), strict=True):
                masked_rows[row][position] = token
        return masked_rows


def open_heldout_measures(compare: CompareConfig, file: Path, plan: Plan, heldout: Corpora | None) -> list[Measure]:
    """Return the measures on the held-out rows of a comparison's config `file`; none if the base config names no rows.

    Raises UserError if the config asks for a score that cannot be made.
    """
    metrics = () if compare.criterion is None else compare.criterion.metrics
    needing = [name for name in (CONTEXT_AUC, DETECTION) if name in metrics]
    key = f"criterion.metrics: `{needing[0]}`" if needing else "detection"
    if heldout is None:
        if needing or compare.detection:
            raise UserError(f"{file}: {key} needs held-out rows; set `data.heldout` in {compare.base}, or remove it")
        return []
    measures: list[Measure] = [ContextMeasure(heldout)]
    if compare.detection:
        detection = DetectionMeasure(heldout)
        if compare.criterion is not None and DETECTION in metrics:
            _check_criterion(compare.criterion, detection, plan, file)
        measures.append(detection)
    return measures


def _check_criterion(criterion: Criterion, detection: DetectionMeasure, plan: Plan, file: Path) -> None:
    for entry in (criterion.arm, criterion.baseline):
        if not detection.applies_to(plan.of(entry)[0].config.objective):
            raise UserError(
                f"{file}: criterion.metrics: {entry} has no score `{DETECTION}`, because it does not train a "
                f"generator and a discriminator; remove the metric"
            )


def first_blocks(corpora: Corpora, num_rows: int, progress: Progress = quiet) -> Iterator[np.ndarray]:
    """Yield the token ids of a corpus's first rows as blocks [rows, seq_len]; all of its rows if it has fewer."""
    num_rows = min(corpora.num_rows, num_rows)
    num_read = 0
    for _, block_RS in rows_of_shards(corpora, range(len(corpora.shards))):
        yield block_RS[: num_rows - num_read]
        num_read = min(num_rows, num_read + len(block_RS))
        progress("read rows", num_read, num_rows)
        if num_read == num_rows:
            return


def _scored_rows(heldout: Corpora) -> np.ndarray:
    num_rows = rows_needed(NUM_REPLACED, _REPLACED_SHARE, heldout.seq_len)
    return np.concatenate(list(first_blocks(heldout, num_rows)))


def _without_padding(ids_RS: np.ndarray, special: SpecialIds) -> list[list[int]]:
    """Return the token ids of each row up to its last token that is not [PAD]."""
    rows: list[list[int]] = []
    for ids_S in ids_RS:
        length = np.flatnonzero(ids_S != special.pad)[-1] + 1
        rows.append(ids_S[:length].tolist())
    return rows

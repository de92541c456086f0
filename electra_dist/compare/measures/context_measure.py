"""Score encoders by their context AUC on held-out rows: how well they find tokens that do not fit their context.

Some tokens of the rows are replaced by tokens of other places (`objectives/context_replacements.py`). A score that
depends on the token alone, such as its frequency, gives an AUC of 0.5, so a higher AUC shows that the encoder uses the
context. All runs of a comparison read the same rows with the same replacements, whatever their objectives and seeds.

How: the encoder gives each compared token a score of being the original one (`finetune/sentences/token_scores.py`). A
discriminator reads each row once. A masked language model reads a copy of the row for each of the 10,000 compared
tokens, in which this token is masked.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from electra_dist.analysis.context_auc import NUM_REPLACED
from electra_dist.analysis.roc_auc import auc_with_standard_error
from electra_dist.compare.comparison_config import CONTEXT_AUC
from electra_dist.compare.measures.measure import Measure, Measured, digest_of
from electra_dist.data.corpora import Corpora
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.finetune.sentences.token_scores import score_places
from electra_dist.finetune.training_loop import Progress
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.context_replacements import NOT_COMPARED, REPLACED, replace_by_other_tokens, rows_needed
from electra_dist.pretrained.load_encoder import Pretrained, device_of_choice

_REPLACED_SHARE = 0.15  # of the tokens of a row: the share that the paper masks
_SEED = 0  # of the replacements, equal for all runs


class ContextMeasure(Measure):
    """Measure of how well an encoder, without fine-tuning, finds tokens replaced by tokens from other places."""

    name = CONTEXT_AUC
    metric = "ROC-AUC"

    def __init__(self, heldout: Corpora) -> None:
        """Read the first rows of a held-out corpus, and replace some of their tokens by tokens of other places."""
        special = SpecialIds.from_tokens(heldout.tokenizer.special)
        ids_RS = _first_rows(heldout, rows_needed(NUM_REPLACED, _REPLACED_SHARE, heldout.seq_len))
        context = replace_by_other_tokens(ids_RS, special, _REPLACED_SHARE, NUM_REPLACED, _SEED)
        is_compared_QS = context.label_QS != NOT_COMPARED
        # Index of the row and position in it, of each compared token.
        self._places = [(int(row), int(position)) for row, position in np.argwhere(is_compared_QS)]
        self._is_replaced = context.label_QS[is_compared_QS] == REPLACED
        self._source_rows = np.broadcast_to(context.source_row_Q[:, None], is_compared_QS.shape)[is_compared_QS]
        self._rows = []
        for shown_S in context.shown_QS:
            length = np.flatnonzero(shown_S != special.pad)[-1] + 1
            self._rows.append(shown_S[:length].tolist())
        self.digest = digest_of({"rows": self._rows, "places": self._places})

    @override
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Return the ROC-AUC of replaced against original tokens; the value is None if no two tokens are different."""
        if not self._is_replaced.any():
            return Measured(value=None, failures=("the held-out rows have no two different tokens",))
        scores = score_places(encoder, self._rows, self._places, device_of_choice(), progress)
        auc, standard_error = auc_with_standard_error(-scores.numpy(), self._is_replaced, self._source_rows)
        is_known = not np.isnan(standard_error)  # it is not known with a single row
        return Measured(value=auc, standard_error=standard_error if is_known else None)


def _first_rows(corpora: Corpora, num_rows: int) -> np.ndarray:
    """Return the token ids of the first rows of a corpus, [num_rows, S]; all of its rows if it has fewer."""
    blocks = []
    num_missing = num_rows
    for _, block in rows_of_shards(corpora, range(len(corpora.shards))):
        blocks.append(block[:num_missing])
        num_missing -= len(blocks[-1])
        if num_missing == 0:
            break
    return np.concatenate(blocks)

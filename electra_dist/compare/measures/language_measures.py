"""Score encoders on minimal pairs of sentences and on the words of a treebank."""

from __future__ import annotations

import math
from pathlib import Path

from typing_extensions import override

from electra_dist.compare.comparison_config import MINIMAL_PAIRS, TaskEntry
from electra_dist.compare.measures.measure import Measure, Measured, digest_of, layer_details
from electra_dist.finetune.sentences.minimal_pairs import ALL, PairScore, score_minimal_pairs, score_sentence_pairs
from electra_dist.finetune.sentences.pair_files import read_pair_files
from electra_dist.finetune.training_loop import Progress
from electra_dist.finetune.treebank.conllu_files import read_treebank
from electra_dist.finetune.treebank.word_probes import Target, probe_words
from electra_dist.pretrained.load_encoder import Pretrained, device_of_choice


class BuiltInPairsMeasure(Measure):
    """Measure of how often an encoder, without fine-tuning, prefers the grammatical sentence of a generated pair.
    The two sentences of a pair differ in one word, which is wrongly singular or plural in one of them.
    """

    name = MINIMAL_PAIRS
    metric = "accuracy"

    def __init__(self, pairs_per_kind: int) -> None:
        self._pairs_per_kind = pairs_per_kind
        self.digest = f"{MINIMAL_PAIRS} {pairs_per_kind}"

    @override
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Return the share of pairs whose grammatical sentence scores higher: of all pairs, and of each kind."""
        return _of_pair_scores(score_minimal_pairs(encoder, self._pairs_per_kind, device_of_choice(), progress))


class PairFilesMeasure(Measure):
    """Measure of how often an encoder, without fine-tuning, prefers the grammatical sentence of a pair from a file."""

    metric = "accuracy"

    def __init__(self, path: Path, pairs_per_kind: int) -> None:
        """Read a file or folder in the formats of `pair_files.py`; its name without suffix becomes the column's name.
        At most `pairs_per_kind` pairs of each kind are used, always the same ones.
        """
        self.name = path.stem
        files = read_pair_files([path]).sample(pairs_per_kind)
        self._pairs = files.pairs
        self.digest = digest_of({"pairs": files.sha256, "per_kind": pairs_per_kind, "sentence": "sum over all tokens"})

    @override
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Return the share of pairs whose grammatical sentence scores higher: of all pairs, and of each kind."""
        return _of_pair_scores(score_sentence_pairs(encoder, self._pairs, device_of_choice(), progress))


class TreebankMeasure(Measure):
    """Measure of how well a probe of frozen states finds the parts of speech or the syntactic heads of words."""

    metric = "accuracy"

    def __init__(self, name: str, folder: Path, target: Target, entry: TaskEntry) -> None:
        self.name = name
        self.at = entry.at
        self._target = target
        treebank = read_treebank(folder)
        self._treebank = treebank.sample(entry.max_train)
        self.digest = digest_of({"treebank": treebank.sha256, "target": target, "max_train": entry.max_train})

    @override
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Return the accuracy on the words of the test sentences, at the layer chosen on held-out training data."""
        result = probe_words(encoder, self._treebank, self._target, device_of_choice(), progress)
        return Measured(
            value=result.score,
            standard_error=None if math.isnan(result.standard_error) else result.standard_error,
            layer=result.layer,
            details=layer_details(result.layer_scores),
        )


def _of_pair_scores(scores: list[PairScore]) -> Measured:
    """Return the accuracy on all pairs with its standard error; `details` has the accuracy on each kind of pair."""
    *kind_scores, total = scores
    assert total.phenomenon == ALL
    return Measured(
        value=total.accuracy,
        standard_error=total.standard_error,
        details={score.phenomenon: score.accuracy for score in kind_scores},
    )

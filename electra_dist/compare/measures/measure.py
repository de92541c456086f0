"""Define the interface of the ways in which a comparison scores an encoder, and what a score consists of."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from typing import Any, Literal

from electra_dist.config import canonical_json
from electra_dist.finetune.training_loop import Progress
from electra_dist.pretrained.load_encoder import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Score of one encoder by one measure, with its standard error and scores of single layers or kinds of pairs."""

    value: float | None  # a fraction; None if there is no score, for example because every fine-tuning run diverged
    failures: tuple[str, ...] = ()  # why there is no score, or why seeds of fine-tuning count as failed, one line each
    standard_error: float | None = None  # over the choice of the test examples; None if it is not known
    layer: int | None = None  # of a probe: the layer that was chosen on the training data; 0 is the embeddings
    details: dict[str, float] = dataclasses.field(default_factory=dict)  # kind of pair, or "layer 2" -> its score


class Measure(abc.ABC):
    """Interface of a way to score encoders, such as on a task, a treebank, minimal pairs, or by the context AUC."""

    name: str  # title of the column in the table of scores
    metric: str  # name of the score, such as "accuracy"
    digest: str  # digest of the data and of how they are used; part of the identity of a score
    at: Literal["all", "ends"] = "all"  # checkpoints that are scored: all, or the initial and the last weights only

    @abc.abstractmethod
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Score an encoder, for example by fine-tuning a copy of it on a task; the encoder itself is not changed.
        Raises UserError if the encoder cannot be scored, for example because it has no pretraining head.
        """


def digest_of(tree: dict[str, Any]) -> str:
    """Return the sha256, in hexadecimal, of nested dicts and lists; equal contents give equal digests."""
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


def layer_details(layer_scores: list[float]) -> dict[str, float]:
    """Return a probe's scores keyed by "layer 0", "layer 1" and so on; layer 0 is the embeddings."""
    return {f"layer {layer}": score for layer, score in enumerate(layer_scores)}

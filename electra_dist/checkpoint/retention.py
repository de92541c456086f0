"""Decide which checkpoints may be deleted, from the checkpoints that exist and the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.config import CheckpointConfig


@dataclass(frozen=True)
class HeldOutScore:
    """Scores of a checkpoint on held-out rows, from which the best checkpoint is chosen. None means no score."""

    context_auc: float | None = None  # None without a discriminator
    loss: float | None = None  # of the discriminator or, without one, of the network that predicts tokens


NOT_EVALUATED = HeldOutScore()


@dataclass(frozen=True, order=True)
class CheckpointInfo:
    """Facts about a committed checkpoint that decide whether it is kept. Instances sort by step, then by attempt."""

    step: int
    attempt: int  # number of the start of the run that wrote it
    folder: str
    score: HeldOutScore = NOT_EVALUATED  # also if its manifest is damaged


def superfluous(
    checkpoints: Sequence[CheckpointInfo], policy: CheckpointConfig, rollback_steps: int
) -> list[CheckpointInfo]:
    """Return the checkpoints of one store that the retention policy does not keep, oldest first. Nothing is deleted.
    A checkpoint is kept if it is one of the newest `keep_last`, if `keep_every_steps` divides its step, if
    `keep_steps` names its step, or if it is one of the first `keep_best` in `best_first`. Two are always kept: the
    newest, and the newest that is at least `rollback_steps` (`guard.most_skipped`) older. A rollback skips at most
    that many steps before the newest checkpoint, so it finds a checkpoint that was not trained on a skipped step.
    """
    ordered = sorted(checkpoints)
    num_newest = max(1, policy.keep_last)
    keep = set(ordered[-num_newest:])
    older = [checkpoint for checkpoint in ordered if checkpoint.step <= ordered[-1].step - rollback_steps]
    keep |= set(older[-1:])
    keep |= {checkpoint for checkpoint in ordered if checkpoint.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {checkpoint for checkpoint in ordered if checkpoint.step % policy.keep_every_steps == 0}
    keep |= set(best_first(ordered)[: policy.keep_best])
    return [checkpoint for checkpoint in ordered if checkpoint not in keep]


def best_first(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints that have a score on held-out rows, the best first; of equal ones the newest first.
    Checkpoints with a context AUC come first, the highest first; the others follow by their loss, the lowest first.
    """
    ranked = []
    for checkpoint in checkpoints:
        score = checkpoint.score
        newest_first = (-checkpoint.step, -checkpoint.attempt)
        if score.context_auc is not None:
            ranked.append(((0, -score.context_auc, *newest_first), checkpoint))
        elif score.loss is not None:
            ranked.append(((1, score.loss, *newest_first), checkpoint))
    return [checkpoint for _, checkpoint in sorted(ranked, key=lambda entry: entry[0])]

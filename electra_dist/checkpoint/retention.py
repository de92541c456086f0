"""Decide which checkpoints of a store are kept, from the checkpoints that exist and the config, and delete the others.

Guarantee: only the newest start of the run deletes. The manifest goes first, so a kill leaves no checkpoint that lacks
files. Files in the folder of a checkpoint that no save has written stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from electra_dist.checkpoint.checkpoint import Checkpoint, checkpoints
from electra_dist.checkpoint.commit import check_fence, is_of_checkpoint
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.config import CheckpointConfig
from electra_dist.errors import StoreAway, StoreError, TornCheckpoint
from electra_dist.store.interface import Store


@dataclass(frozen=True)
class HeldOutScore:
    """Scores of a checkpoint on held-out rows, from which the best checkpoint is chosen. None means no score."""

    context_auc: float | None = None  # None without a discriminator
    loss: float | None = None  # of the discriminator or, without one, of the network that predicts tokens


NOT_EVALUATED = HeldOutScore()


def superfluous(
    candidates: Sequence[Checkpoint],
    policy: CheckpointConfig,
    rollback_steps: int,
    scores: Mapping[Checkpoint, HeldOutScore],
) -> list[Checkpoint]:
    """Return the checkpoints of one store that the retention policy does not keep, oldest first. Nothing is deleted.
    A checkpoint is kept if it is one of the newest `keep_last`, if `keep_every_steps` divides its step, if
    `keep_steps` names its step, or if it is one of the first `keep_best` in `best_first`. Two are always kept: the
    newest, and the newest that is at least `rollback_steps` (`guard.most_skipped`) older. A rollback skips at most
    that many steps before the newest checkpoint, so it finds a checkpoint that was not trained on a skipped step.
    """
    ordered = sorted(candidates, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    num_newest = max(1, policy.keep_last)
    keep = set(ordered[-num_newest:])
    older = [checkpoint for checkpoint in ordered if checkpoint.step <= ordered[-1].step - rollback_steps]
    keep |= set(older[-1:])
    keep |= {checkpoint for checkpoint in ordered if checkpoint.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {checkpoint for checkpoint in ordered if checkpoint.step % policy.keep_every_steps == 0}
    keep |= set(best_first(ordered, scores)[: policy.keep_best])
    return [checkpoint for checkpoint in ordered if checkpoint not in keep]


def best_first(candidates: Sequence[Checkpoint], scores: Mapping[Checkpoint, HeldOutScore]) -> list[Checkpoint]:
    """Return the checkpoints that have a score on held-out rows, the best first; of equal ones the newest first.
    Checkpoints with a context AUC come first, the highest first; the others follow by their loss, the lowest first.
    """
    ranked = []
    for checkpoint in candidates:
        score = scores.get(checkpoint, NOT_EVALUATED)
        newest_first = (-checkpoint.step, -checkpoint.attempt)
        if score.context_auc is not None:
            ranked.append(((0, -score.context_auc, *newest_first), checkpoint))
        elif score.loss is not None:
            ranked.append(((1, score.loss, *newest_first), checkpoint))
    return [checkpoint for _, checkpoint in sorted(ranked, key=lambda entry: entry[0])]


def held_out_score(checkpoint: Checkpoint) -> HeldOutScore:
    """Read a checkpoint's scores on held-out rows from its manifest; `NOT_EVALUATED` if absent or unreadable.
    Raises StoreAway if the store does not respond, so that a good checkpoint does not count as one without scores.
    """
    try:
        state = checkpoint.manifest().state
    except StoreAway:
        raise
    except (TornCheckpoint, StoreError):
        return NOT_EVALUATED
    return HeldOutScore(context_auc=state.eval_context_auc, loss=state.eval_loss)


def retain(
    target: Store,
    policy: CheckpointConfig,
    rollback_steps: int,
    attempt: int,
    scores: dict[Checkpoint, HeldOutScore],
) -> None:
    """Delete the checkpoints of a target that the retention policy does not keep (see `superfluous`). Rank 0 only.
    Checkpoints that were set aside stay. If the policy has `keep_best`, `scores` receives the scores that it lacks.
    Raises Fenced if a newer start of the run exists; nothing was deleted then.
    """
    candidates = checkpoints([target])
    if policy.keep_best:
        for checkpoint in candidates:
            if checkpoint not in scores:
                scores[checkpoint] = held_out_score(checkpoint)
    check_fence(target, attempt)
    for checkpoint in superfluous(candidates, policy, rollback_steps, scores):
        target.delete(checkpoint.key(MANIFEST))
        target.delete_all([key for key in target.list(f"{checkpoint.folder}/") if is_of_checkpoint(key)])

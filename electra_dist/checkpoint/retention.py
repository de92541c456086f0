"""Decide which checkpoints may be deleted, from the checkpoints that exist and the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.config import CheckpointConfig


@dataclass(frozen=True, order=True)
class CheckpointInfo:
    """Facts about a committed checkpoint that decide whether it is kept. Instances sort by step, then by attempt.

    The attempt is the number of the start of the run that wrote the checkpoint.
    """

    step: int
    attempt: int  # number of the start of the run that wrote it
    folder: str
    eval_rtd_loss: float | None = None  # None: no evaluation at its step, or its manifest is damaged


def superfluous(checkpoints: Sequence[CheckpointInfo], policy: CheckpointConfig) -> list[CheckpointInfo]:
    """Return the checkpoints that the retention policy does not keep, oldest first. Nothing is deleted.

    A checkpoint is kept if it is one of the newest `keep_last`, if `keep_every_steps` divides its step, if
    `keep_steps` names its step, or if it is one of the `keep_best` with the lowest evaluation loss on held-out rows
    (of equal losses the newer one). The newest checkpoint is always kept, whatever the policy is.

    Args:
        checkpoints: all committed checkpoints of one store, in any order.
        policy: the section `checkpoint` of the config.
    """
    ordered = sorted(checkpoints)
    num_newest = max(1, policy.keep_last)
    keep = set(ordered[-num_newest:])
    keep |= {checkpoint for checkpoint in ordered if checkpoint.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {checkpoint for checkpoint in ordered if checkpoint.step % policy.keep_every_steps == 0}
    keep |= set(_best_first(ordered)[: policy.keep_best])
    return [checkpoint for checkpoint in ordered if checkpoint not in keep]


def _best_first(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints with an evaluation loss, the lowest loss first; of equal losses the newest first.

    Checkpoints at whose step there was no evaluation are left out.
    """
    losses = {
        checkpoint: checkpoint.eval_rtd_loss for checkpoint in checkpoints if checkpoint.eval_rtd_loss is not None
    }
    return sorted(losses, key=lambda checkpoint: (losses[checkpoint], -checkpoint.step, -checkpoint.attempt))

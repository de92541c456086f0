"""Decide which checkpoints may be deleted, from the checkpoints that exist and the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.config import CheckpointConfig


@dataclass(frozen=True, order=True)
class CheckpointInfo:
    """The facts about a committed checkpoint that decide whether it is kept. Sorts by step, then by attempt."""

    step: int
    attempt: int
    folder: str
    eval_rtd_loss: float | None = None  # None: no evaluation at its step, or its manifest is damaged


def superfluous(checkpoints: Sequence[CheckpointInfo], policy: CheckpointConfig) -> list[CheckpointInfo]:
    """Return the checkpoints that the retention policy does not keep, oldest first. Nothing is deleted.

    A checkpoint is kept if it is one of the newest `keep_last`, if `keep_every_steps` divides its step, if
    `keep_steps` names its step, or if it is one of the `keep_best` with the lowest held-out loss (of equal losses the
    newer one). The newest checkpoint is always kept, whatever the policy is.

    Args:
        checkpoints: all committed checkpoints of one target, in any order.
    """
    ordered = sorted(checkpoints)
    num_newest = max(1, policy.keep_last)
    keep = set(ordered[-num_newest:])
    keep |= {checkpoint for checkpoint in ordered if checkpoint.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {checkpoint for checkpoint in ordered if checkpoint.step % policy.keep_every_steps == 0}
    by_loss = sorted(
        (checkpoint.eval_rtd_loss, -checkpoint.step, -checkpoint.attempt, checkpoint)
        for checkpoint in ordered
        if checkpoint.eval_rtd_loss is not None
    )
    keep |= {checkpoint for *_, checkpoint in by_loss[: policy.keep_best]}
    return [checkpoint for checkpoint in ordered if checkpoint not in keep]

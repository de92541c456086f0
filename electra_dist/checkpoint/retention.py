"""Which checkpoints may go: a pure function of those that there are and of what the config wants kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from electra_dist.config import CheckpointConfig


@dataclass(frozen=True, order=True)
class CheckpointInfo:
    """A committed checkpoint."""

    step: int
    attempt: int
    folder: str
    eval_rtd_loss: float | None = None  # None: no evaluation at its step, or its manifest is damaged


def superfluous(checkpoints: Sequence[CheckpointInfo], policy: CheckpointConfig) -> list[CheckpointInfo]:
    """What to delete, oldest first.

    Kept are the newest `keep_last`, all whose step `keep_every_steps` divides or `keep_steps` names, and the
    `keep_best` of lowest held-out loss (of equal ones the newer). The newest of all is kept whatever the policy says.
    """
    ordered = sorted(checkpoints)
    keep = set(ordered[-max(1, policy.keep_last) :]) | {c for c in ordered if c.step in policy.keep_steps}
    if policy.keep_every_steps:
        keep |= {c for c in ordered if c.step % policy.keep_every_steps == 0}
    judged = [(c.eval_rtd_loss, -c.step, -c.attempt, c) for c in ordered if c.eval_rtd_loss is not None]
    keep |= {c for *_, c in sorted(judged)[: policy.keep_best]}
    return [c for c in ordered if c not in keep]

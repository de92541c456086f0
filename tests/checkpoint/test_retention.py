"""Retention as a pure function: exactly the checkpoints that the policy names are kept."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from electra_dist.checkpoint.checkpoint_manifest import folder_name
from electra_dist.checkpoint.retention import NOT_EVALUATED, CheckpointInfo, HeldOutScore, superfluous
from electra_dist.config import CheckpointConfig

CHECKPOINTS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 3),
        st.none() | st.sampled_from([0.5, 0.6, 0.7]),
        st.none() | st.sampled_from([0.1, 0.2, 0.3]),
    ),
    unique_by=lambda c: c[:2],
)


def is_better(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Whether `one` was evaluated and is better than `other`: by context AUC, then by loss, then by age."""
    if one.score.context_auc != other.score.context_auc:
        return (one.score.context_auc or 0) > (other.score.context_auc or 0)
    if one.score.context_auc is None and one.score.loss != other.score.loss:
        return (one.score.loss or math.inf) < (other.score.loss or math.inf)
    return one.score != NOT_EVALUATED and (one.step, one.attempt) > (other.step, other.attempt)


@given(
    saved=CHECKPOINTS,
    rollback_steps=st.integers(0, 20),
    policy=st.builds(
        lambda last, every, best, steps: {
            "keep_last": last,
            "keep_every_steps": every,
            "keep_best": best,
            "keep_steps": steps,
        },
        st.integers(1, 5),
        st.integers(0, 12),
        st.integers(0, 4),
        st.lists(st.integers(1, 40), max_size=3),
    ),
)
def test_retention_keeps_exactly_the_checkpoints_that_the_policy_names(
    saved: list[tuple[int, int, float | None, float | None]], rollback_steps: int, policy: dict[str, Any]
) -> None:
    checkpoints = [
        CheckpointInfo(step, attempt, folder_name(step, attempt), HeldOutScore(context_auc=auc, loss=loss))
        for step, attempt, auc, loss in saved
    ]
    to_delete = set(superfluous(checkpoints, CheckpointConfig(**policy), rollback_steps))
    newest_step = max((c.step for c in checkpoints), default=0)
    old_enough = max((c for c in checkpoints if c.step + rollback_steps <= newest_step), default=None)
    for checkpoint in checkpoints:
        step = checkpoint.step
        num_newer = sum((c.step, c.attempt) > (step, checkpoint.attempt) for c in checkpoints)
        num_better = sum(is_better(other, checkpoint) for other in checkpoints)
        is_kept = (
            num_newer < policy["keep_last"]
            or step in policy["keep_steps"]
            or checkpoint == old_enough
            or (policy["keep_every_steps"] > 0 and step % policy["keep_every_steps"] == 0)
            or (checkpoint.score != NOT_EVALUATED and num_better < policy["keep_best"])
        )
        assert (checkpoint not in to_delete) == is_kept
    if checkpoints:
        newest = max(checkpoints, key=lambda c: (c.step, c.attempt))
        assert newest not in to_delete

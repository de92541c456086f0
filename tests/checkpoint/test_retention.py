"""Retention as a pure function: exactly the checkpoints that the policy names are kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from electra_dist.checkpoint.commit import NOT_EVALUATED, HeldOutScore, superfluous
from electra_dist.checkpoint.stored_copies import Checkpoint
from electra_dist.config import CheckpointConfig
from electra_dist.store.open_store import LocalStore

CHECKPOINTS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 3),
        st.none() | st.sampled_from([0.5, 0.6, 0.7]),
        st.none() | st.sampled_from([0.1, 0.2, 0.3]),
    ),
    unique_by=lambda c: c[:2],
)


def is_better(one: HeldOutScore, other: HeldOutScore, is_newer: bool) -> bool:
    """Whether `one` was evaluated and is better than `other`: by context AUC, then by loss, then by age."""
    if one.context_auc != other.context_auc:
        return (one.context_auc or 0) > (other.context_auc or 0)
    if one.context_auc is None and one.loss != other.loss:
        return (one.loss or math.inf) < (other.loss or math.inf)
    return one != NOT_EVALUATED and is_newer


def age(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return what sorts checkpoints, the oldest first."""
    return checkpoint.step, checkpoint.attempt


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
    store = LocalStore(Path("target"))
    scores = {
        Checkpoint(step, attempt, store): HeldOutScore(context_auc=auc, loss=loss)
        for step, attempt, auc, loss in saved
    }
    checkpoints = sorted(scores, key=age)
    to_delete = set(superfluous([*scores], CheckpointConfig(**policy), rollback_steps, scores))
    newest_step = max((c.step for c in checkpoints), default=0)
    old_enough = max((c for c in checkpoints if c.step + rollback_steps <= newest_step), default=None, key=age)
    for checkpoint in checkpoints:
        step = checkpoint.step
        num_newer = sum(age(other) > age(checkpoint) for other in checkpoints)
        num_better = sum(
            is_better(scores[other], scores[checkpoint], age(other) > age(checkpoint)) for other in checkpoints
        )
        is_kept = (
            num_newer < policy["keep_last"]
            or step in policy["keep_steps"]
            or checkpoint == old_enough
            or (policy["keep_every_steps"] > 0 and step % policy["keep_every_steps"] == 0)
            or (scores[checkpoint] != NOT_EVALUATED and num_better < policy["keep_best"])
        )
        assert (checkpoint not in to_delete) == is_kept
    if checkpoints:
        assert checkpoints[-1] not in to_delete

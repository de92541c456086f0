"""Retention as a pure function: exactly the checkpoints that the policy names are kept."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from electra_dist.checkpoint.checkpoint_manifest import folder_name
from electra_dist.checkpoint.retention import CheckpointInfo, superfluous
from electra_dist.config import CheckpointConfig

CHECKPOINTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.none() | st.sampled_from([0.1, 0.2, 0.3])),
    unique_by=lambda c: c[:2],
)


@given(
    saved=CHECKPOINTS,
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
    saved: list[tuple[int, int, float | None]], policy: dict[str, Any]
) -> None:
    checkpoints = [CheckpointInfo(step, attempt, folder_name(step, attempt), loss) for step, attempt, loss in saved]
    to_delete = set(superfluous(checkpoints, CheckpointConfig(**policy)))
    evaluated = [(c.eval_rtd_loss, -c.step, -c.attempt) for c in checkpoints if c.eval_rtd_loss is not None]
    for checkpoint in checkpoints:
        step, loss = checkpoint.step, checkpoint.eval_rtd_loss
        num_newer = sum((c.step, c.attempt) > (step, checkpoint.attempt) for c in checkpoints)
        num_better = sum(key < (loss or 0.0, -step, -checkpoint.attempt) for key in evaluated)
        is_kept = (
            num_newer < policy["keep_last"]
            or step in policy["keep_steps"]
            or (policy["keep_every_steps"] > 0 and step % policy["keep_every_steps"] == 0)
            or (loss is not None and num_better < policy["keep_best"])
        )
        assert (checkpoint not in to_delete) == is_kept
    if checkpoints:
        newest = max(checkpoints, key=lambda c: (c.step, c.attempt))
        assert newest not in to_delete

"""Retention as a pure function: exactly what the policy names is kept."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from electra_dist.checkpoint.manifest import folder_name
from electra_dist.checkpoint.retention import CheckpointInfo, superfluous
from electra_dist.config import CheckpointConfig

CHECKPOINTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.none() | st.sampled_from([0.1, 0.2, 0.3])),
    unique_by=lambda c: c[:2],
)


@given(
    found=CHECKPOINTS,
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
def test_retention_keeps_exactly_what_the_policy_names(
    found: list[tuple[int, int, float | None]], policy: dict[str, Any]
) -> None:
    checkpoints = [CheckpointInfo(step, attempt, folder_name(step, attempt), loss) for step, attempt, loss in found]
    gone = set(superfluous(checkpoints, CheckpointConfig(**policy)))
    for c in checkpoints:
        newer = sum((o.step, o.attempt) > (c.step, c.attempt) for o in checkpoints)
        rank = (c.eval_rtd_loss or 0.0, -c.step, -c.attempt)
        judged = [(o.eval_rtd_loss, -o.step, -o.attempt) for o in checkpoints if o.eval_rtd_loss is not None]
        better = sum(other < rank for other in judged)
        wanted = (
            newer < policy["keep_last"]
            or c.step in policy["keep_steps"]
            or (policy["keep_every_steps"] > 0 and c.step % policy["keep_every_steps"] == 0)
            or (c.eval_rtd_loss is not None and better < policy["keep_best"])
        )
        assert (c not in gone) == wanted
    if checkpoints:
        assert max(checkpoints, key=lambda c: (c.step, c.attempt)) not in gone

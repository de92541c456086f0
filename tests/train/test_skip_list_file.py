"""The list of skipped steps keeps streaks and rollbacks over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import UserError
from electra_dist.train.skip_list_file import SkipList


def test_skip_list_keeps_streaks_and_rollbacks_over_restarts(tmp_path: Path) -> None:
    skips = SkipList(tmp_path, [3])
    for step in (10, 12, 13):
        skips.stop(step)
        skips.write()
        skips = SkipList(tmp_path, [3])
    assert skips.streak == [12, 13]
    skips.roll_back(11)
    skips.write()
    again = SkipList(tmp_path, [3])
    assert (again.steps, again.streak, again.rollbacks) == ({3, 10, 11, 12, 13}, [], 1)
    assert again.below(12) == (3, 10, 11)
    (tmp_path / "skipped_steps.json").write_text('{"steps": 3')
    with pytest.raises(UserError, match="damaged"):
        SkipList(tmp_path, [])

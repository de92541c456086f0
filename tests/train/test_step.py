"""A step's row losses: the row that stands out is found. Whole steps: tests/data/test_elastic.py and real runs."""

from __future__ import annotations

import numpy as np

from electra_dist.train.step import outlier


def test_row_that_stands_out_is_found_and_an_ordinary_one_is_not() -> None:
    rng = np.random.default_rng(0)
    losses = (30.0 + rng.standard_normal(64)).tolist()
    assert outlier(losses) is None
    assert outlier([*losses, 60.0]) == 64
    assert outlier([*losses[:5], float("nan"), *losses]) == 5

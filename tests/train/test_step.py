"""The row whose loss is an outlier in a step is found."""

from __future__ import annotations

import numpy as np

from electra_dist.train.step import outlier


def test_outlier_is_the_row_with_an_extreme_or_nan_loss_and_none_among_ordinary_rows() -> None:
    rng = np.random.default_rng(0)
    losses = (30.0 + rng.standard_normal(64)).tolist()
    assert outlier(losses) is None
    assert outlier([*losses, 60.0]) == 64
    assert outlier([*losses[:5], float("nan"), *losses]) == 5

"""The order of rows and the number of steps. Training itself is tested in test_learning.py."""

from __future__ import annotations

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.training_loop import count_steps, row_sequence


def test_every_pass_sees_each_row_once_in_a_new_order_and_incomplete_batches_give_no_step() -> None:
    """As in the reference, the number of steps is rows x epochs / batch, rounded down, and at least 1."""
    num_rows = 7
    rows = row_sequence(num_rows, seed=1)
    passes = [[next(rows) for _ in range(num_rows)] for _ in range(3)]
    settings = FinetuneConfig(batch=32, epochs=3.0)

    for rows_of_pass in passes:
        assert sorted(rows_of_pass) == list(range(num_rows))
    assert passes[0] != passes[1]
    assert count_steps(100, settings) == 9
    assert count_steps(64, settings) == 6
    assert count_steps(3, settings) == 1

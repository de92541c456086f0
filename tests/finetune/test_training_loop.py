"""The order of rows and the number of steps. Training itself is tested in test_learning.py."""

from __future__ import annotations

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.training_loop import count_steps, row_sequence


def test_every_pass_sees_each_row_once_and_steps_are_counted_as_the_reference_does() -> None:
    rows = row_sequence(7, seed=1)
    passes = [[next(rows) for _ in range(7)] for _ in range(3)]
    assert [sorted(each) for each in passes] == [list(range(7))] * 3
    assert passes[0] != passes[1]
    settings = FinetuneConfig(batch=32, epochs=3.0)
    assert [count_steps(n, settings) for n in (100, 64, 3)] == [9, 6, 1]

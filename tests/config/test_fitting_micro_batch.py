"""Check that a micro-batch is made smaller if it does not divide the rows of a rank, and the global batch is kept.

The rows of a rank are those that the rank processes in one optimizer step: global batch / number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.config.load import load_config
from electra_dist.config.rules import check_world_size
from electra_dist.config.sections.training import TrainConfig
from electra_dist.errors import UserError

LARGE = Path(__file__).parents[2] / "configs" / "large_25pct_mask.yaml"


@pytest.mark.parametrize(("ranks", "size"), [(1, 64), (64, 32), (128, 16), (512, 4), (1024, 2), (2048, 1)])
def test_the_shipped_large_config_runs_on_up_to_2048_ranks(ranks: int, size: int) -> None:
    config = load_config(LARGE, ["data.corpus=corpus"])
    adapted, notes = config.for_ranks(ranks)
    check_world_size(adapted.train, ranks)
    assert adapted.train.micro_batch == size
    assert adapted.train.model_copy(update={"micro_batch": 64}) == config.train
    assert adapted.identity_sha256() == config.identity_sha256()
    assert len(notes) == (size != 64)
    assert all(f"{size} rows and not 64" in note and "global batch stays 2048" in note for note in notes)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 80))
def test_the_largest_divisor_is_taken(micro_batch: int, num_micro_batches: int, ranks: int) -> None:
    train = TrainConfig(num_steps=1, global_batch=micro_batch * num_micro_batches, micro_batch=micro_batch)
    size = train.fitting_micro_batch(ranks)
    fitting = [n for n in range(1, micro_batch + 1) if train.global_batch % (n * ranks) == 0]
    assert size == max(fitting, default=0)


def test_ranks_that_cannot_share_the_rows_are_refused_with_those_that_can() -> None:
    train = TrainConfig(num_steps=1, global_batch=12, micro_batch=12)
    with pytest.raises(UserError, match="12 is not a multiple of the 5 ranks; use 1, 2, 3, 4, 6, 12 ranks"):
        check_world_size(train, 5)

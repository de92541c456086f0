"""Settings of fine-tuning: the reference's for each task, overrides, and mistakes of one line."""

from __future__ import annotations

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import settings_for


def test_settings_are_those_of_the_reference_and_overrides_come_last() -> None:
    small = settings_for("rte", 256, 512)
    assert (small.lr, small.layer_decay, small.epochs, small.max_length, small.batch) == (1e-4, 0.8, 10.0, 128, 32)
    large = settings_for("squad2", 1024, 512, ["epochs=3"])
    assert (large.lr, large.layer_decay, large.epochs, large.max_length) == (5e-5, 0.9, 3.0, 512)
    assert settings_for("mnli", 768, 512, ["lr=3e-4"]).lr == 3e-4
    assert settings_for("cola", 128, 64).max_length == 64  # a model with fewer positions


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lrr=1", "unknown key `lrr`; did you mean `lr`"),
        ("lr=-1", "greater than 0"),
        ("lr", "expected key=value"),
        ("max_length=900", "more than the 512 positions of the model"),
    ],
)
def test_a_wrong_setting_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        settings_for("rte", 64, 512, [override])
    assert "\n" not in str(caught.value)

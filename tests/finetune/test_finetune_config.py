"""Settings of fine-tuning: the reference's for each task, overrides, and mistakes as one-line errors."""

from __future__ import annotations

import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import settings_for

SMALL, BASE, LARGE = 256, 768, 1024  # widths of the released models
POSITIONS = 512


def test_settings_are_those_of_the_reference_for_task_and_model_and_overrides_come_last() -> None:
    """The values are those of google-research/electra, configure_finetuning.py."""
    rte_small = settings_for("rte", SMALL, POSITIONS)
    assert rte_small.lr == 1e-4
    assert rte_small.layer_decay == 0.8
    assert rte_small.epochs == 10.0
    assert rte_small.max_length == 128
    assert rte_small.batch == 32

    squad_large = settings_for("squad2", LARGE, POSITIONS, ["epochs=3"])
    assert squad_large.lr == 5e-5
    assert squad_large.layer_decay == 0.9
    assert squad_large.epochs == 3.0
    assert squad_large.max_length == 512

    assert settings_for("mnli", BASE, POSITIONS, ["lr=3e-4"]).lr == 3e-4
    # A model with fewer positions than the task's max_length lowers it.
    assert settings_for("cola", 128, 64).max_length == 64


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        ("lrr=1", "unknown key `lrr`; did you mean `lr`"),
        ("lr=-1", "greater than 0"),
        ("lr", "expected key=value"),
        ("max_length=900", "more than the 512 positions of the model"),
    ],
)
def test_a_wrong_override_is_a_one_line_error(override: str, expected_message: str) -> None:
    with pytest.raises(UserError, match=expected_message) as caught:
        settings_for("rte", 64, POSITIONS, [override])

    assert "\n" not in str(caught.value)

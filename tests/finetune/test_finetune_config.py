"""Settings of fine-tuning: the reference's for each task, overrides, and mistakes as one-line errors."""

from __future__ import annotations

import pytest

from electra_dist.config import Config
from electra_dist.config.keys import NAMES_ELSEWHERE, fields
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig, check_overrides, settings_for

SMALL, BASE, LARGE = 256, 768, 1024  # widths of the released models
POSITIONS = 512


@pytest.mark.parametrize(("width", "lr", "layer_decay"), [(SMALL, 3e-4, 0.8), (BASE, 1e-4, 0.8), (LARGE, 5e-5, 0.9)])
@pytest.mark.parametrize(
    ("task", "epochs", "max_length"),
    [("rte", 10, 128), ("stsb", 10, 128), ("squad1", 2, 512), ("squad2", 2, 512), ("cola", 3, 128), ("mnli", 3, 128),
     ("ner", 3, 256)],
)  # fmt: skip
def test_the_defaults_are_those_of_the_papers_table_7(
    width: int, lr: float, layer_decay: float, task: str, epochs: float, max_length: int
) -> None:
    settings = settings_for(task, width, POSITIONS)

    assert (settings.lr, settings.layer_decay) == (lr, layer_decay)
    assert settings.epochs == epochs
    assert settings.batch == 32
    assert settings.warmup_fraction == 0.1
    assert settings.weight_decay == 0.0
    assert settings.hidden_dropout == settings.attention_dropout == settings.head_dropout == 0.1
    assert (settings.beta1, settings.beta2, settings.eps) == (0.9, 0.999, 1e-6)
    assert settings.max_length == max_length  # not in the paper; that of google-research/electra


def test_overrides_come_last_and_a_model_with_fewer_positions_lowers_the_length() -> None:
    assert settings_for("squad2", LARGE, POSITIONS, ["epochs=3"]).epochs == 3.0
    assert settings_for("mnli", BASE, POSITIONS, ["lr=3e-4"]).lr == 3e-4
    assert settings_for("cola", 128, 64).max_length == 64


def test_the_identity_has_all_settings_on_which_results_depend() -> None:
    assert set(FinetuneConfig().identity()) == set(FinetuneConfig.model_fields) - {"max_unk_rate", "pooling"}
    assert FinetuneConfig(pooling="mean").identity() == {**FinetuneConfig().identity(), "pooling": "mean"}
    assert set(FinetuneConfig().identity({"max_length"})) == {"max_length"}


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    known = {*fields(Config), *FinetuneConfig.model_fields}

    for name, keys in NAMES_ELSEWHERE.items():
        assert known.issuperset(keys), name


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        ("lrr=1", "unknown key `lrr`; did you mean `lr`"),
        ("learning_rate=1", "unknown key `learning_rate`; did you mean `lr`"),
        ("per_device_train_batch_size=1", "did you mean `batch`"),
        ("warmup_steps=1", "did you mean `warmup_fraction`"),
        ("lr=-1", "greater than 0"),
        ("lr", "expected key=value"),
        ("max_length=900", "more than the 512 positions of the model"),
    ],
)
def test_a_wrong_override_is_a_one_line_error(override: str, expected_message: str) -> None:
    with pytest.raises(UserError, match=expected_message) as caught:
        settings_for("rte", 64, POSITIONS, [override])

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        ("{yes: 3}", {"yes": 3.0}),  # the example of docs/finetune.md; YAML takes yes for true
        ("{0: 1, 1: 2.5}", {"0": 1.0, "1": 2.5}),
        ("{01: 3, 2.0: 2}", {"01": 3.0, "2.0": 2.0}),
        ('{true: 3, Null: 1, "a b": 2}', {"true": 3.0, "Null": 1.0, "a b": 2.0}),
        ("balanced", "balanced"),
    ],
)
def test_class_weights_name_labels_as_they_are_written(value: str, weights: object) -> None:
    assert check_overrides([f"class_weights={value}"]).class_weights == weights


@pytest.mark.parametrize("value", ["Balanced", "{a: 0}", "{a: .inf}", "{a: true}", "[1]", "{a: x}"])
def test_other_class_weights_are_refused_with_what_is_accepted(value: str) -> None:
    with pytest.raises(UserError, match=r"^--set class_weights=.*: give none, balanced or {label: weight}, with a"):
        check_overrides([f"class_weights={value}"])

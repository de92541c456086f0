"""Every number of a config at 0, -1, 2^31, 2^63, 1e308, NaN and infinity is refused in one line, or can be planned."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from electra_dist.config import Config, TrainConfig, divisors, load
from electra_dist.config.load import load_config, parse_override, read_layers
from electra_dist.config.rules import check_new_run
from electra_dist.config.schedule import Schedule
from electra_dist.config.sections.training import PhaseConfig
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig, settings_for
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import print_plan

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo_cpu_bert.yaml"
VALUES = ("0", "1", "-1", str(2**31), str(2**63), str(2**64), "1.0e+308", ".nan", ".inf", "-.inf", "9" * 60)


def number_keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield overrides without their value, such as `train.num_steps=#`, for all numbers in a section."""
    for name, field in kind.model_fields.items():
        yield from _keys_of_type(field.annotation, f"{prefix}{field.alias or name}")


def _keys_of_type(annotation: Any, key: str) -> Iterator[str]:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        yield from _keys_of_type(arguments[0], key)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _keys_of_type(argument, key)
    elif origin is tuple and arguments[0] is PhaseConfig:
        yield f"{key}=[{{corpus: x, from_step: #}}]"
    elif origin is tuple:
        yield from (inner.replace("=#", "=[#]") for inner in _keys_of_type(arguments[0], key))
    elif origin is dict:
        yield from (inner.replace("=#", "={a: #}") for inner in _keys_of_type(arguments[1], key))
    elif isinstance(annotation, type) and issubclass(annotation, Schedule):
        yield f"{key}={{from: #, to: 1, shape: linear}}"
        yield f"{key}={{from: 1, to: #, shape: linear}}"
        yield f"{key}={{from: 0.5, to: 0.4, shape: exponential, tau: #}}"
        yield f"{key}={{from: 0.5, to: 0.4, shape: step, over: #}}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from number_keys(annotation, f"{key}.")
    elif annotation in (int, float):
        yield f"{key}=#"


KEYS = sorted(set(number_keys(Config)))


@pytest.fixture
def quickly_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the files of the demo's config once, and parse the overrides alone for each case."""
    layers = read_layers(DEMO, [])
    monkeypatch.setattr(
        load,
        "read_layers",
        lambda path, overrides: [*layers, *(("--set", parse_override(text)) for text in overrides)],
    )


def loaded(*overrides: str) -> Config | None:
    """Return a config; None if it is refused, which must be one line that names the key."""
    try:
        config = load_config(DEMO, overrides)
        check_new_run(config)
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 3000
        return None
    return config


def test_all_numbers_are_found() -> None:
    assert len(KEYS) > 100
    for key in ("checkpoint.every_steps=#", "train.skip_steps=[#]", "model.generator.num_layers=#", "guard.window=#"):
        assert key in KEYS


@pytest.mark.usefixtures("quickly_loaded")
@pytest.mark.parametrize("key", KEYS)
def test_a_number_that_is_accepted_can_be_planned(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no corpora/demo is, which `make pretrain` writes and a plan would read
    for value in VALUES:
        config = loaded(key.replace("#", value))
        if config is not None:
            print_plan(make_plan(config), io.StringIO())


def test_not_a_number_infinity_and_numbers_without_a_limit_are_refused_everywhere(quickly_loaded: None) -> None:
    for key in KEYS:
        for value in (".nan", ".inf", "-.inf", "1.0e+308", "9" * 60):
            assert loaded(key.replace("#", value)) is None, (key, value)


@pytest.mark.parametrize("key", sorted(set(number_keys(FinetuneConfig))))
def test_numbers_of_fine_tuning_that_are_no_float32_are_refused_in_one_line(key: str) -> None:
    for value in (".nan", ".inf", "-.inf", "1.0e+308"):
        with pytest.raises(UserError) as caught:
            settings_for("rte", 256, 512, [key.replace("#", value)])
        assert "\n" not in str(caught.value)


def test_numbers_of_ranks_and_rows_are_found_without_counting_up_to_them() -> None:
    """A batch of 2^24 rows has 25 divisors; a prime one has two."""
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(49) == [1, 7, 49]
    prime = 16_777_213
    train = TrainConfig(num_steps=1, global_batch=prime, micro_batch=prime)
    assert train.possible_ranks() == [1, prime]
    assert train.fitting_micro_batch(1) == prime
    one_row = train.model_copy(update={"micro_batch": 1})
    assert one_row.fitting_micro_batch(prime) == 1
    assert one_row.fitting_micro_batch(2) == 0


@pytest.mark.usefixtures("quickly_loaded")
@pytest.mark.parametrize("key", ["optimizer.eps", "optimizer.lr", "model.layer_norm_eps"])
def test_a_number_that_is_0_in_float32_is_refused(key: str) -> None:
    """Such an epsilon prevents no division by 0: Adam's update of a weight without a gradient would be NaN."""
    for value in ("1.0e-300", "1.0e-45"):
        with pytest.raises(UserError, match=f"{key}.*must be at least 1e-30"):
            load_config(DEMO, [f"{key}={value}"])
    assert loaded(f"{key}=1.0e-30") is not None

"""Schedules: their values against NumPy, their form in the identity and in files, and the errors for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.config import Config
from electra_dist.config.load import dump_yaml, load_config, sources
from electra_dist.config.schedule import Schedule, describe, largest_value, mean_value, value_at
from electra_dist.errors import UserError
from electra_dist.model.counts import token_flops
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import plan_sections

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = CONFIGS / "compare_cpu_base.yaml"  # without schedules
ENDS = st.just(0.0) | st.floats(1e-30, 100.0)  # a config refuses smaller numbers, which may be 0 in float32
FAST_ELECTRA = "objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}"


def schedule(start: float, end: float, shape: str, **options: float) -> Schedule[float]:
    """Return a schedule as it is read from a file."""
    return Schedule[float].model_validate({"from": start, "to": end, "shape": shape, **options})


def exact_values(start: float, end: float, shape: str, extent: float, num_steps: int) -> np.ndarray:
    """Return the values of all steps by NumPy, from the definition; `extent` is tau or over."""
    u = np.arange(num_steps) / num_steps
    part = np.minimum(u / extent, 1.0)
    return {
        "exponential": end + (start - end) * np.exp(-u / extent),
        "linear": (1 - part) * start + part * end,
        "cosine": end + (start - end) * (1 + np.cos(np.pi * part)) / 2,
        "step": np.where(u < extent, start, end),
    }[shape]


@given(
    shape=st.sampled_from(["exponential", "linear", "cosine", "step"]),
    start=ENDS,
    end=ENDS,
    extent=st.floats(0.01, 1.0),
    num_steps=st.integers(1, 300),
)
def test_values_are_those_of_numpy_and_lie_between_both_ends(
    shape: str, start: float, end: float, extent: float, num_steps: int
) -> None:
    option = "tau" if shape == "exponential" else "over"
    made = schedule(start, end, shape, **{option: extent})
    values = np.array([value_at(made, step / num_steps) for step in range(num_steps)])
    np.testing.assert_allclose(values, exact_values(start, end, shape, extent, num_steps), rtol=1e-12, atol=1e-12)
    assert values[0] == pytest.approx(start, rel=1e-12)
    rounding = 1e-13 * max(start, end)
    assert min(start, end) - rounding <= values.min() <= values.max() <= largest_value(made) + rounding


@pytest.mark.parametrize(
    "made",
    [
        schedule(4, 1, "exponential", tau=0.15),
        schedule(0.3, 0.05, "linear", over=0.4),
        schedule(0, 50, "cosine", over=0.7),
        schedule(50, 0, "step", over=0.25),
    ],
    ids=lambda made: made.shape,
)
def test_the_mean_is_that_of_all_steps(made: Schedule[float]) -> None:
    values = [value_at(made, step / 10_000) for step in range(10_000)]
    assert mean_value(made) == pytest.approx(np.mean(values), abs=abs(made.start - made.end) / 10_000)


def test_a_schedule_with_equal_ends_is_that_number_exactly() -> None:
    for shape, option in [("exponential", "tau"), ("linear", "over"), ("cosine", "over"), ("step", "over")]:
        made = schedule(0.15, 0.15, shape, **{option: 0.3})
        assert {value_at(made, step / 97) for step in range(97)} == {0.15}


def test_plain_numbers_leave_the_identity_as_it_was_before_there_were_schedules() -> None:
    config = load_config(BASE, ["objective.temperature=2", "objective.mlm_weight=1", "objective.random_from=unigram"])
    identity = config.identity()["objective"]
    assert {type(identity[key]) for key in ("temperature", "mask_prob", "mlm_weight", "rtd_weight")} == {float}
    assert identity["temperature"] == 2.0
    assert "random_share" not in identity
    assert "random_from" not in identity


def test_the_form_in_the_identity_is_canonical() -> None:
    def identity(value: str) -> Any:
        return load_config(BASE, [f"objective.temperature={value}"]).identity()

    assert identity("{from: 4, to: 1, shape: linear}") == identity("{to: 1.0, over: 1, shape: linear, from: 4e0}")
    assert identity("{from: 4, to: 1, shape: linear}") != identity("{from: 4, to: 1, shape: linear, over: 0.5}")
    exponential = identity("{from: 4, to: 1, shape: exponential, tau: 0.15}")["objective"]["temperature"]
    assert exponential == {"from": 4.0, "to": 1.0, "shape": "exponential", "tau": 0.15}
    shared = load_config(BASE, ["objective.random_share={from: 1, to: 0, shape: linear}"]).identity()["objective"]
    assert shared["random_share"] == {"from": 1.0, "to": 0.0, "shape": "linear", "over": 1.0}
    assert shared["random_from"] == "uniform"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("temperature={from: 4, to: 1, shape: exp}", ["`objective.temperature.shape`", "'exponential'", "'exp'"]),
        ("temperature={from: 4, to: 1}", ["missing key `objective.temperature.shape`"]),
        ("temperature={from: 4, shape: linear}", ["missing key `objective.temperature.to`"]),
        ("temperature={from: 4, to: 1, shape: linear, tau: 0.1}", ["`objective.temperature`", "does not use `tau`"]),
        ("temperature={from: 4, to: 1, shape: exponential}", ["`objective.temperature`", "needs `tau`"]),
        ("temperature={from: 4, to: 1, shape: exponential, tau: 0.1, over: 0.2}", ["does not use `over`"]),
        ("temperature={from: 4, to: 1, shape: exponential, tua: 0.1}", ["did you mean `objective.temperature.tau`"]),
        ("temperature={from: 4, to: 0, shape: linear}", ["`objective.temperature.to`", "greater than 0"]),
        ("temperature={from: 4, to: 1, shape: linear, over: 0}", ["`objective.temperature.over`", "greater than 0"]),
        ("temperature={from: 4, to: 1, shape: linear, over: true}", ["`objective.temperature.over`", "a boolean"]),
        ("temperature={from: 1e35, to: 1, shape: linear}", ["`objective.temperature.from`", "1e+30"]),
        ("rtd_weight={from: 0, to: 50, shape: step, over: 1.5}", ["`objective.rtd_weight.over`", "equal to 1"]),
        ("mlm_weight={from: -1, to: 1, shape: cosine}", ["`objective.mlm_weight.from`", "equal to 0"]),
        ("mask_prob={from: 0.3, to: 15, shape: linear}", ["`objective.mask_prob.to`", "less than 1", "15"]),
        ("random_share={from: 1, to: two, shape: linear}", ["`objective.random_share.to`", "valid number", "two"]),
        ("random_from=bigram", ["objective.random_from", "'uniform' or 'unigram'"]),
        ("temperature=none", ["`objective.temperature`", "valid number", "none"]),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(BASE, [f"objective.{override}"])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("--set: ")
    for word in words:
        assert word in message
    assert "a schedule" not in message.split(":")[1]  # no name of a type in the path of the key


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["name=mlm", "random_share=0.5"], ["random_share", "objective `mlm`"]),
        (["name=electric", "random_share=0.5"], ["random_share", "objective `electric`"]),
        (["generator=uniform", "random_share=0.5"], ["random_share", "generator `uniform`"]),
        (["generator=unigram", "temperature={from: 4, to: 1, shape: linear}"], ["temperature", "generator `unigram`"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(BASE, [f"objective.{override}" for override in overrides])
    for word in words:
        assert word in str(caught.value)


def test_a_whole_schedule_replaces_another_one_and_a_part_changes_it(tmp_path: Path) -> None:
    config = load_config(BASE, [FAST_ELECTRA, "objective.temperature={from: 3, to: 1, shape: linear}"])
    assert describe(config.objective.temperature) == "3 to 1 (linear, over 1)"
    config = load_config(BASE, [FAST_ELECTRA, "objective.temperature.tau=0.3"])
    assert describe(config.objective.temperature) == "4 to 1 (exponential, tau 0.3)"
    config = load_config(BASE, [FAST_ELECTRA, "objective.temperature=2"])
    assert config.objective.temperature == 2.0


def test_a_schedule_is_written_and_read_back_and_its_source_is_known() -> None:
    config = load_config(BASE, [FAST_ELECTRA])
    assert Config.model_validate(yaml.safe_load(dump_yaml(config))) == config
    origin = sources(BASE, [FAST_ELECTRA])
    assert origin["objective.temperature.from"] == "--set"
    assert "objective.temperature" not in origin
    origin = sources(BASE, [FAST_ELECTRA, "objective.temperature=2"])
    assert origin["objective.temperature"] == "--set"
    assert "objective.temperature.from" not in origin


def test_the_plan_shows_schedules_and_needs_memory_for_the_largest_share_of_masked_tokens() -> None:
    config = load_config(BASE, [FAST_ELECTRA, "objective.mask_prob={from: 0.3, to: 0.15, shape: linear}"])
    tables = {section.title: section for section in plan_sections(make_plan(config))}
    mask_row, temperature_row = tables["Schedules"].rows
    assert temperature_row[:3] == ["objective.temperature", "exponential", "4"]
    assert temperature_row[-1] == f"{1 + 3 * np.exp(-1 / 0.15):.4g}"
    assert mask_row == ["objective.mask_prob", "linear", "0.3", "0.2925", "0.285", "0.2625", "0.225", "0.1875", "0.15"]
    assert any("30 to 15 % masked" in cell for row in tables["Data"].rows for cell in row)
    plain = load_config(BASE, ["objective.mask_prob=0.3"])
    titles = {section.title: section for section in plan_sections(make_plan(plain))}
    assert "Schedules" not in titles
    limits = [[section.rows for title, section in plan.items() if "micro-batch" in title] for plan in (tables, titles)]
    assert limits[0] == limits[1]
    assert limits[0]


def test_flops_count_the_mean_share_of_masked_tokens() -> None:
    scheduled = load_config(BASE, ["objective.mask_prob={from: 0.3, to: 0.1, shape: linear}"])
    constant = load_config(BASE, ["objective.mask_prob=0.2"])
    flops = [token_flops(config.model, config.data.seq_len, config.objective) for config in (scheduled, constant)]
    assert flops[0].total == pytest.approx(flops[1].total, rel=1e-12)

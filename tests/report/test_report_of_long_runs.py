"""Numbers of a long run, read as a stream, against a plain parse of the whole file; and the memory of a report."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_memory import run_command
from support.long_runs import write_long_run

from electra_dist.report.panels import PANELS, MetricColumns
from electra_dist.report.run_record import read_run

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with 100,000 training records and 200 evaluations."""
    return write_long_run(tmp_path_factory.mktemp("runs") / "long", 100_000)


@pytest.mark.sample
def test_curves_and_figures_of_a_long_run_are_those_of_all_its_records(run: Path):
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    train = [record for record in records if record["kind"] == "train"]

    read = read_run(run)

    for panel in PANELS:
        for line in panel.lines:
            if line.is_baseline:
                continue
            values = [record.get(line.field) for record in records if record["kind"] == line.kind]
            floats = [math.nan if value is None else NON_FINITE.get(value, value) for value in values]
            finite = [value for value in floats if math.isfinite(value)]
            if line.field == "token_loss":  # recorded as 0, because ELECTRA's discriminator predicts no tokens
                assert set(finite) == {0.0}
                finite = []
            assert read.curves.columns[line.kind].curve(line.field).values.tolist() == finite
    assert read.metrics.median("tokens_per_s") == statistics.median(record["tokens_per_s"] for record in train)
    assert read.metrics.mean("data_wait") == statistics.fmean(record["data_wait"] for record in train)
    assert read.metrics.first is not None and read.metrics.first.fields() == train[0]
    assert [record.fields() for record in read.metrics.recent] == [
        {**record, "grad_norm": _number(record)} for record in train[-20:]
    ]
    assert len(read.metrics.evals) == 200
    assert read.energy is not None
    assert read.energy.mean_power_w == pytest.approx(5321.5)  # of every record


def _number(record: dict[str, Any]) -> Any:
    """Return the gradient norm of a record, which NaN, unequal to itself, must not be for a comparison."""
    norm = record["grad_norm"]
    return pytest.approx(math.nan, nan_ok=True) if norm == "NaN" else norm


@pytest.mark.sample
def test_a_report_of_a_long_run_takes_less_than_200_mb_and_shows_its_spikes(run: Path):
    """One record in a thousand has a ten times higher loss; the drawn curve, with few points, reaches them."""
    _, memory_mb = run_command(["report", str(run)])

    page = (run / "report.html").read_text()
    assert memory_mb < 200
    assert len(page) < 1_500_000
    hover = page.split('<script type="application/json">')[1].split("</script>")[0]
    highest = max(map(float, re.findall(rb'"mlm_loss": ([0-9.]+)', (run / "metrics.jsonl").read_bytes())))
    assert json.loads(hover)["y"][3] > highest > 10


@given(
    values=st.lists(
        st.one_of(st.floats(), st.integers(-(2**80), 2**80), st.none(), st.text(max_size=3), st.booleans())
    )
)
def test_a_column_has_the_numbers_of_the_records_and_nan_for_everything_else(values: list[Any]):
    columns = MetricColumns(["value"])
    for step, value in enumerate(values):
        columns.append({"step": step, "value": value, "other": 1})

    expected = []
    for value in values:
        is_number = isinstance(value, (int, float))
        expected.append(float(value) if is_number else math.nan)
    np.testing.assert_array_equal(columns.column("value"), np.array(expected, dtype=np.float64))
    assert columns.column("step").tolist() == list(range(len(values)))
    assert np.isnan(columns.column("unknown")).all()
    columns.append({"step": 1, "value": 10**400})  # no float is that large
    assert math.isnan(columns.column("value")[-1])

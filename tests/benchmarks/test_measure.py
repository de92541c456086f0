"""What all benchmarks rest on: turns, ratios, records and the table of results."""

import json
import statistics
from pathlib import Path
from typing import Any

import measure
import pytest
import table


def test_ways_take_turns_and_the_first_round_is_not_kept() -> None:
    calls: list[str] = []

    def way(name: str, seconds: float) -> Any:
        return lambda: calls.append(name) or seconds

    found = measure.alternate({"a": way("a", 2.0), "b": way("b", 3.0)}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [2.0, 2.0], "b": [3.0, 3.0]}


def test_a_ratio_is_taken_within_each_round() -> None:
    over, under = [2.0, 9.0, 4.0], [1.0, 3.0, 4.0]
    assert measure.ratio(over, under) == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert measure.ratio(over, under)["median"] != statistics.median(over) / statistics.median(under)
    with pytest.raises(ValueError, match="argument"):
        measure.ratio([1.0], [1.0, 2.0])


def test_a_record_names_the_command_that_repeats_it(tmp_path: Path) -> None:
    given = ["--smoke", "--save", str(tmp_path)]
    arguments = measure.parser("doc").parse_args(given)
    record = measure.finish("step-packed", arguments, given, [measure.ResultLine("what", "1 s", "2 x")], found=3)
    assert record["command"] == "python benchmarks/step.py --smoke"
    assert record["found"] == 3
    assert measure.installed("numpy", "no-such-package")["no-such-package"] == "not installed"


def _record(name: str, date: str, value: str, *, smoke: bool = False) -> dict[str, Any]:
    facts = {"hardware": "a CPU", "versions": {"torch": "2"}, "command": f"python benchmarks/{name}.py"}
    return {"benchmark": name, "date": date, "smoke": smoke, "lines": [["what", value, ""]], **facts} | {
        "lines": [{"what": name, "value": value, "ratio": ""}]
    }


def test_the_table_has_the_newest_of_each_and_no_smoke(tmp_path: Path) -> None:
    records = [
        _record("step", "2026-01-02T00:00:00", "new"),
        _record("step", "2026-01-01T00:00:00", "old"),
        _record("step", "2026-01-03T00:00:00", "toy", smoke=True),
        _record("head", "2026-01-01T00:00:00", "small"),
        {"benchmark": "gpu", "date": "2026-01-01T00:00:00"},
    ]
    for number, record in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    page = tmp_path / "results.md"
    page.write_text(f"before\n{table.BEGIN}\nstale\n{table.END}\nafter\n")
    for _ in range(2):  # the second time changes nothing
        table.main(["--results", str(tmp_path), "--page", str(page)])
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert [word in text for word in ("new", "small", "old", "toy", "stale", "gpu")] == [True] * 2 + [False] * 4
        assert text.index("head") < text.index("step")


def test_the_page_of_results_has_the_markers() -> None:
    text = (measure.REPOSITORY / "docs" / "results.md").read_text()
    assert text.index(table.BEGIN) < text.index(table.END)

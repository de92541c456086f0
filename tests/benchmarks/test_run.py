"""What all benchmarks rest on: turns, ratios, records, the table of results, and the command that runs them."""

import json
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import measure
import pytest
import run
from measure import Found, ResultLine


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


def _benchmark(fault: str = "") -> ModuleType:
    def measure_it(arguments: Namespace) -> Found:
        line = ResultLine("what", f"{arguments.rounds} rounds", "2 x")
        return Found([line], {"found": arguments.size}, fault, packages=["no-such-package"])

    module = ModuleType("head", "Which?")
    module.ROUNDS = 7
    module.add_options = lambda parser: parser.add_argument("--size", type=int, default=3)
    module.measure = measure_it
    return module


def test_a_record_names_what_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "head", _benchmark())
    assert run.main(["head", "--size", "4", "--smoke", "--save", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("head-2*.json")
    record = json.loads(file.read_text())
    assert record["command"] == "python benchmarks/run.py head --size 4 --smoke"
    assert (record["found"], record["smoke"]) == (4, True)
    assert record["packages"] == {"no-such-package": "not installed"}
    assert record["lines"] == [{"what": "what", "value": "1 rounds", "ratio": "2 x"}]
    assert {"hardware", "versions", "commit", "date"} <= record.keys()


def test_nothing_is_written_without_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "head", _benchmark())
    assert run.main(["head", "--results", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_exceeded_limit_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "head", _benchmark("too large"))
    assert run.main(["head", "--smoke"]) == 1
    assert capsys.readouterr().err == "too large\n"


def test_several_benchmarks_run_in_processes_of_their_own_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(command: list[str]) -> Namespace:
        started.append(command[2:])
        return Namespace(returncode=int("head" in command))

    monkeypatch.setattr(run.subprocess, "run", start)
    assert run.main(["head", "step", "--smoke"]) == 1
    assert started == [["head", "--smoke"], ["step", "--smoke"]]
    assert run.main(["loader", "step"]) == 0


@pytest.mark.parametrize("words", [[], ["no-such-benchmark"], ["step", "no-such-benchmark"], ["step", "--ronds", "1"]])
def test_a_wrong_command_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(words)


def test_the_list_has_the_question_of_every_benchmark(capsys: pytest.CaptureFixture) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(run.BENCHMARKS)
    assert all(line.endswith("?") for line in lines)


def _record(name: str, date: str, value: str, *, smoke: bool = False) -> dict[str, Any]:
    facts = {"hardware": "a CPU", "versions": {"torch": "2"}, "command": f"python benchmarks/{name}.py"}
    lines = [{"what": name, "value": value, "ratio": ""}]
    return {"benchmark": name, "date": date, "smoke": smoke, "lines": lines, **facts}


def test_the_table_has_the_newest_of_each_and_no_smoke(tmp_path: Path) -> None:
    records = [
        _record("step", "2026-01-02T00:00:00", "new"),
        _record("step", "2026-01-01T00:00:00", "old"),
        _record("step", "2026-01-03T00:00:00", "toy", smoke=True),
        _record("head", "2026-01-01T00:00:00", "small"),
        _record("side_files", "2026-01-01T00:00:00", "deleted"),
        {"benchmark": "gpu", "date": "2026-01-01T00:00:00"},
    ]
    for number, record in enumerate(records):
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    page = tmp_path / "results.md"
    page.write_text(f"before\n{run.BEGIN}\nstale\n{run.END}\nafter\n")
    for _ in range(2):  # the second time changes nothing
        run.write_table(tmp_path, page)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert [word in text for word in ("new", "small")] == [True] * 2
        assert not any(word in text for word in ("old", "toy", "stale", "gpu", "deleted"))
        assert text.index("head") < text.index("step")


def test_only_the_first_row_of_a_record_repeats_its_command_and_date() -> None:
    record = _record("step", "2026-01-02T00:00:00", "first")
    record["lines"].append({"what": "more", "value": "second", "ratio": "2 x"})
    rows = run.table([record]).splitlines()[2:4]
    assert rows == [
        "| step | first | - | `python benchmarks/step.py` | 2026-01-02 |",
        "| more | second | 2 x | | |",
    ]


def test_the_page_of_results_has_the_table_of_the_newest_records(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(run.PAGE.read_text())
    run.write_table(page=page)
    assert page.read_text() == run.PAGE.read_text()

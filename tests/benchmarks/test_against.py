"""The comparison of two commits: pairs in turns, ratios within a pair, and what its record keeps."""

import json
from pathlib import Path

import against
import pytest


def test_the_trees_take_turns_and_the_first_pair_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, order = tmp_path / "tree", []
    seconds = {before: iter([90.0, 2.0, 4.0]), against.REPOSITORY: iter([10.0, 1.0, 8.0])}

    def measure_once(case: str, tree: Path, *rest: object) -> dict[str, float]:
        order.append(tree)
        return {case: next(seconds[tree])}

    monkeypatch.setattr(against, "measure_once", measure_once)
    found = against.compare("step", before, tmp_path, pairs=2, smoke=False)

    first, second, third = order[:2], order[2:4], order[4:]
    assert first == third == second[::-1]
    assert found["step"]["before"] == [2.0, 4.0]
    assert found["step"]["after"] == [1.0, 8.0]
    assert found["step"]["ratio"] == {"median": 1.25, "least": 0.5, "most": 2.0}


def test_a_later_call_of_the_day_adds_its_cases_to_the_record(tmp_path: Path) -> None:
    facts = {"benchmark": "against", "date": "2026-01-02T00:00:00", "before": "a", "commit": {"sha": "b"}}
    against.save({**facts, "cases": {"step": 1, "head": 1}}, tmp_path)
    against.save({**facts, "cases": {"head": 2}}, tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["cases"] == {"step": 1, "head": 2}
    against.save({**facts, "commit": {"sha": "c"}, "cases": {"loader": 3}}, tmp_path)
    assert json.loads(file.read_text())["cases"] == {"loader": 3}


def test_a_case_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        against.main(["HEAD", "no-such-case"])
    assert "there is no case no-such-case; the cases are loader, first_batch" in capsys.readouterr().err


@pytest.mark.drill  # a commit is checked out, and Python starts twice
def test_two_equal_trees_are_compared(tmp_path: Path) -> None:
    against.main(["HEAD", "loader", "--smoke", "--save", "--results", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["before"] == record["commit"]["sha"]
    assert record["cases"]["loader, CPU"]["ratio"]["median"] > 0

"""Interrupted anywhere, a comparison does nothing twice and ends in the same results. Pretraining is pretended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from electra_dist.compare import checkpoint_scores, comparison, pretraining_runs
from electra_dist.compare.checkpoint_scores import TaskMeasure
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_plan import Cell, make_plan
from electra_dist.compare.pretraining_runs import Pretrainings
from electra_dist.config_file import load_section
from electra_dist.finetune.tasks import TextSpec
from electra_dist.pretrained.load_encoder import Pretrained, load_pretrained

MakeComparison = Callable[..., Path]


class Pretence:
    """Runs that finish at once, with the initial weights of another seed for each step; what was done is listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.saved: dict[str, set[int]] = {}
        self.broken: dict[str, int] = {}  # run -> how many of its checkpoints it reaches before it fails
        self.interrupt_at = -1
        score = TaskMeasure.score

        def scored(measure: TaskMeasure, encoder: Pretrained, progress: Any) -> Any:
            self._event(f"{encoder.name} {measure.name}")
            return score(measure, encoder, progress)

        monkeypatch.setattr(pretraining_runs, "pretrain", self.pretrain)
        monkeypatch.setattr(comparison, "saved_steps", lambda cell: self.saved.get(cell.name, set()))
        monkeypatch.setattr(checkpoint_scores, "load_pretrained", self.load)
        monkeypatch.setattr(TaskMeasure, "score", scored)

    def _event(self, what: str) -> None:
        if len(self.done) == self.interrupt_at:
            self.interrupt_at = -1
            raise KeyboardInterrupt
        self.done.append(what)

    def pretrain(self, cell: Cell, ranks: int, pause: Any) -> str:
        if cell.marks[-1] in self.saved.get(cell.name, set()):
            return ""
        self._event(cell.name)
        reached = self.broken.pop(cell.name, len(cell.marks))
        self.saved[cell.name] = set(cell.marks[:reached])
        return "" if reached == len(cell.marks) else "the run ended with exit code 1: no space; read a log"

    def load(self, spec: str, vocab: Path, step: int | None) -> Pretrained:
        file = Path(spec.removeprefix("random:") if step is None else f"{spec}.yaml")
        text = file.read_text()
        if step is not None:
            file = vocab.parent / "moved.yaml"
            file.write_text(text.replace("seed: 1", f"seed: {100 + step}"))
        encoder = load_pretrained(f"random:{file}", vocab=vocab)
        return Pretrained(**{**vars(encoder), "name": f"{Path(spec).stem} at {step or 0}"})


def results(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    for each in tree["scores"]:
        del each["seconds"]
    return tree


def compare(file: Path) -> bool:
    return Comparison(load_section(file, CompareConfig), file, None).run(lambda *_: None, lambda _: None)


def test_cut_between_runs_and_between_scores(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    with monkeypatch.context() as patch:
        uncut = Pretence(patch)
        assert compare(file)
    expected, everything = results(tmp_path / "out"), list(uncut.done)
    assert len(everything) == 2 + 2 * (1 + 2 * 2)  # a baseline, then runs, checkpoints, tasks
    (tmp_path / "out").rename(tmp_path / "uncut")
    pretence = Pretence(monkeypatch)
    for moment in (1, 2, 4, 7, 9):
        pretence.interrupt_at = moment
        with pytest.raises(KeyboardInterrupt):
            compare(file)
    assert compare(file)
    assert pretence.done == everything  # in the same order, none twice
    assert results(tmp_path / "out") == expected
    assert compare(file) and pretence.done == everything
    assert {s["entry"] for s in expected["scores"]} == {"random", "rtd", "mlm"}
    assert (tmp_path / "out" / "compare.png").exists()


def test_a_run_that_fails_is_named_its_checkpoints_scored_and_it_is_tried_again(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, pretence = make_comparison(), Pretence(monkeypatch)
    pretence.broken["rtd-seed1"] = 1
    assert not compare(file)
    failed = [failure for failure in results(tmp_path / "out")["failures"] if "exit code" in failure["what"]]
    assert [(f["entry"], f["seed"]) for f in failed] == [("rtd", 1)]
    assert "* rtd seed 1: the run ended with exit code 1: no space" in (tmp_path / "out" / "compare.md").read_text()
    rows = [(row["entry"], row["step"]) for row in results(tmp_path / "out")["table"]]
    assert [entry for entry, _ in rows] == ["random", "rtd", "mlm", "mlm"]  # rtd's second checkpoint is missing
    assert compare(file)
    assert pretence.done.count("rtd-seed1") == 2
    assert [row["entry"] for row in results(tmp_path / "out")["table"]] == ["random", "rtd", "rtd", "mlm", "mlm"]


def test_a_score_of_other_settings_is_another_score(
    make_comparison: MakeComparison, words_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretence = Pretence(monkeypatch)
    task: dict[str, Any] = {"data": str(words_task), "text_a": "text", "label": "answer", "set": {"max_length": 16}}
    compare(make_comparison(tasks={"words": task}))
    before = len(pretence.done)
    compare(make_comparison(tasks={"words": {**task, "max_train": 50}}))
    scored = [what.split()[-1] for what in pretence.done[before:]]
    assert scored == ["words"] * 5  # everything is scored again, nothing is trained again


def test_one_task_in_two_ways_and_what_takes_long_only_at_the_ends(
    make_comparison: MakeComparison, words_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        checkpoint_scores.GLUE, "words", TextSpec(name="words", text_a=0, text_b=None, label=1, metric="accuracy")
    )
    pretence = Pretence(monkeypatch)
    task: dict[str, Any] = {"task": "words", "data": str(words_task), "set": {"max_length": 16}}
    tuned = {**task, "how": "finetune", "at": "ends", "set": {"max_length": 16, "epochs": 1}}
    assert compare(make_comparison(tasks={"words": {**task, "task": None}, "words-tuned": tuned}))
    tree = results(tmp_path / "out")
    at = {
        name: [(s["entry"], s["step"]) for s in tree["scores"] if s["task"] == name]
        for name in tree["config"]["tasks"]
    }
    assert at["words-tuned"] == [each for each in at["words"] if each not in [("rtd", 4), ("mlm", at["words"][3][1])]]
    assert len(at["words"]) == 5
    assert "average" not in tree["table"][0]["columns"]  # of one task that is scored everywhere
    assert pretence.done.count("rtd-seed1 at 8 words-tuned") == 1


@pytest.mark.parametrize("parallel", [1, 2])
def test_no_more_runs_at_a_time_than_told_and_an_interrupt_ends_them_all(
    make_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    file = make_comparison(seeds=[1, 2, 3])
    cells = make_plan(load_section(file, CompareConfig), file).cells
    at_work: set[str] = set()
    seen: list[set[str]] = []

    def endless(cell: Cell, ranks: int, pause: Callable[[], None]) -> str:
        at_work.add(cell.name)
        seen.append(set(at_work))
        try:
            for _ in range(3 if cell.seed < 3 else 10**9):
                pause()
        finally:
            at_work.remove(cell.name)
        return ""

    def looked(what: str, done: int, total: int) -> None:
        if len(at_work) == parallel and any("seed3" in name for name in at_work):
            raise KeyboardInterrupt

    monkeypatch.setattr(pretraining_runs, "pretrain", endless)
    monkeypatch.setattr(pretraining_runs, "_POLL_S", 0.01)
    with pytest.raises(KeyboardInterrupt), Pretrainings(cells, 1, parallel) as runs:  # noqa: PT012
        for cell in cells:
            runs.result(cell, looked)
    assert max(map(len, seen)) == parallel and not at_work

"""An interrupted comparison repeats no run and no score, and ends in the results of an uninterrupted one.

Pretraining is replaced (`FakePretraining`); scoring is real.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_records import EVAL

from electra_dist.compare import checkpoint_scores, comparison, comparison_runs
from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import PlannedRun, Pretrainings, make_plan
from electra_dist.compare.heldout_measures import ContextMeasure
from electra_dist.compare.learning_rates import RATES_FILE, SEARCH_FOLDER
from electra_dist.compare.measures import TaskMeasure
from electra_dist.config.load import load_section
from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import GLUE, TextSpec
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.run.records import encode

MakeComparison = Callable[..., Path]


class FakePretraining:
    """Pretraining runs that finish at once; the checkpoint of a step has the initial weights of another seed.

    Every run and every score is an event. `events` lists them in the order in which they began.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []  # "RUN" for a run, "CHECKPOINT TASK" for a score
        self.saved: dict[str, set[int]] = {}  # name of a run -> steps of its checkpoints
        self.failing: dict[str, int] = {}  # name of a run -> number of checkpoints that it saves before it fails
        self.interrupt_at = -1  # number of events after which the next one raises KeyboardInterrupt; -1: never
        real_score = TaskMeasure.score

        def score(measure: TaskMeasure, encoder: Pretrained, *others: Any) -> Any:
            self._record(f"{encoder.name} {measure.name}")
            return real_score(measure, encoder, *others)

        monkeypatch.setattr(comparison_runs, "pretrain", self.pretrain)
        monkeypatch.setattr(comparison, "saved_steps", lambda planned: self.saved.get(planned.name, set()))
        monkeypatch.setattr(checkpoint_scores, "load_pretrained", self.load)
        monkeypatch.setattr(TaskMeasure, "score", score)

    def _record(self, event: str) -> None:
        if len(self.events) == self.interrupt_at:
            self.interrupt_at = -1
            raise KeyboardInterrupt
        self.events.append(event)

    def pretrain(self, planned: PlannedRun, ranks: int, pause: Any) -> str:
        """Save the checkpoints of a run, and return "" or the reason why it failed."""
        if planned.marks[-1] in self.saved.get(planned.name, set()):
            return ""
        self._record(planned.name)
        num_saved = self.failing.pop(planned.name, len(planned.marks))
        self.saved[planned.name] = set(planned.marks[:num_saved])
        if num_saved == len(planned.marks):
            return ""
        return "the run ended with exit code 1: no space; read a log"

    def load(self, spec: str, step: int | None = None) -> Pretrained:
        """Return the initial weights (`step` is None), or those of seed 100 + `step` in place of a checkpoint."""
        if step is None:
            config_file = Path(spec.removeprefix("random:"))
        else:
            run_config = Path(f"{spec}.yaml").read_text()
            config_file = Path(spec).parent / "moved.yaml"
            config_file.write_text(run_config.replace("seed: 1", f"seed: {100 + step}"))
        encoder = load_pretrained(f"random:{config_file}")
        fields = {**vars(encoder), "name": f"{Path(spec).stem} at {step or 0}"}
        return Pretrained(**fields)


def results(folder: Path) -> dict[str, Any]:
    """Return compare.json of the output folder, without the durations, which differ between two comparisons."""
    tree: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    for score in tree["scores"]:
        del score["seconds"]
    return tree


def compare(file: Path, notes: list[str] | None = None) -> bool:
    """Make or continue the comparison of `file`, append its notes to `notes`, and return whether all succeeded."""

    def ignore_progress(activity: str, parts_done: int, num_parts: int) -> None:
        pass

    def note(text: str) -> None:
        if notes is not None:
            notes.append(text)

    return Comparison(load_section(file, CompareConfig), file, None).run(ignore_progress, note)


@pytest.mark.sample
def test_interrupts_between_runs_and_between_scores_change_neither_the_work_nor_the_results(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        uninterrupted = FakePretraining(patch)
        assert compare(file)
    expected_results = results(out)
    expected_events = list(uninterrupted.events)
    num_baseline_scores = 2  # two tasks
    num_events_of_a_run = 1 + 2 * 2  # the run, and a score for each of two checkpoints and two tasks
    assert len(expected_events) == num_baseline_scores + 2 * num_events_of_a_run
    out.rename(tmp_path / "uninterrupted")

    pretraining = FakePretraining(monkeypatch)
    for num_events in (1, 2, 4, 7, 9):
        pretraining.interrupt_at = num_events
        with pytest.raises(KeyboardInterrupt):
            compare(file)
    assert compare(file)

    assert pretraining.events == expected_events  # in the same order, none twice
    assert results(out) == expected_results
    assert compare(file)
    assert pretraining.events == expected_events  # a finished comparison has nothing left to do
    assert {score["entry"] for score in expected_results["scores"]} == {"random", "trigram", "rtd", "mlm"}
    assert (out / "compare.png").exists()
    assert "## Differences of the mean over the last 2 checkpoints" in (out / "compare.md").read_text()


@pytest.mark.sample
def test_interrupts_while_learning_rates_are_tried_repeat_no_short_run_and_choose_the_same(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every event is interrupted once: trigrams, each short run, the initial weights, the runs and their scores."""
    loss_of = {0.001: 5.0, 0.002: 4.0}  # a lower loss, a higher context AUC
    rates = list(loss_of)
    file = make_comparison(
        objectives=[{"name": "rtd", "lr": rates}, {"name": "mlm", "lr": rates}], evaluate_at=[1.0], steps=40
    )
    pretraining = FakePretraining(monkeypatch)
    real_trigrams = ContextMeasure.score_trigrams

    def pretrain(planned: PlannedRun, ranks: int, pause: Any) -> str:
        failure = pretraining.pretrain(planned, ranks, pause)
        if SEARCH_FOLDER in Path(planned.config.run_dir).parts:
            loss = loss_of[planned.config.optimizer.lr]
            record = EVAL.model_copy(update={"step": 4, "mlm_loss": loss, "context_auc": 1 / loss})
            Path(planned.config.run_dir).mkdir(parents=True, exist_ok=True)
            (Path(planned.config.run_dir) / "metrics.jsonl").write_bytes(encode(record))
        return failure

    def score_trigrams(*arguments: Any) -> Any:
        pretraining._record("trigrams")
        return real_trigrams(*arguments)

    monkeypatch.setattr(comparison_runs, "pretrain", pretrain)
    monkeypatch.setattr(ContextMeasure, "score_trigrams", score_trigrams)

    expected_events = ["trigrams"]
    expected_events += [f"{objective}-lr{rate:g}-seed1" for objective in ("rtd", "mlm") for rate in rates]
    expected_events += [f"rtd-seed1 at 0 {task}" for task in ("fewer", "words")]
    for run in make_plan(load_section(file, CompareConfig), file).runs:
        expected_events += [run.name, *(f"{run.name} at {run.marks[-1]} {task}" for task in ("fewer", "words"))]
    for num_events in range(len(expected_events)):
        pretraining.interrupt_at = num_events
        with pytest.raises(KeyboardInterrupt):
            compare(file)
    assert compare(file)

    assert pretraining.events == expected_events
    chosen = [(choice["entry"], choice["chosen"]) for choice in results(tmp_path / "out")["learning_rates"]]
    assert chosen == [("rtd", 0.002), ("mlm", 0.002)]
    assert len((tmp_path / "out" / RATES_FILE).read_text().splitlines()) == 2


def test_a_failed_run_is_reported_its_checkpoints_are_scored_and_the_next_start_repeats_it(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    out = tmp_path / "out"
    pretraining = FakePretraining(monkeypatch)
    pretraining.failing["rtd-seed1"] = 1  # of two checkpoints

    assert not compare(file)

    failed = [failure for failure in results(out)["failures"] if "exit code" in failure["what"]]
    assert [(failure["entry"], failure["seed"]) for failure in failed] == [("rtd", 1)]
    assert "* rtd seed 1: the run ended with exit code 1: no space" in (out / "compare.md").read_text()
    # A row per checkpoint: the second one of rtd is missing.
    assert [row["entry"] for row in results(out)["table"]] == ["random", "trigram", "rtd", "mlm", "mlm"]

    assert compare(file)

    assert pretraining.events.count("rtd-seed1") == 2
    assert [row["entry"] for row in results(out)["table"]] == ["random", "trigram", "rtd", "rtd", "mlm", "mlm"]


@pytest.mark.sample
def test_a_task_with_changed_settings_is_scored_again_without_training_again(
    make_comparison: MakeComparison, words_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretraining = FakePretraining(monkeypatch)
    task: dict[str, Any] = {"data": str(words_task), "text_a": "text", "label": "answer", "set": {"max_length": 16}}
    compare(make_comparison(tasks={"words": task}))
    num_events_before = len(pretraining.events)

    compare(make_comparison(tasks={"words": {**task, "max_train": 50}}))

    new_events = pretraining.events[num_events_before:]
    # The initial weights and two checkpoints of two objectives are scored; an event of a run would not end in "words".
    assert [event.split()[-1] for event in new_events] == ["words"] * 5


@pytest.mark.sample
def test_a_task_can_be_probed_everywhere_and_finetuned_at_the_first_and_last_weights_only(
    make_comparison: MakeComparison, words_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task has two entries; `words-tuned` has `at: ends`, so the checkpoints after half of the steps lack it."""
    words_spec = TextSpec(name="words", text_a="text", text_b=None, label="answer", metric="accuracy")
    monkeypatch.setitem(GLUE, "words", words_spec)
    pretraining = FakePretraining(monkeypatch)
    common: dict[str, Any] = {"data": str(words_task)}
    probed = {**common, "task": None, "set": {"max_length": 16}}
    tuned = {**common, "task": "words", "how": "finetune", "at": "ends", "set": {"max_length": 16, "epochs": 1}}

    assert compare(make_comparison(tasks={"words": probed, "words-tuned": tuned}))

    tree = results(tmp_path / "out")
    checkpoints_of = defaultdict[str, list[tuple[str, int]]](list)
    for score in tree["scores"]:
        checkpoints_of[score["task"]].append((score["entry"], score["step"]))
    probed_checkpoints = checkpoints_of["words"]
    assert len(probed_checkpoints) == 5  # the initial weights, two checkpoints of rtd, two of mlm
    first_of_mlm = probed_checkpoints[3]
    half_way = [("rtd", 4), ("mlm", first_of_mlm[1])]
    assert checkpoints_of["words-tuned"] == [point for point in probed_checkpoints if point not in half_way]
    for score in tree["scores"]:
        if score["task"] == "words-tuned":  # of 60 texts
            assert score["standard_error"] == pytest.approx((score["score"] * (1 - score["score"]) / 60) ** 0.5)
    assert "average" not in tree["table"][0]["columns"]  # only one task is scored at all checkpoints
    assert pretraining.events.count("rtd-seed1 at 8 words-tuned") == 1


@pytest.mark.parametrize("parallel", [1, 2])
def test_at_most_parallel_runs_train_at_a_time_and_an_interrupt_ends_all_of_them(
    make_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    """Runs of seeds 1 and 2 end after three pauses, those of seed 3 only with the interrupt."""
    file = make_comparison(seeds=[1, 2, 3])
    planned_runs = make_plan(load_section(file, CompareConfig), file).runs
    training: set[str] = set()  # names of the runs that train now
    training_at_starts: list[set[str]] = []  # the same at the start of each run, with the run itself

    def train(planned: PlannedRun, ranks: int, pause: Callable[[], None]) -> str:
        training.add(planned.name)
        training_at_starts.append(set(training))
        num_pauses = 3 if planned.seed < 3 else 10**9
        try:
            for _ in range(num_pauses):
                pause()
        finally:
            training.remove(planned.name)
        return ""

    def interrupt_in_seed_3(activity: str, parts_done: int, num_parts: int) -> None:
        is_in_seed_3 = any("seed3" in name for name in training)
        if is_in_seed_3 and len(training) == parallel:
            raise KeyboardInterrupt

    monkeypatch.setattr(comparison_runs, "pretrain", train)
    monkeypatch.setattr(comparison_runs, "_POLL_S", 0.01)

    with pytest.raises(KeyboardInterrupt), Pretrainings(planned_runs, 1, parallel) as runs:  # noqa: PT012
        for planned in planned_runs:
            runs.result(planned, interrupt_in_seed_3)

    assert max(len(names) for names in training_at_starts) == parallel
    assert not training


def test_when_a_later_run_ends_first_the_next_one_takes_its_place(
    make_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends when the third one has started, beside which the second one has ended."""
    file = make_comparison(seeds=[1, 2])
    planned_runs = make_plan(load_section(file, CompareConfig), file).runs
    started: list[str] = []

    def train(planned: PlannedRun, ranks: int, pause: Callable[[], None]) -> str:
        started.append(planned.name)
        for _ in range(200):
            if planned.name != planned_runs[0].name or planned_runs[2].name in started:
                return ""
            pause()
        return "no other run was started"

    monkeypatch.setattr(comparison_runs, "pretrain", train)
    monkeypatch.setattr(comparison_runs, "_POLL_S", 0.01)

    with Pretrainings(planned_runs, 1, 2) as runs:
        assert [runs.result(planned, lambda *report: None) for planned in planned_runs] == ["", "", "", ""]

    assert sorted(started) == sorted(planned.name for planned in planned_runs)  # each once


@pytest.mark.sample
def test_scored_runs_are_not_made_again_without_their_folders(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores suffice in place of a run; a run of which one score is missing is made again."""
    file = make_comparison()
    pretraining = FakePretraining(monkeypatch)
    assert compare(file)
    expected_results = results(tmp_path / "out")
    pretraining.saved.clear()
    pretraining.events.clear()

    assert compare(file)

    assert pretraining.events == []
    assert results(tmp_path / "out") == expected_results
    file_of_scores = tmp_path / "out/scores.jsonl"
    lines = file_of_scores.read_text().splitlines(keepends=True)
    [first_score, _] = [line for line in lines if '"entry": "mlm"' in line and '"task": "words"' in line]
    file_of_scores.write_text("".join(line for line in lines if line != first_score))
    assert compare(file)
    assert pretraining.events[0] == "mlm-seed1"
    assert not any(event.startswith("rtd-seed1") for event in pretraining.events)
    assert results(tmp_path / "out") == expected_results


def test_the_next_start_scores_what_an_interrupted_run_has_saved_before_the_run_goes_on(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is interrupted after it has saved the checkpoint after half of its steps."""
    file = make_comparison()
    half_way, last_step = make_plan(load_section(file, CompareConfig), file).runs[0].marks
    pretraining = FakePretraining(monkeypatch)
    table_before_run: list[tuple[str, int]] = []  # (objective, step) of the results when the run goes on

    def save_half_way(planned: PlannedRun, ranks: int, pause: Any) -> str:
        pretraining.saved[planned.name] = {half_way}
        raise KeyboardInterrupt

    def finish(planned: PlannedRun, ranks: int, pause: Any) -> str:
        if not table_before_run:
            table_before_run.extend((row["entry"], row["step"]) for row in results(tmp_path / "out")["table"])
        return pretraining.pretrain(planned, ranks, pause)

    monkeypatch.setattr(comparison_runs, "pretrain", save_half_way)
    with pytest.raises(KeyboardInterrupt):
        compare(file)
    monkeypatch.setattr(comparison_runs, "pretrain", finish)
    assert compare(file)

    assert table_before_run == [("random", 0), ("trigram", 0), ("rtd", half_way)]
    tasks = ["fewer", "words"]
    events_of_rtd = [event for event in pretraining.events if event.startswith("rtd") and " at 0 " not in event]
    assert events_of_rtd == [
        *(f"rtd-seed1 at {half_way} {task}" for task in tasks),
        "rtd-seed1",
        *(f"rtd-seed1 at {last_step} {task}" for task in tasks),
    ]


@pytest.mark.sample
def test_a_checkpoint_that_could_not_be_scored_before_its_run_goes_on_is_tried_again_afterwards(
    make_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    rtd, mlm = make_plan(load_section(file, CompareConfig), file).runs
    pretraining = FakePretraining(monkeypatch)
    pretraining.saved[rtd.name] = {rtd.marks[0]}
    loaded_steps: list[int] = []

    def fail_first(spec: str, step: int | None = None) -> Pretrained:
        if step is not None:
            loaded_steps.append(step)
            if len(loaded_steps) == 1:
                raise UserError("the store does not answer")
        return pretraining.load(spec, step)

    monkeypatch.setattr(checkpoint_scores, "load_pretrained", fail_first)

    assert compare(file)

    assert loaded_steps == [rtd.marks[0], *rtd.marks, *mlm.marks]


def test_a_checkpoint_that_a_finished_run_has_not_kept_is_a_failure(
    make_comparison: MakeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    rtd, mlm = make_plan(load_section(file, CompareConfig), file).runs
    pretraining = FakePretraining(monkeypatch)
    pretraining.saved[rtd.name] = {rtd.marks[-1]}
    notes: list[str] = []

    assert not compare(file, notes)

    (failure,) = results(tmp_path / "out")["failures"]
    assert (failure["entry"], failure["seed"]) == ("rtd", 1)
    assert failure["what"].startswith(f"after {rtd.marks[0]} steps: the checkpoint is missing; ")
    divergence, *of_runs = notes
    assert divergence.startswith("held-out rows: their tokens diverge from those of the training rows by 0.")
    assert of_runs == [
        f"[1/2] rtd-seed1: {rtd.marks[-1]} steps, 1 of 2 checkpoints scored",
        f"[2/2] mlm-seed1: {mlm.marks[-1]} steps, 2 of 2 checkpoints scored",
    ]


@pytest.mark.sample
def test_the_note_of_a_run_does_not_count_a_checkpoint_that_cannot_be_scored(
    make_comparison: MakeComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_comparison()
    rtd = make_plan(load_section(file, CompareConfig), file).runs[0]
    pretraining = FakePretraining(monkeypatch)
    notes: list[str] = []

    def fail_at_last_step_of_rtd(spec: str, step: int | None = None) -> Pretrained:
        if spec == rtd.config.run_dir and step == rtd.marks[-1]:
            raise UserError("the store does not answer")
        return pretraining.load(spec, step)

    monkeypatch.setattr(checkpoint_scores, "load_pretrained", fail_at_last_step_of_rtd)

    assert not compare(file, notes)

    assert notes[1] == f"[1/2] rtd-seed1: {rtd.marks[-1]} steps, 1 of 2 checkpoints scored"

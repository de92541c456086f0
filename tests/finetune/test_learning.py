"""Fine-tuning end to end with a tiny encoder: it learns, repeats, goes on where it was, and names failures."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from electra_dist.errors import UserError
from electra_dist.finetune import finetune_and_probe
from electra_dist.finetune.finetune_and_probe import RESULTS_FILE, finetune_task, probe_task, run_all
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.seed_results import summarize
from electra_dist.finetune.squad.squad_task import SquadTask
from electra_dist.finetune.tasks import TextSpec, TextTask
from electra_dist.finetune.training_loop import Diverged, fit
from electra_dist.pretrained.load_encoder import Pretrained

CPU = torch.device("cpu")
SPEC = TextSpec(name="animals", text_a="text", text_b=None, label="label")
FAST = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=6, batch=16, max_length=16, weight_decay=0.0)
SHORT = FAST.model_copy(update={"epochs": 0.5})


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> TextTask:
    """Separable: `yes` where the text names a dog, `no` where it names a bird."""
    folder = tmp_path_factory.mktemp("animals")
    rng = random.Random(0)
    for stem, size in (("train", 160), ("dev", 60)):
        lines = ["text\tlabel"]
        for _ in range(size):
            words = [rng.choice(["the", "old", "house", "near", "river", "saw"]) for _ in range(5)]
            is_dog = rng.random() < 0.5
            words[rng.randrange(5)] = "dog" if is_dog else "bird"
            lines.append(f"{' '.join(words)}\t{'yes' if is_dog else 'no'}")
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return TextTask(SPEC, folder)


def test_a_separable_task_is_learnt(encoder: Pretrained, animals: TextTask) -> None:
    result = finetune_task(encoder, animals, FAST, 0, CPU)
    assert result.score is not None and result.score > 0.95
    assert result.failure == ""
    assert (result.examples, result.steps) == (160, 60)


def test_a_probe_separates_what_a_random_encoder_keeps_and_does_not_touch_it(
    encoder: Pretrained, animals: TextTask
) -> None:
    before = encoder.digest
    first = probe_task(encoder, animals, FAST, CPU)
    assert first.score is not None and first.score > 0.8
    assert first.numbers() == probe_task(encoder, animals, FAST.model_copy(update={"lr": 1.0}), CPU).numbers()
    assert dataclasses.replace(encoder).digest == before  # a copy, so that it is worked out anew


def test_squad_learns_where_the_answer_is(encoder: Pretrained, tmp_path: Path) -> None:
    rng = random.Random(0)
    for stem, size in (("train-v1.1", 120), ("dev-v1.1", 30)):
        paragraphs = []
        for number in range(size):
            words = [rng.choice(["the", "old", "near", "saw", "good", "many"]) for _ in range(8)]
            words[rng.randrange(8)] = answer = rng.choice(["dog", "bird", "horse"])
            context = " ".join(words)
            entry = {"text": answer, "answer_start": context.index(answer)}
            qas = [{"id": f"{number}", "question": "who?", "answers": [entry]}]
            paragraphs.append({"context": context, "qas": qas})
        (tmp_path / f"{stem}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    settings = FAST.model_copy(update={"max_length": 32, "epochs": 10, "span_width": 32, "max_answer": 4})
    result = finetune_task(encoder, SquadTask(1, tmp_path), settings, 0, CPU)
    assert result.metrics["exact"] > 80
    with pytest.raises(UserError, match="squad1 has no linear probe"):
        probe_task(encoder, SquadTask(1, tmp_path), settings, CPU)


def test_an_interrupted_run_skips_finished_seeds_and_ends_in_the_same_numbers(
    encoder: Pretrained, animals: TextTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [(animals, SHORT)]
    whole = run_all(encoder, work, range(3), tmp_path / "whole", CPU, note=lambda text: None)

    def until_the_second(*args: object, **kwargs: object) -> float:
        if trained:
            raise KeyboardInterrupt
        trained.append(True)
        return fit(*args, **kwargs)  # type: ignore[arg-type]

    trained: list[bool] = []
    monkeypatch.setattr(finetune_and_probe, "fit", until_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_all(encoder, work, range(3), tmp_path / "cut", CPU, note=lambda text: None)
    monkeypatch.undo()
    assert len((tmp_path / "cut" / RESULTS_FILE).read_text().splitlines()) == 1
    with (tmp_path / "cut" / RESULTS_FILE).open("a") as file:
        file.write('{"task": "anim')  # a line that a kill has torn

    notes: list[str] = []
    resumed = run_all(encoder, work, range(3), tmp_path / "cut", CPU, note=notes.append)
    assert [r.numbers() for r in resumed] == [r.numbers() for r in whole]
    assert ["already there" in note for note in notes] == [True, False, False]
    assert len({r.train_loss for r in whole}) == 3  # seeds differ

    notes.clear()
    run_all(encoder, [(animals, SHORT.model_copy(update={"lr": 1e-3}))], [0], tmp_path / "cut", CPU, note=notes.append)
    assert "already there" not in notes[0]  # other settings are another result


def test_callers_of_torch_s_generator_are_not_disturbed(encoder: Pretrained, animals: TextTask) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    finetune_task(encoder, animals, SHORT, 0, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_that_diverges_and_one_that_learns_nothing_are_named(encoder: Pretrained, animals: TextTask) -> None:
    broken = dataclasses.replace(encoder, state={k: v * float("nan") for k, v in encoder.state.items()})
    diverged = finetune_task(broken, animals, SHORT, 0, CPU)
    assert diverged.score is None
    assert diverged.failure == "diverged: the loss is nan at step 0; lower lr or raise warmup_fraction"
    constant = finetune_task(encoder, animals, FAST.model_copy(update={"lr": 1e-12}), 4, CPU)
    assert constant.failure.startswith("degenerate: all 60 predictions are")
    good = finetune_task(encoder, animals, FAST, 5, CPU)
    summary = summarize([good, diverged, constant])
    assert list(summary.failed) == [0, 4]
    assert good.score is not None and constant.score is not None
    assert summary.median == pytest.approx((good.score + constant.score) / 2)


def test_a_loss_that_breaks_between_two_looks_is_named_with_its_step(encoder: Pretrained, animals: TextTask) -> None:
    model = animals.model(encoder, FAST, 0)
    steps: list[int] = []

    def poison(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        steps.append(len(steps))
        return output * (float("inf") if len(steps) == 21 else 1.0)

    model.register_forward_hook(poison)
    with pytest.raises(Diverged, match="the loss is inf at step 20"):
        fit(model, 2, animals.examples(encoder, FAST), FAST, seed=0)

"""Fine-tuning and probing of a tiny encoder, from the files of a task to the result of every seed."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from electra_dist.errors import UserError
from electra_dist.finetune import finetune_and_probe
from electra_dist.finetune.finetune_and_probe import finetune_task, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.run_seeds import RESULTS_FILE, run_all
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.stored_scores import summarize
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import Diverged, fit
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.tokenizer import new_tokenizer

CPU = torch.device("cpu")
SPEC = TextSpec(name="animals", text_a="text", text_b=None, label="label")
# Enough to learn the task from random weights: 60 steps for 160 texts.
FAST = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=6, batch=16, max_length=16, weight_decay=0.0)
SHORT = FAST.model_copy(update={"epochs": 0.5})


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> TextTask:
    """Separable task: `yes` if the text contains "dog", `no` if it contains "bird"; 160 and 60 texts."""
    folder = tmp_path_factory.mktemp("animals")
    rng = random.Random(0)
    for stem, num_texts in (("train", 160), ("dev", 60)):
        lines = ["text\tlabel"]
        for _ in range(num_texts):
            words = [rng.choice(["the", "old", "house", "near", "river", "saw"]) for _ in range(5)]
            is_dog = rng.random() < 0.5
            words[rng.randrange(5)] = "dog" if is_dog else "bird"
            label = "yes" if is_dog else "no"
            lines.append(f"{' '.join(words)}\t{label}")
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return TextTask(SPEC, folder)


def test_a_separable_task_is_learnt(encoder: Pretrained, animals: TextTask) -> None:
    result = finetune_task(encoder, animals, FAST, 0, CPU)

    assert result.score is not None
    assert result.score > 0.95
    assert result.failures == ()
    assert result.examples == 160
    assert result.steps == result.planned_steps == 60


def test_a_probe_of_a_random_encoder_separates_the_labels_and_does_not_change_the_encoder(
    encoder: Pretrained, animals: TextTask
) -> None:
    digest_before = encoder.digest
    other_lr = FAST.model_copy(update={"lr": 1.0})

    result = probe_task(encoder, animals, FAST, CPU)
    result_with_other_lr = probe_task(encoder, animals, other_lr, CPU)

    assert result.score is not None
    assert result.score > 0.8
    assert result.numbers() == result_with_other_lr.numbers()  # nothing is trained by gradient steps
    copy = dataclasses.replace(encoder)  # the digest is stored in the object, so only a copy computes it anew
    assert copy.digest == digest_before
    cased = dataclasses.replace(encoder, tokenizer=new_tokenizer(encoder.vocabulary, lowercase=False))
    assert cased.digest != digest_before  # the same weights read other tokens


def write_squad_files(folder: Path) -> None:
    """Write SQuAD 1.1 files with the question "who?"; the answer is the only animal in the passage of 8 words."""
    rng = random.Random(0)
    for stem, num_passages in (("train-v1.1", 120), ("dev-v1.1", 30)):
        paragraphs = []
        for number in range(num_passages):
            words = [rng.choice(["the", "old", "near", "saw", "good", "many"]) for _ in range(8)]
            position = rng.randrange(8)
            animal = rng.choice(["dog", "bird", "horse"])
            words[position] = animal
            context = " ".join(words)
            answer = {"text": animal, "answer_start": context.index(animal)}
            question = {"id": f"{number}", "question": "who?", "answers": [answer]}
            paragraphs.append({"context": context, "qas": [question]})
        (folder / f"{stem}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def test_squad_is_learnt_and_cannot_be_probed(encoder: Pretrained, tmp_path: Path) -> None:
    write_squad_files(tmp_path)
    settings = FAST.model_copy(update={"max_length": 32, "epochs": 10, "span_width": 32, "max_answer": 4})

    result = finetune_task(encoder, SquadTask(1, tmp_path), settings, 0, CPU)

    assert result.metrics["exact"] > 80  # per cent
    with pytest.raises(UserError, match="squad1 has no linear probe"):
        probe_task(encoder, SquadTask(1, tmp_path), settings, CPU)


def ignore_note(text: str) -> None:
    pass


def test_an_interrupted_run_skips_finished_seeds_and_ends_in_the_numbers_of_an_uninterrupted_one(
    encoder: Pretrained, animals: TextTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [(animals, SHORT)]
    uninterrupted = run_all(encoder, work, range(3), tmp_path / "uninterrupted", CPU, note=ignore_note)

    # Interrupt a second run in its second seed.
    interrupted_dir = tmp_path / "interrupted"
    results_file = interrupted_dir / RESULTS_FILE
    num_trained = 0

    def fit_first_seed_only(*args: object, **kwargs: object) -> float:
        nonlocal num_trained
        if num_trained == 1:
            raise KeyboardInterrupt
        num_trained += 1
        return fit(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(finetune_and_probe, "fit", fit_first_seed_only)
    with pytest.raises(KeyboardInterrupt):
        run_all(encoder, work, range(3), interrupted_dir, CPU, note=ignore_note)
    monkeypatch.undo()
    assert len(results_file.read_text().splitlines()) == 1
    with results_file.open("a") as file:
        file.write('{"task": "anim')  # an incomplete line, as kill -9 leaves it

    notes: list[str] = []
    resumed = run_all(encoder, work, range(3), interrupted_dir, CPU, note=notes.append)

    assert [result.numbers() for result in resumed] == [result.numbers() for result in uninterrupted]
    assert ["already there" in note for note in notes] == [True, False, False, False]
    assert len({result.train_loss for result in uninterrupted}) == 3  # seeds give different results

    # A result of other settings does not count as finished.
    notes.clear()
    other_settings = SHORT.model_copy(update={"lr": 1e-3})
    run_all(encoder, [(animals, other_settings)], [0], interrupted_dir, CPU, note=notes.append)
    assert "already there" not in notes[0]


def test_finetuning_does_not_change_the_state_of_torchs_global_random_generator(
    encoder: Pretrained, animals: TextTask
) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)

    torch.manual_seed(11)
    finetune_task(encoder, animals, SHORT, 0, CPU)

    assert torch.equal(torch.rand(3), expected)


def test_diverged_and_degenerate_seeds_are_reported_and_only_diverged_ones_have_no_score(
    encoder: Pretrained, animals: TextTask
) -> None:
    nan_weights = {name: value * float("nan") for name, value in encoder.state.items()}
    nan_encoder = dataclasses.replace(encoder, state=nan_weights)
    almost_no_lr = FAST.model_copy(update={"lr": 1e-12})

    diverged = finetune_task(nan_encoder, animals, SHORT, 0, CPU)
    degenerate = finetune_task(encoder, animals, almost_no_lr, 3, CPU)
    good = finetune_task(encoder, animals, FAST, 5, CPU)
    summary = summarize([good, diverged, degenerate])

    assert diverged.score is None
    assert (diverged.steps, diverged.planned_steps) == (0, 5)
    assert diverged.failures == ("diverged: the loss is nan at step 0; lower lr or raise warmup_fraction",)
    assert degenerate.failures[0].startswith("degenerate: all 60 predictions are")
    assert list(summary.failed) == [0, 3]  # seeds
    assert good.score is not None
    assert degenerate.score is not None
    assert summary.median == pytest.approx((good.score + degenerate.score) / 2)


def test_a_loss_that_becomes_infinite_is_reported_with_its_step_although_it_is_not_checked_at_every_step(
    encoder: Pretrained, animals: TextTask
) -> None:
    model = animals.model(encoder, FAST, 0)
    num_forwards = 0

    def make_step_20_infinite(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        is_step_20 = num_forwards == 21  # steps are counted from 0
        return output * (float("inf") if is_step_20 else 1.0)

    model.register_forward_hook(make_step_20_infinite)

    with pytest.raises(Diverged, match="the loss is inf at step 20"):
        fit(model, 2, animals.examples(encoder, FAST), FAST, seed=0)

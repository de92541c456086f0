"""Seeds of a command: what is saved, what a second command uses again, what it refuses, and several processes."""

from __future__ import annotations

import dataclasses
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import electra_dist.finetune.run_seeds as seeds_module
from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.run_seeds import ModelRequest, SeedJob, advice_on_threads, compute_in_processes, run_all
from electra_dist.finetune.seed_folder import copy_best
from electra_dist.finetune.stored_scores import Measured
from electra_dist.finetune.task import Task
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
SHORT = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=2, batch=8, max_length=16)


def ignore(*_: object) -> None:
    pass


@pytest.fixture
def request_of_task(tmp_path: Path) -> TaskRequest:
    """A task on texts with two labels that short training separates differently well with each seed."""
    rng = random.Random(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for stem, num_texts in (("train", 40), ("dev", 30)):
        texts = [
            " ".join(rng.choice(["the", "old", "dog", "bird", "saw"]) for _ in range(5)) for _ in range(num_texts)
        ]
        lines = [f"{text}\t{'yes' if 'dog' in text else 'no'}" for text in texts]
        (folder / f"{stem}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    return TaskRequest(name="custom", data=folder, text_a="text", label="label")


@pytest.fixture
def task(request_of_task: TaskRequest) -> Task:
    return open_task(request_of_task)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder, by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def run(encoder: Pretrained, task: Task, out: Path, seeds: int = 2, settings: FinetuneConfig = SHORT) -> list[str]:
    """Run a command with models in its output folder, and return its notes."""
    notes: list[str] = []
    run_all(encoder, [(task, settings)], range(seeds), out, CPU, note=notes.append, save_to={task.name: out})
    return notes


def test_texts_of_unknown_tokens_are_named_and_then_refused(encoder: Pretrained, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    def task_with(num_unknown: int) -> Task:
        """Return a task on texts of ten words, of which some are not in the vocabulary."""
        text = " ".join(["the"] * (10 - num_unknown) + ["\u4e2d"] * num_unknown)
        for stem in ("train", "dev"):
            lines = [f"{text}\t{label}" for label in ("yes", "no") * 4]
            (tmp_path / "data" / f"{stem}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n", "utf-8")
        return open_task(TaskRequest(name="custom", data=tmp_path / "data", text_a="text", label="label"))

    assert not any("[UNK]" in line for line in run(encoder, task_with(0), tmp_path / "a", seeds=1))
    named = run(encoder, task_with(1), tmp_path / "b", seeds=1)
    assert "custom: 10.0 % of the tokens of the training examples are [UNK]" in named[0]
    refused = task_with(6)
    with pytest.raises(UserError, match=r"60\.0 % of the tokens of the training examples are .* set max_unk_rate=1"):
        run(encoder, refused, tmp_path / "c", seeds=1)
    allowed = SHORT.model_copy(update={"max_unk_rate": 1.0})
    assert "60.0 %" in run(encoder, refused, tmp_path / "c", seeds=1, settings=allowed)[0]
    assert allowed.identity() == SHORT.identity()  # the key changes no result


def test_every_seed_and_the_best_one_are_saved_and_a_second_command_adds_seeds(
    encoder: Pretrained, task: Task, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    notes = run(encoder, task, out)
    before = contents(out / "seed-1")

    more_notes = run(encoder, task, out, seeds=3)

    assert notes[-1] == f"{out}/best: the model of the best seed, for transformers"
    assert ["already there" in note for note in more_notes] == [True, True, False, False, False]
    assert more_notes[2].startswith("custom: steps of ")
    assert contents(out / "seed-1") == before
    results = run_all(encoder, [(task, SHORT)], range(3), out, CPU, note=ignore, save_to={task.name: out})
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "best", "seed-0", "seed-1", "seed-2"}
    scores = [result.score or 0.0 for result in results]
    assert len(set(scores)) > 1
    best_seed = scores.index(max(scores))
    assert contents(out / "best") == contents(out / f"seed-{best_seed}")


def test_an_output_folder_with_other_models_is_refused_before_anything_is_computed(
    encoder: Pretrained, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(encoder, task, out, seeds=1)
    before = contents(out)
    monkeypatch.setattr(seeds_module, "finetune_task", None)  # nothing may be trained

    with pytest.raises(
        UserError, match=r"lr: .* there, 0.001 here\); repeat the command with --set lr=.*, pass another --output"
    ) as error:
        run(encoder, task, out, settings=SHORT.model_copy(update={"lr": 1e-3}))
    assert "\n" not in str(error.value)
    other_weights = {name: weight + 1.0 for name, weight in encoder.state.items()}
    with pytest.raises(UserError, match=r"\(the data, or the weights of the encoder\); pass another"):
        run(dataclasses.replace(encoder, state=other_weights), task, out)
    assert contents(out) == before
    (tmp_path / "mine" / "seed-0").mkdir(parents=True)
    (tmp_path / "mine" / "seed-0" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"seed-0: exists, but is no folder of a fine-tuned model"):
        run(encoder, task, tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is not a folder; choose another path"):
        run(encoder, task, tmp_path / "file" / "out")
    (tmp_path / "results.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"results.jsonl:1: not a score of this version"):
        run(encoder, task, tmp_path)


def test_a_result_without_its_model_is_computed_again_with_the_same_bytes(
    encoder: Pretrained, task: Task, tmp_path: Path
) -> None:
    """Such as a command with --no-save before, or one that was killed while it wrote the model."""
    out = tmp_path / "out"
    run(encoder, task, out)
    before = contents(out)
    shutil.rmtree(out / "seed-1")
    (out / ".seed-1.tmp").mkdir()
    (out / ".seed-1.tmp" / "model.safetensors").write_bytes(b"half")

    notes = run(encoder, task, out)

    assert ["already there" in note for note in notes] == [True, False, False, False]
    after = contents(out)
    results = "results.jsonl"  # has one more line, with another time
    assert {name: after[name] for name in after if name != results} == {
        name: before[name] for name in before if name != results
    }


def test_files_that_a_user_has_put_into_the_folders_of_models_stay(
    encoder: Pretrained, task: Task, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(encoder, task, out)
    before = contents(out)
    names = ["best/notes.txt", "best/mine/thesis.txt", "seed-1/notes.txt"]
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    (out / "results.jsonl").unlink()  # so that the models are made again
    # A command that was killed while it replaced a folder.
    (out / "best").rename(out / ".best.previous")

    run(encoder, task, out)
    run(encoder, task, out)

    after = contents(out)
    assert [after[name] for name in names] == [name.encode() for name in names]
    others = set(after) - set(names) - {"best/notes.txt", "results.jsonl"}
    assert {name: after[name] for name in others} == {name: before[name] for name in before if name in others}


def test_nothing_is_saved_without_a_folder_and_no_model_with_a_head_of_the_paper(
    encoder: Pretrained, task: Task, tmp_path: Path
) -> None:
    run_all(encoder, [(task, SHORT)], [0], tmp_path / "out", CPU, note=ignore)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.jsonl"}

    notes = run(encoder, task, tmp_path / "paper", 1, SHORT.model_copy(update={"head": "paper"}))
    assert "predictions only" in notes[-1]
    names = {path.name for path in (tmp_path / "paper" / "best").iterdir()}
    assert names == {"finetune.json", "dev_predictions.tsv"}


def test_a_diverged_seed_has_no_model_and_is_not_the_best(encoder: Pretrained, task: Task, tmp_path: Path) -> None:
    nan_weights = {name: value * float("nan") for name, value in encoder.state.items()}
    notes = run(dataclasses.replace(encoder, state=nan_weights), task, tmp_path / "out", seeds=1)

    assert notes[-1].endswith("no model, because every seed diverged")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.jsonl"}


def test_of_equally_good_seeds_the_lowest_is_the_best(tmp_path: Path) -> None:
    results = []
    for seed, score in enumerate([None, 0.5, 0.7, 0.7]):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "model.safetensors").write_text(f"{seed}")
        results.append(
            Measured(
                task="t", seed=seed, mode="finetune", identity="i", metric="f1", score=score, metrics={}, failures=(),
                train_loss=None, steps=1, examples=1, seconds=1.0,
            )
        )  # fmt: skip

    best = copy_best(tmp_path, results)

    assert best == tmp_path / "best"
    assert (best / "model.safetensors").read_text() == "2"
    assert (best / "model.safetensors").samefile(tmp_path / "seed-2" / "model.safetensors")  # no second copy


def test_more_threads_than_cores_are_reported_with_the_number_that_fits() -> None:
    assert "OMP_NUM_THREADS=16 " in advice_on_threads(num_processes=4, num_threads=64, num_cores=64)
    assert "OMP_NUM_THREADS=1 " in advice_on_threads(num_processes=8, num_threads=2, num_cores=4)
    assert advice_on_threads(num_processes=4, num_threads=16, num_cores=64) == ""
    assert advice_on_threads(num_processes=1, num_threads=128, num_cores=64) == ""


def test_seeds_in_two_processes_give_the_bytes_of_seeds_one_after_another(
    model: ModelConfig, vocabulary: Vocabulary, encoder: Pretrained, request_of_task: TaskRequest, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()
    export_tower(state, model, "discriminator", Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path / "hf")
    loaded = load_pretrained(str(tmp_path / "hf"))
    task = open_task(request_of_task)
    serial = run_all(
        loaded, [(task, SHORT)], range(3), tmp_path / "a", CPU, note=ignore, save_to={"custom": tmp_path / "a"}
    )
    request = ModelRequest(spec=str(tmp_path / "hf"), tower="discriminator", vocab=None)
    reports: list[tuple[str, int, int]] = []
    tasks = {"custom": (request_of_task, SHORT)}
    processes = partial(compute_in_processes, 2, request, tasks, lambda *report: reports.append(report))

    parallel = run_all(
        loaded,
        [(task, SHORT)],
        range(3),
        tmp_path / "b",
        CPU,
        note=ignore,
        save_to={"custom": tmp_path / "b"},
        compute_jobs=processes,
    )

    assert [result.numbers() for result in parallel] == [result.numbers() for result in serial]
    for name in ("seed-0", "seed-1", "seed-2", "best"):
        assert contents(tmp_path / "a" / name) == contents(tmp_path / "b" / name)
    assert list(dict.fromkeys(reports)) == [("seeds", done, 3) for done in range(4)]  # each at least once, in order

    # What a process does if the model or the data are no longer those that its parent has read.
    other_job = SeedJob(task="custom", seed=3, identity="of other data", folder=None)
    with pytest.raises(UserError, match="has changed since the command began"):
        seeds_module._compute(request, request_of_task, SHORT, other_job)

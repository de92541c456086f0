"""Models that fine-tuning saves, as transformers loads them: logits, labels, pipelines and predictions."""

from __future__ import annotations

import csv
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_encoder import head_parameters
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.models import TaskModel
from electra_dist.finetune.seed_folder import copy_best, write_seed_folder
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.stored_scores import Measured
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.task import Task
from electra_dist.finetune.text_task import TextTask
from electra_dist.pretrained.encoder import Pretrained, load_pretrained

CPU = torch.device("cpu")
FAST = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=4, batch=16, max_length=24)
RESULT = Measured(
    task="t", seed=0, mode="finetune", identity="i", metric="f1", score=0.5, metrics={}, failures=(),
    train_loss=0.1, steps=1, examples=1, seconds=1.0,
)  # fmt: skip
SENTENCES = ["the dog saw a bird", "many old trees", "the king knew the girl near a house"]
PAIRS = [("who saw it", "the dog saw the bird"), ("the boy", "near the old house")]


def with_trained_head(model: TaskModel) -> TaskModel:
    """Give all weights of a head, biases too, values as after a training."""
    generator = torch.Generator().manual_seed(5)
    for parameter in head_parameters(model):
        parameter.data.normal_(0.0, 0.7, generator=generator)
    return model.eval()


def save(folder: Path, task: Task, model: TaskModel, encoder: Pretrained, settings: FinetuneConfig) -> None:
    write_seed_folder(folder, encoder, model, settings, RESULT, ())


def text_task(folder: Path, labels: list[str], kind: str = "classification") -> TextTask:
    folder.mkdir(exist_ok=True)
    for stem in ("train", "dev"):
        lines = [f"the dog {number}\t{label}" for number, label in enumerate(labels * 8)]
        (folder / f"{stem}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    spec = TextSpec(name="custom", text_a="text", text_b=None, label="label", kind=kind)  # type: ignore[arg-type]
    return TextTask(spec, folder)


def our_ids(encoder: Pretrained, first: str, second: str | None = None) -> torch.Tensor:
    """Return the ids of one row, [1, S], put together by hand."""
    ids = [encoder.special.cls, *encoder.tokenizer.encode([first])[0], encoder.special.sep]
    if second is not None:
        ids += [*encoder.tokenizer.encode([second])[0], encoder.special.sep]
    return torch.tensor([ids])


@pytest.mark.parametrize("labels", [["no", "yes"], ["contradiction", "entailment", "neutral"]], ids=["2", "3"])
@torch.no_grad()
def test_hugging_faces_classifier_gives_the_logits_of_the_trained_one(
    encoder: Pretrained, tmp_path: Path, labels: list[str]
) -> None:
    task = text_task(tmp_path / "data", labels)
    model = with_trained_head(task.model(encoder, FAST, seed=0))

    save(tmp_path / "m", task, model, encoder, FAST)

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert theirs.config.id2label == dict(enumerate(labels))
    for first, second in PAIRS:
        expected = model.predict(our_ids(encoder, first, second))
        actual = theirs(**tokenizer(first, second, return_tensors="pt")).logits
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    # In a padded batch, too.
    batch = theirs(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits
    expected = torch.cat([model.predict(our_ids(encoder, sentence)) for sentence in SENTENCES])
    torch.testing.assert_close(batch, expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_a_saved_regression_predicts_in_the_units_of_the_labels(encoder: Pretrained, tmp_path: Path) -> None:
    """The model is trained on labels scaled to [0, 1]; those of the file lie between -2 and 6."""
    task = text_task(tmp_path / "data", ["-2", "1.5", "6"], kind="regression")
    model = with_trained_head(task.model(encoder, FAST, seed=0))

    save(tmp_path / "m", task, model, encoder, FAST)

    predictor = pipeline("text-classification", model=str(tmp_path / "m"), device="cpu")
    for sentence in SENTENCES:
        scaled = model.predict(our_ids(encoder, sentence)).item()
        assert predictor(sentence)[0]["score"] == pytest.approx(-2 + 8 * scaled, abs=1e-4)


def test_a_trained_classifier_in_a_pipeline_gives_the_labels_of_its_predictions_file(
    encoder: Pretrained, tmp_path: Path
) -> None:
    animals = [("the dog saw the tree", "mammal"), ("the bird saw the tree", "bird"), ("a good horse", "mammal")]
    (tmp_path / "RTE").mkdir()
    for stem in ("train", "dev"):
        lines = [f"{number}\t{animals[number % 3][0]}\t{animals[number % 3][1]}" for number in range(48)]
        (tmp_path / f"{stem}.tsv").write_text("id\ttext\tlabel\n" + "\n".join(lines) + "\n")
    task = TextTask(TextSpec(name="custom", text_a="text", text_b=None, label="label"), tmp_path)

    settings = FAST.model_copy(update={"epochs": 12.0})
    result = finetune_task(encoder, task, settings, 1, CPU, folder=tmp_path / "m")

    with (tmp_path / "m" / "dev_predictions.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    classifier = pipeline("text-classification", model=str(tmp_path / "m"), device="cpu")
    predicted = [answer["label"] for answer in classifier(task.dev[""].a)]
    assert [row["prediction"] for row in rows] == predicted
    assert [row["label"] for row in rows] == task.dev[""].label
    accuracy = np.mean([row["prediction"] == row["label"] for row in rows])
    assert accuracy == pytest.approx(result.score)
    assert result.score is not None
    assert result.score > 0.9
    recorded = json.loads((tmp_path / "m" / "finetune.json").read_text())["result"]
    assert recorded == json.loads(json.dumps(result.numbers()))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "m" / name).stat().st_mode & 0o044 == 0o044  # others may read it
    # The tuned model is a starting point for another task.
    assert load_pretrained(str(tmp_path / "m")).tower == encoder.tower


@torch.no_grad()
def test_hugging_faces_question_answering_gives_the_logits_of_the_trained_model(
    encoder: Pretrained, tmp_path: Path
) -> None:
    paragraph = {"context": "the dog saw a bird", "qas": [{"id": "q", "question": "who?", "answers": [
        {"text": "dog", "answer_start": 4}]}]}  # fmt: skip
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    task = SquadTask(1, tmp_path)
    model = with_trained_head(task.model(encoder, FAST, seed=0))

    save(tmp_path / "m", task, model, encoder, FAST)

    theirs = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "m").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    for question, passage in PAIRS:
        start, end = model.predict(our_ids(encoder, question, passage)).unbind(-1)
        output = theirs(**tokenizer(question, passage, return_tensors="pt"))
        torch.testing.assert_close(output.start_logits, start, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(output.end_logits, end, atol=2e-5, rtol=1e-5)
    assert task.model(encoder, FAST.model_copy(update={"head": "paper"}), seed=0).hf_config() is None


@torch.no_grad()
def test_hugging_faces_token_classification_gives_the_logits_and_the_tags_of_the_trained_model(
    encoder: Pretrained, tmp_path: Path
) -> None:
    """The word "xy" has two pieces; its tag is that of the first one."""
    words = {"the": "O", "king": "B-PER", "xy": "I-PER", "saw": "O", "house": "B-LOC", "near": "O"}
    sentences = ["the king xy saw the house", "near the house", "the king saw xy"]
    text = "\n\n".join("\n".join(f"{word} {words[word]}" for word in sentence.split()) for sentence in sentences)
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.txt").write_text((text + "\n\n") * (6 if stem == "train" else 1))
    task = TaggingTask("ner", tmp_path)
    settings = FAST.model_copy(update={"epochs": 30.0})

    with torch.enable_grad():
        finetune_task(encoder, task, settings, 0, CPU, folder=tmp_path / "m")
    untrained = with_trained_head(task.model(encoder, settings, seed=0))
    save(tmp_path / "untrained", task, untrained, encoder, settings)

    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "untrained").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "untrained")
    for sentence in SENTENCES:
        expected = untrained.predict(our_ids(encoder, sentence))
        actual = theirs(**tokenizer(sentence, return_tensors="pt")).logits
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)

    lines = (tmp_path / "m" / "dev_predictions.txt").read_text().splitlines()
    predicted = [line.split()[2] for line in lines if line]
    assert [line.split()[1] for line in lines if line] == [words[w] for s in sentences for w in s.split()]
    tagger = pipeline("token-classification", model=str(tmp_path / "m"), device="cpu", ignore_labels=[])
    tags_of_first_pieces = []
    for sentence in sentences:
        tags_of_first_pieces += [piece["entity"] for piece in tagger(sentence) if not piece["word"].startswith("##")]
    assert tags_of_first_pieces == predicted
    assert len(set(predicted)) > 1
    grouped = pipeline("token-classification", model=str(tmp_path / "m"), device="cpu", aggregation_strategy="first")(
        sentences[0]
    )
    assert "PER" in {entity["entity_group"] for entity in grouped}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_files_of_a_saved_model_have_the_permissions_that_the_umask_leaves(
    encoder: Pretrained, tmp_path: Path, umask: int
) -> None:
    task = text_task(tmp_path / "data", ["no", "yes"])
    model = task.model(encoder, FAST, seed=0)
    before = os.umask(umask)
    try:
        save(tmp_path / "out" / "seed-0", task, model, encoder, FAST)
        copy_best(tmp_path / "out", [RESULT])
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"model.safetensors", "config.json", "finetune.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}

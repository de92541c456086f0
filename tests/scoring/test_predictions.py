"""`electra-dist predict`: equal to the development predictions of fine-tuning and to transformers, for each task."""

from __future__ import annotations

import csv
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from electra_launcher.cli.main import app
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)
from typer.testing import CliRunner

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.stored_scores import Measured
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower, export_towers
from electra_dist.scoring.predictions import open_predictions
from electra_dist.scoring.tuned_model import TunedModel
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
SETTINGS = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=3, batch=16, max_length=48)
NUM_ROWS = 200
WORDS = ["the", "old", "dog", "saw", "a", "bird", "near", "that", "house", "who", "knew", "many", "trees"]
TAGS = {"dog": "B-ANIMAL", "bird": "B-ANIMAL", "old": "O", "house": "B-PLACE", "trees": "I-PLACE"}


def sentences(seed: int, number: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [[rng.choice(WORDS) for _ in range(rng.randint(3, 9))] for _ in range(number)]


def tune(encoder: Pretrained, folder: Path, **request: Any) -> Measured:
    task = open_task(TaskRequest(**request))
    return finetune_task(encoder, task, SETTINGS, 0, CPU, folder=folder / "best")


def predict(model: Path, file: Path, **columns: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    predictions = open_predictions(TunedModel(model), file, **columns)(lambda *_: None)
    return [json.loads(line) for line in predictions.text(".jsonl").splitlines()], predictions.metrics


def write_texts(file: Path, seed: int, number: int, is_regression: bool = False) -> list[str]:
    texts = [" ".join(words) for words in sentences(seed, number)]
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        for text in texts:
            writer.writerow([text, text.count("the") / 4 if is_regression else "animal" if "dog" in text else "none"])
    return texts


def test_classes_are_those_of_the_development_predictions_and_of_a_pipeline(
    encoder: Pretrained, tmp_path: Path
) -> None:
    write_texts(tmp_path / "train.csv", 0, 200)
    texts = write_texts(tmp_path / "dev.csv", 1, NUM_ROWS)
    result = tune(encoder, tmp_path, name="custom", data=tmp_path)

    rows, metrics = predict(tmp_path, tmp_path / "dev.csv")

    assert metrics == pytest.approx(result.metrics, abs=0)
    with (tmp_path / "best" / "dev_predictions.tsv").open() as file:
        dev = list(csv.DictReader(file, delimiter="\t"))
    assert [(str(row["index"]), row["prediction"], row["label"]) for row in rows] == [
        tuple(row.values()) for row in dev
    ]
    assert len({row["prediction"] for row in rows}) == 2
    theirs = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu", top_k=None)(texts)
    for row, scores in zip(rows, theirs, strict=True):
        assert row["probabilities"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=1e-5)

    # The same texts, one on each line and without labels.
    (tmp_path / "new.txt").write_text("\n".join(texts) + "\n")
    new, no_metrics = predict(tmp_path, tmp_path / "new.txt")
    assert [row["prediction"] for row in new] == [row["prediction"] for row in rows]
    assert no_metrics == {} and "label" not in new[0]


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_pipeline_that_truncates_cuts_long_texts_where_the_training_cut_them(
    encoder: Pretrained, tmp_path: Path, kind: str
) -> None:
    texts = write_texts(tmp_path / "train.csv", 0, 40, is_regression=kind == "regression")
    settings = SETTINGS.model_copy(update={"max_length": 12, "epochs": 1.0})  # the model has 64 positions
    task = open_task(TaskRequest(name="custom", data=tmp_path, kind=kind))  # type: ignore[arg-type]
    finetune_task(encoder, task, settings, 0, CPU, folder=tmp_path / "best")
    long_texts = [" ".join(texts[start : start + 5]) for start in range(0, 40, 5)]
    (tmp_path / "new.txt").write_text("\n".join(long_texts) + "\n")

    rows, _ = predict(tmp_path, tmp_path / "new.txt")

    theirs = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu")(long_texts, truncation=True)
    best = [max(row["probabilities"].values()) if "probabilities" in row else row["prediction"] for row in rows]
    assert [one["score"] for one in theirs] == pytest.approx(best, abs=1e-5)
    # Without the cut the scores would be others, as these texts have at least 15 tokens.
    whole = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu")(long_texts)
    assert [one["score"] for one in whole] != pytest.approx(best, abs=1e-5)


def test_classes_of_pairs_are_those_of_the_development_predictions_and_of_a_pipeline(
    encoder: Pretrained, tmp_path: Path
) -> None:
    pairs = {}
    for seed, stem in ((0, "train"), (1, "dev")):
        words = sentences(seed, 2 * NUM_ROWS)
        pairs[stem] = [(" ".join(a), " ".join(b)) for a, b in zip(words[::2], words[1::2], strict=True)]
        rows = [[a, b, "both" if "dog" in a and "dog" in b else "other"] for a, b in pairs[stem]]
        pandas.DataFrame(rows, columns=["first", "second", "label"]).to_csv(tmp_path / f"{stem}.csv", index=False)
    result = tune(encoder, tmp_path, name="custom", data=tmp_path, text_a="first", text_b="second", label="label")

    predicted, metrics = predict(tmp_path, tmp_path / "dev.csv")

    assert metrics == pytest.approx(result.metrics, abs=0)
    with (tmp_path / "best" / "dev_predictions.tsv").open() as file:
        dev = list(csv.DictReader(file, delimiter="\t"))
    assert [(str(row["index"]), row["prediction"], row["label"]) for row in predicted] == [
        tuple(row.values()) for row in dev
    ]
    classify = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu", top_k=None)
    theirs = classify([{"text": a, "text_pair": b} for a, b in pairs["dev"]])
    for row, scores in zip(predicted, theirs, strict=True):
        assert row["probabilities"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=1e-5)


def test_numbers_are_those_of_the_development_predictions_and_of_a_pipeline(
    encoder: Pretrained, tmp_path: Path
) -> None:
    write_texts(tmp_path / "train.csv", 0, 100, is_regression=True)
    texts = write_texts(tmp_path / "dev.csv", 1, NUM_ROWS, is_regression=True)
    result = tune(encoder, tmp_path, name="custom", data=tmp_path, kind="regression")

    rows, metrics = predict(tmp_path, tmp_path / "dev.csv")

    assert metrics == pytest.approx(result.metrics, abs=1e-4)
    with (tmp_path / "best" / "dev_predictions.tsv").open() as file:
        dev = [float(row["prediction"]) for row in csv.DictReader(file, delimiter="\t")]
    assert [row["prediction"] for row in rows] == pytest.approx(dev, abs=2e-5)
    theirs = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu", function_to_apply="none")(
        texts
    )
    assert [row["prediction"] for row in rows] == pytest.approx([one["score"] for one in theirs], abs=2e-5)

    # Without the kind of problem, as cross-encoders are written, the pipeline takes the sigmoid.
    config_file = tmp_path / "best" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "problem_type": None}))
    rows, _ = predict(tmp_path, tmp_path / "dev.csv")
    theirs = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu")(texts)
    assert [row["prediction"] for row in rows] == pytest.approx([one["score"] for one in theirs], abs=2e-5)

    # All digits of large numbers, such as prices, are those of the pipeline.
    config_file.write_text(json.dumps(config))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    with torch.no_grad():
        list(model.parameters())[-1].add_(1_234_567.0)
    model.save_pretrained(tmp_path / "best")
    large, _ = predict(tmp_path, tmp_path / "dev.csv")
    classify = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu", function_to_apply="none")
    assert [row["prediction"] for row in large] == pytest.approx([one["score"] for one in classify(texts)], abs=0.25)

    # Labels that are no numbers, or all equal, give no scores, or a remark on them.
    table = pandas.DataFrame({"text": texts[:2], "label": ["low", "high"]})
    table.to_csv(tmp_path / "new.csv", index=False)
    of_words = open_predictions(TunedModel(tmp_path), tmp_path / "new.csv")(lambda *_: None)
    assert of_words.metrics == {} and len(of_words.objects) == 2
    assert "no label in `label` (`high` 1, `low` 1) is a number" in of_words.notes[-1]
    table.assign(label=["low", 1]).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(UserError, match=r"new\.csv:2: `low` 1: .*, or pass --label '' to predict without scores"):
        open_predictions(TunedModel(tmp_path), tmp_path / "new.csv")
    table.assign(label=1).to_csv(tmp_path / "new.csv", index=False)
    equal = open_predictions(TunedModel(tmp_path), tmp_path / "new.csv")(lambda *_: None)
    assert equal.metrics == {"pearson": 0.0, "spearman": 0.0}
    assert "all labels to score by are equal (`1` 2), so there is no correlation with them" in equal.notes[-1]

    names = {"0": "x", "1": "y"}
    config_file.write_text(json.dumps({**config, "id2label": names}))
    with pytest.raises(UserError, match="a regression of 2 numbers for each text; only models of one number"):
        TunedModel(tmp_path)


def test_each_row_keeps_its_place_and_a_row_without_label_is_not_scored(encoder: Pretrained, tmp_path: Path) -> None:
    write_texts(tmp_path / "train.csv", 0, 100)
    tune(encoder, tmp_path, name="custom", data=tmp_path / "train.csv")
    texts = ["the old dog saw", "", "a bird near that house", "", "who knew"]
    labels = ["animal", None, float("nan"), None, "none"]
    classify = pipeline("text-classification", model=str(tmp_path / "best"), device="cpu")
    expected = [one["label"] for one in classify(texts)]
    files = ["new.txt", "one.csv", "new.csv", "new.tsv", "new.jsonl", "new.parquet"]
    (tmp_path / "new.txt").write_text("\n".join(texts) + "\n")
    table = pandas.DataFrame({"text": texts, "label": labels})
    table[["text"]].to_csv(tmp_path / "one.csv", index=False)
    table.to_csv(tmp_path / "new.csv", index=False)
    table.to_csv(tmp_path / "new.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "new.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "new.parquet")
    for name in files:
        rows, metrics = predict(tmp_path, tmp_path / name)
        notes = open_predictions(TunedModel(tmp_path), tmp_path / name)(lambda *_: None).notes

        assert [row["prediction"] for row in rows] == expected, name
        assert f"{tmp_path / name}: 2 of 5 texts are empty (index 1, 3), and what is predicted for them" in notes[0]
        if "new.txt" != name != "one.csv":
            assert [row.get("label") for row in rows] == ["animal", None, None, None, "none"]
            assert metrics["accuracy"] == ((expected[0] == "animal") + (expected[4] == "none")) / 2
            assert "2 of 5 rows have a label" in notes[-1]

    # An object of a .jsonl file may lack the key, also the first one, but not all of them.
    objects = ['{"text": "the dog"}', '{"text": "the old dog saw", "label": "animal"}', '{"text": "who"}']
    (tmp_path / "keys.jsonl").write_text("\n".join(objects))
    rows, metrics = predict(tmp_path, tmp_path / "keys.jsonl")
    assert [row.get("label") for row in rows] == [None, "animal", None]
    assert metrics["accuracy"] == (rows[1]["prediction"] == "animal")
    with pytest.raises(UserError, match=r"keys\.jsonl:1: no key `kind`"):
        open_predictions(TunedModel(tmp_path), tmp_path / "keys.jsonl", label="kind")

    assert predict(tmp_path, tmp_path / "new.csv", label="")[1] == {}
    table.assign(label="cat").to_csv(tmp_path / "new.csv", index=False)
    result = open_predictions(TunedModel(tmp_path), tmp_path / "new.csv")(lambda *_: None)
    assert (
        result.metrics == {}
        and "no label in `label` (`cat` 5) is one of the model's (animal, none)" in result.notes[-1]
    )

    table.assign(label=["animal", "cat", "cat", "dog", "none"]).to_csv(tmp_path / "new.csv", index=False)
    message = (
        r"new\.csv:3: `cat` 2, `dog` 1: unknown labels .*; the labels that are known are animal, none: correct them, "
        r"or pass --label '' to predict without scores"
    )
    with pytest.raises(UserError, match=message):
        open_predictions(TunedModel(tmp_path), tmp_path / "new.csv")

    table[["text"]].rename(columns={"text": "message"}).to_csv(tmp_path / "renamed.csv", index=False)
    chosen = "there is no column `text`, so the text is the column `message`; name another one with --text-a"
    for columns, is_chosen in (({}, True), ({"text_a": "message"}, False)):
        result = open_predictions(TunedModel(tmp_path), tmp_path / "renamed.csv", **columns)(lambda *_: None)
        assert any(chosen in note for note in result.notes) == is_chosen


def test_a_table_of_predictions_begins_with_the_columns_of_the_file(encoder: Pretrained, tmp_path: Path) -> None:
    write_texts(tmp_path / "train.csv", 0, 100)
    tune(encoder, tmp_path, name="custom", data=tmp_path / "train.csv")
    own = pandas.DataFrame({"id": ["a1", "b;2"], "text": ["the old dog", 'a, "house"'], "label": ["animal", "none"]})
    own.to_csv(tmp_path / "new.csv", index=False, sep=";")
    own.assign(index=[7, 9]).to_csv(tmp_path / "own.csv", index=False)
    for name, rows in (("new.csv", [0, 1]), ("own.csv", [7, 9])):
        predictions = open_predictions(TunedModel(tmp_path), tmp_path / name)(lambda *_: None)
        for suffix, separator in ((".csv", ","), (".tsv", "\t")):
            (tmp_path / "out").write_text(predictions.text(suffix))
            written = pandas.read_csv(tmp_path / "out", sep=separator)
            assert list(written) == ["index", *own, "prediction", "p(animal)", "p(none)"]
            assert written["index"].tolist() == rows
            pandas.testing.assert_frame_equal(written[list(own)], own)
            assert written["prediction"].tolist() == [row["prediction"] for row in predictions.objects]
        assert [row["index"] for row in predictions.objects] == [0, 1]


def test_a_model_of_pairs_does_not_predict_from_the_first_texts_alone(encoder: Pretrained, tmp_path: Path) -> None:
    lines = [f"{a},{b},{'same' if a == b else 'other'}" for a in WORDS[:6] for b in WORDS[:6]]
    (tmp_path / "train.csv").write_text("\n".join(["question,answer,label", *lines]))
    tune(encoder, tmp_path, name="custom", data=tmp_path / "train.csv", text_a="question", text_b="answer")
    (tmp_path / "new.csv").write_text("question,reply\nthe,old\n")
    (tmp_path / "new.txt").write_text("the old\n")

    for name in ("new.csv", "new.txt"):
        with pytest.raises(UserError, match=r"tuned on pairs of texts, and the file has no column `answer`; name"):
            open_predictions(TunedModel(tmp_path), tmp_path / name)
    assert len(predict(tmp_path, tmp_path / "new.csv", text_b="reply")[0]) == 1


def test_tags_and_spans_are_those_of_the_development_predictions_and_of_a_pipeline(
    encoder: Pretrained, tmp_path: Path
) -> None:
    dev = sentences(1, NUM_ROWS)
    for stem, content in (("train", sentences(0, 200)), ("dev", dev)):
        blocks = ["\n".join(f"{word} {TAGS.get(word, 'O')}" for word in words) for words in content]
        (tmp_path / f"{stem}.txt").write_text("\n\n".join(blocks) + "\n")
    result = tune(encoder, tmp_path, name="ner", data=tmp_path)

    rows, metrics = predict(tmp_path, tmp_path / "dev.txt")

    assert metrics == result.metrics
    lines = (tmp_path / "best" / "dev_predictions.txt").read_text().split("\n\n")
    assert [row["prediction"] for row in rows] == [
        [line.split()[2] for line in block.splitlines()] for block in lines[:-1]
    ]
    assert any(row["spans"] for row in rows)
    theirs = pipeline(
        "token-classification", model=str(tmp_path / "best"), device="cpu", aggregation_strategy="first"
    )([" ".join(words) for words in dev])
    for row, entities in zip(rows, theirs, strict=True):
        assert [(span["type"], span["text"]) for span in row["spans"]] == [
            (entity["entity_group"], entity["word"]) for entity in entities
        ]
    # The same words without their tags, one on each line.
    (tmp_path / "new.txt").write_text("\n\n".join("\n".join(words) for words in dev) + "\n")
    new, no_metrics = predict(tmp_path, tmp_path / "new.txt")
    assert [row["prediction"] for row in new] == [row["prediction"] for row in rows] and no_metrics == {}
    # Tags that the model does not know are counted.
    (tmp_path / "other.txt").write_text("the DET\ndog B-ANIMAL\n\na DET\nknew VERB\n")
    assert open_predictions(TunedModel(tmp_path), tmp_path / "other.txt")(lambda *_: None).notes == [
        f"{tmp_path}/other.txt: tags that the training data lack count as wrong: `DET` 2, `VERB` 1; the known tags "
        "are B-ANIMAL, B-PLACE, I-PLACE, O"
    ]


def test_tags_of_another_kind_are_not_scored_and_single_ones_count_as_wrong_without_an_f1(
    encoder: Pretrained, tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_text("the O\nold B-A\ndog I-A\n\na O\nbird B-A\n")
    (tmp_path / "dev.txt").write_text("the O\nking O\n")  # a development file without a name in it
    tune(encoder, tmp_path, name="ner", data=tmp_path)
    (tmp_path / "parts.tsv").write_text("the\tDET\nold\tX\ndog\tNOUN\n")
    (tmp_path / "mixed.txt").write_text("the O\nold X\n\ndog X\n")
    (tmp_path / "table.tsv").write_text("number\tsentence\n7\tthe old dog\n")

    parts = open_predictions(TunedModel(tmp_path), tmp_path / "parts.tsv")(lambda *_: None)
    mixed, of_mixed = predict(tmp_path, tmp_path / "mixed.txt")
    [row], _ = predict(tmp_path, tmp_path / "table.tsv", text_a="sentence")

    assert parts.metrics == {} and "label" not in parts.rows[0]
    assert any("is one of the model's (B-A, I-A, O), so none is scored" in note for note in parts.notes)
    assert of_mixed == {"accuracy": sum(one["prediction"][:1] == ["O"] for one in mixed[:1]) / 3}
    assert row["words"] == ["the", "old", "dog"]


@torch.no_grad()
def test_answers_are_those_of_the_development_predictions_and_the_best_span_of_transformers(
    encoder: Pretrained, tmp_path: Path
) -> None:
    def articles(seed: int, number: int) -> dict[str, Any]:
        paragraphs = []
        for index, words in enumerate(sentences(seed, number)):
            answer = {"text": words[1], "answer_start": len(words[0]) + 1}
            question = {"id": f"q{index}", "question": f"who saw the {words[0]}", "answers": [answer]}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        return {"data": [{"paragraphs": paragraphs}]}

    dev = articles(1, NUM_ROWS)
    (tmp_path / "train-v1.1.json").write_text(json.dumps(articles(0, 64)))
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(dev))
    with torch.enable_grad():
        result = tune(encoder, tmp_path, name="squad1", data=tmp_path)

    rows, metrics = predict(tmp_path, tmp_path / "dev-v1.1.json")

    assert metrics == result.metrics
    assert {row["id"]: row["prediction"] for row in rows} == json.loads(
        (tmp_path / "best" / "predictions.json").read_text()
    )
    model = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "best").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "best")
    table = ["id,question,context"]
    for row, paragraph in zip(rows, dev["data"][0]["paragraphs"], strict=True):
        context, question = paragraph["context"], paragraph["qas"][0]["question"]
        table.append(f"{row['id']},{question},{context}")
        assert context[row["start"] : row["end"]] == row["prediction"]
        inputs = tokenizer(question, context, return_tensors="pt")
        output = model(**inputs)
        tokens = [place for place, sequence in enumerate(inputs.sequence_ids()) if sequence == 1]
        score = {
            (start, end): float(output.start_logits[0, start] + output.end_logits[0, end])
            for start in tokens
            for end in tokens
            if start <= end
        }
        ends = {inputs.token_to_chars(end).end: end for end in tokens}
        starts = {inputs.token_to_chars(start).start: start for start in tokens}
        assert score[starts[row["start"]], ends[row["end"]]] == pytest.approx(max(score.values()), abs=1e-4)

    # A question that cannot be used is counted.
    dev["data"][0]["paragraphs"][1]["qas"][0]["id"] = "q0"
    (tmp_path / "twice.json").write_text(json.dumps(dev))
    fewer = open_predictions(TunedModel(tmp_path), tmp_path / "twice.json")(lambda *_: None)
    assert len(fewer.objects) == NUM_ROWS - 1
    assert fewer.notes == [
        f"{tmp_path}/twice.json: 1 questions are left out, because they have the id of an earlier question; first: "
        "question 2"
    ]

    # The same questions as a table, without answers.
    (tmp_path / "new.csv").write_text("\n".join(table) + "\n")
    new, no_metrics = predict(tmp_path, tmp_path / "new.csv")
    assert new == rows and no_metrics == {}


def test_the_command_writes_tables_and_json_lines_and_says_in_one_line_what_is_wrong(
    encoder: Pretrained, model: ModelConfig, modern_model: ModelConfig, tmp_path: Path
) -> None:
    write_texts(tmp_path / "train.csv", 0, 40)
    tune(encoder, tmp_path, name="custom", data=tmp_path / "train.csv")
    arguments = ["predict", str(tmp_path), str(tmp_path / "train.csv")]

    printed = CliRunner().invoke(app, arguments, catch_exceptions=False)
    written = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "p.tsv")], catch_exceptions=False)

    objects = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("{")]
    with (tmp_path / "p.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["prediction"] for row in rows] == [one["prediction"] for one in objects]
    assert float(rows[0]["p(animal)"]) == objects[0]["probabilities"]["animal"]
    assert "accuracy" in written.output and "p.tsv: 40 predictions" in written.output
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "book.xlsx").touch()
    (tmp_path / "run").mkdir()
    exports = tmp_path / "export"
    vocabulary = encoder.vocabulary
    export_towers(build_towers(model, 3).state_dict(), model, vocabulary, True, exports)
    export_towers(build_towers(modern_model, 3).state_dict(), modern_model, vocabulary, True, tmp_path / "modern")
    (tmp_path / "run" / "config.yaml").touch()
    interrupted, unknown = tmp_path / "interrupted", tmp_path / "unknown"
    (interrupted / "seed-1").mkdir(parents=True)
    (interrupted / "seed-1" / "config.json").touch()
    unknown.mkdir()
    of_paper, of_vectors = tmp_path / "paper", tmp_path / "vectors"
    (of_paper / "best").mkdir(parents=True)
    (of_paper / "best" / "finetune.json").touch()
    of_vectors.mkdir()
    (of_vectors / "config.json").write_text('{"architectures": ["ElectraModel"]}')
    (of_vectors / "modules.json").touch()
    for folder, data, message in (
        (interrupted, "other.csv", "its fine-tuning has not finished; run the .* again, or use .*interrupted/seed-1"),
        (unknown, "other.csv", "unknown: holds no tuned model; if its fine-tuning was interrupted, run the finetune"),
        (of_paper, "other.csv", "paper: holds predictions, but no model, because it was tuned with --set head=paper"),
        (of_vectors, "other.csv", "vectors: a model of vectors of texts, .*; load it by SentenceTransformer"),
        (tmp_path / "best", "other.csv", "no column is clearly the text; name one of a, b with --text-a"),
        (tmp_path / "best", "nowhere.csv", "nowhere.csv: no such file"),
        (tmp_path / "best", "empty.txt", r"empty.txt: no examples; add at least one line with all columns \(text\)"),
        (tmp_path / "run", "other.csv", "run: a pretrained model, .* electra-dist finetune --model .*run --data"),
        (exports, "other.csv", "export: a pretrained model, .* electra-dist finetune --model .*export --data"),
        (exports / "discriminator", "other.csv", "discriminator: a pretrained model, which knows no task"),
        (exports / "generator", "other.csv", "generator: a pretrained model, which knows no task"),
        (tmp_path / "modern" / "discriminator", "other.csv", "discriminator: a pretrained model, which knows no task"),
        (tmp_path / "best", "book.xlsx", "book.xlsx: a spreadsheet, which is not read"),
        (tmp_path / "nowhere", "other.csv", "no such file; name the folder of a tuned model"),
    ):
        with pytest.raises(UserError, match=message):
            open_predictions(TunedModel(folder), tmp_path / data)


def test_texts_that_were_cut_are_counted_and_those_that_just_fit_are_not(encoder: Pretrained, tmp_path: Path) -> None:
    write_texts(tmp_path / "train.csv", 0, 40)
    tune(encoder, tmp_path, name="custom", data=tmp_path / "train.csv")
    fits = "dog " * (SETTINGS.max_length - 2)  # beside [CLS] and [SEP]
    assert len(encoder.tokenizer.encode([fits])[0]) == SETTINGS.max_length - 2
    (tmp_path / "texts.txt").write_text(f"{fits}\n{fits} dog\ndog\n{fits * 3}\n")

    predictions = open_predictions(TunedModel(tmp_path), tmp_path / "texts.txt")(lambda *_: None)

    assert f"2 of 4 texts were cut to {SETTINGS.max_length} tokens" in predictions.notes
    assert any("truncation=True" in note for note in predictions.notes)


def test_the_commands_at_the_top_of_the_page_run(
    model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    commands = page.split("```bash\n")[1].split("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()
    export_tower(state, model, "discriminator", Vocabulary.read(Path("vocab.txt")), True, Path("runs/small"))
    write_texts(Path("reviews.csv"), 0, 40)
    write_texts(Path("new.csv"), 1, 5)

    for command in commands:
        run = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
        assert run.exit_code == 0, run.output

    with Path("predictions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    assert pipeline("text-classification", model="tuned/best", device="cpu")("the dog")[0]["label"] in (
        "animal",
        "none",
    )

"""Files for the GLUE benchmark and predictions for SQuAD, read as the benchmark and the official scripts do."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.small_encoder import head_parameters

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import GLUE, TextSpec
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.text_task import GLUE_TEST_SETS, TextTask
from electra_dist.pretrained.encoder import Pretrained

CPU = torch.device("cpu")
SHORT = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=1, batch=8, max_length=24)
# Headers of the test files of the download, and the names that gluebenchmark.com wants in a submission.
TEST_FILES = {
    "cola": [("CoLA/test.tsv", "index\tsentence", "CoLA.tsv")],
    "sst2": [("SST-2/test.tsv", "index\tsentence", "SST-2.tsv")],
    "mrpc": [("MRPC/test.tsv", "index\t#1 ID\t#2 ID\t#1 String\t#2 String", "MRPC.tsv")],
    "stsb": [
        (
            "STS-B/test.tsv",
            "index\tgenre\tfilename\tyear\told_index\tsentence1\tsentence2",
            "STS-B.tsv",
        )
    ],
    "qqp": [("QQP/test.tsv", "id\tquestion1\tquestion2", "QQP.tsv")],
    "mnli": [
        ("MNLI/test_matched.tsv", "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2", "MNLI-m.tsv"),
        ("MNLI/test_mismatched.tsv", "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2", "MNLI-mm.tsv"),
        ("diagnostic/diagnostic.tsv", "index\tsentence1\tsentence2", "AX.tsv"),
    ],
    "qnli": [("QNLI/test.tsv", "index\tquestion\tsentence", "QNLI.tsv")],
    "rte": [("RTE/test.tsv", "index\tsentence1\tsentence2", "RTE.tsv")],
    "wnli": [("WNLI/test.tsv", "index\tsentence1\tsentence2", "WNLI.tsv")],
}
TRAIN_HEADERS = {
    "cola": None,
    "sst2": "sentence\tlabel",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "stsb": "index\tsentence1\tsentence2\tscore",
    "qqp": "id\tquestion1\tquestion2\tis_duplicate",
    "mnli": "index\tsentence1\tsentence2\tgold_label",
    "qnli": "index\tquestion\tsentence\tlabel",
    "rte": "index\tsentence1\tsentence2\tlabel",
    "wnli": "index\tsentence1\tsentence2\tlabel",
}
WORDS = ["dog", "bird", "the", "old", "saw", "house"]


def write_glue_task(name: str, folder: Path, num_test: int) -> None:
    """Write the files of one task, with texts of random words, in the columns of the download."""
    rng = random.Random(0)
    spec = GLUE[name]
    labels = spec.labels or ("0.0", "2.5", "5.0")
    label_titles = ("label", "Quality", "score", "is_duplicate", "gold_label")

    def cell(title: str, number: int) -> str:
        if title in label_titles:
            return labels[number % len(labels)]
        if title in ("index", "id") or "ID" in title:
            return str(number)
        return " ".join(rng.choice(WORDS) for _ in range(4))

    (folder / spec.folder).mkdir(parents=True, exist_ok=True)
    for stem in ("train", *(stem for _, stem in spec.dev_files)):
        header = TRAIN_HEADERS[name]
        titles = ["x", "label", "x", "sentence"] if header is None else header.split("\t")
        lines = [] if header is None else [header]
        lines += ["\t".join(cell(title, number) for title in titles) for number in range(16)]
        (folder / spec.folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    for path, header, _ in TEST_FILES[name]:
        (folder / path).parent.mkdir(exist_ok=True)
        lines = [header]
        lines += ["\t".join(cell(title, number) for title in header.split("\t")) for number in range(num_test)]
        (folder / path).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", sorted(TEST_FILES))
def test_a_submission_has_every_example_of_the_test_file_in_the_benchmarks_format(
    name: str, encoder: Pretrained, tmp_path: Path
) -> None:
    write_glue_task(name, tmp_path, num_test=11)
    task = TextTask(GLUE[name], tmp_path, with_test=True)
    model = task.model(encoder, SHORT, seed=0).eval()
    weight, bias = head_parameters(model)[-2:]
    torch.nn.init.constant_(bias, 0.5)  # the middle of a regression's labels, which are scaled
    torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(1))

    files = {file.name: file.text for file in task.predict_test_sets(model, encoder, SHORT, lambda *_: None)}

    assert set(files) == {f"submission/{output}" for _, _, output in TEST_FILES[name]}
    for text in files.values():
        header, *lines = text.splitlines()
        assert header == "index\tprediction"
        indices, predictions = zip(*(line.split("\t") for line in lines))
        assert list(indices) == [str(number) for number in range(11)]
        if name == "stsb":
            assert all(0.0 <= float(prediction) <= 5.0 for prediction in predictions)
            assert len(set(predictions)) > 5
        else:
            assert set(predictions) <= set(GLUE[name].labels)
    # The test set changes what is written, so it is part of the task's identity; without one, nothing changes.
    assert task.digest != TextTask(GLUE[name], tmp_path).digest
    for path, _, _ in TEST_FILES[name]:
        (tmp_path / path).unlink()
    assert TextTask(GLUE[name], tmp_path, with_test=True).digest == TextTask(GLUE[name], tmp_path).digest


def test_predictions_stay_with_their_examples_although_batches_are_sorted_by_length(
    encoder: Pretrained, tmp_path: Path
) -> None:
    """Texts of different lengths; one at a time gives the same predictions as all together."""
    write_glue_task("cola", tmp_path, num_test=1)
    texts = ["dog " * length for length in (1, 9, 2, 15, 4, 7, 12, 3)]
    (tmp_path / "CoLA/test.tsv").write_text(
        "index\tsentence\n" + "".join(f"{100 + number}\t{text}\n" for number, text in enumerate(texts))
    )
    task = TextTask(GLUE["cola"], tmp_path, with_test=True)
    model = task.model(encoder, SHORT, seed=0).eval()
    weight, bias = head_parameters(model)[-2:]
    torch.nn.init.normal_(weight, std=3.0, generator=torch.Generator().manual_seed(2))
    special = encoder.special
    rows = [torch.tensor([[special.cls, *encoder.tokenizer.encode([text])[0], special.sep]]) for text in texts]
    with torch.no_grad():
        logits = torch.cat([model.predict(row) for row in rows])
        middle = (logits[:, 0] - logits[:, 1]).sort().values[3:5].mean()
        bias[1] += middle  # half of the texts get the label 1

    (file,) = task.predict_test_sets(model, encoder, SHORT.model_copy(update={"batch": 3}), lambda *_: None)

    is_one = logits[:, 1] + middle > logits[:, 0]
    expected = [f"{100 + number}\t{int(one)}" for number, one in enumerate(is_one)]
    assert file.text.splitlines()[1:] == expected
    assert len({line.split("\t")[1] for line in expected}) == 2


def test_a_custom_test_file_needs_no_labels_and_a_line_without_its_text_is_an_error(
    encoder: Pretrained, tmp_path: Path
) -> None:
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.tsv").write_text("text\tlabel\nthe dog\ta\nthe bird\tb\n")
    (tmp_path / "test.tsv").write_text("text\nthe dog\nthe house\n")
    spec = TextSpec(name="custom", text_a="text", text_b=None, label="label")

    finetune_task(encoder, TextTask(spec, tmp_path, with_test=True), SHORT, 0, CPU, folder=tmp_path / "m")

    lines = (tmp_path / "m" / "test_predictions.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1"]
    write_glue_task("rte", tmp_path, num_test=3)
    with (tmp_path / "RTE/test.tsv").open("a") as file:
        file.write("3\tonly one text\n")
    with pytest.raises(UserError, match=r"RTE/test\.tsv: 1 lines have too few columns, but predictions are needed"):
        TextTask(GLUE["rte"], tmp_path, with_test=True)


def test_every_task_of_the_benchmark_has_its_submission() -> None:
    assert set(GLUE_TEST_SETS) == set(GLUE) == set(TEST_FILES)


# The rules of the official scripts for SQuAD, applied to the files alone.


def squad_words(answer: str) -> list[str]:
    lowered = "".join(character for character in answer.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", lowered).split()


def squad_f1(gold: str, predicted: str) -> float:
    gold_words, predicted_words = squad_words(gold), squad_words(predicted)
    if not gold_words or not predicted_words:
        return float(gold_words == predicted_words)
    common = sum((Counter(gold_words) & Counter(predicted_words)).values())
    return 2 * common / (len(gold_words) + len(predicted_words))


def squad_exact(gold: str, predicted: str) -> float:
    return float(squad_words(gold) == squad_words(predicted))


def official_scores(data_file: Path, predictions_file: Path, null_odds_file: Path | None) -> dict[str, float]:
    """Return exact match and F1 in per cent, at the best threshold of the null odds if there are any."""
    questions = [q for a in json.loads(data_file.read_text())["data"] for p in a["paragraphs"] for q in p["qas"]]
    predictions = json.loads(predictions_file.read_text())
    assert set(predictions) == {question["id"] for question in questions}
    null_odds = {} if null_odds_file is None else json.loads(null_odds_file.read_text())
    thresholds = [-float("inf"), *null_odds.values()] if null_odds else [float("inf")]
    best = {"exact": 0.0, "f1": 0.0}
    for threshold in thresholds:
        for name, score in (("exact", squad_exact), ("f1", squad_f1)):
            total = 0.0
            for question in questions:
                is_answered = null_odds.get(question["id"], 0.0) <= threshold
                predicted = predictions[question["id"]] if is_answered else ""
                gold = [answer["text"] for answer in question["answers"]] or [""]
                total += max(score(answer, predicted) for answer in gold)
            best[name] = max(best[name], 100 * total / len(questions))
    return best


@pytest.mark.parametrize(("version", "head"), [(1, "transformers"), (2, "transformers"), (2, "paper")])
def test_the_official_rules_give_the_reported_scores_from_the_prediction_files(
    encoder: Pretrained, tmp_path: Path, version: int, head: str
) -> None:
    rng = random.Random(1)
    for stem, num_passages in (("train", 48), ("dev", 24)):
        paragraphs = []
        for number in range(num_passages):
            words = [rng.choice(["the", "old", "near", "saw"]) for _ in range(6)]
            is_impossible = version == 2 and number % 3 == 0
            answers = []
            if not is_impossible:
                animal = rng.choice(["dog", "bird", "horse"])
                words.insert(rng.randrange(7), animal)
                answers = [{"text": animal, "answer_start": " ".join(words).index(animal)}]
            question = {"id": f"q{number}", "question": "who?", "answers": answers, "is_impossible": is_impossible}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        data = {"version": f"v{version}", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / f"{stem}-v{'1.1' if version == 1 else '2.0'}.json").write_text(json.dumps(data))
    settings = SHORT.model_copy(update={"epochs": 8.0, "head": head, "span_width": 16})

    result = finetune_task(encoder, SquadTask(version, tmp_path), settings, 0, CPU, folder=tmp_path / "m")

    has_model = (tmp_path / "m" / "model.safetensors").exists()
    assert has_model == (head == "transformers")
    null_odds_file = tmp_path / "m" / "null_odds.json" if version == 2 else None
    dev_file = next(tmp_path.glob("dev-*.json"))
    official = official_scores(dev_file, tmp_path / "m" / "predictions.json", null_odds_file)
    prefix = "best_" if version == 2 else ""
    assert result.metrics[f"{prefix}exact"] == pytest.approx(official["exact"])
    assert result.metrics[f"{prefix}f1"] == pytest.approx(official["f1"])
    assert official["f1"] > 34  # more than "" to every question of version 2

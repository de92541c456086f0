"""Fine-tuning data as people have it: formats of tables, columns that are found, and examples that are held out."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.text_task import TextTask
from electra_dist.tables import read_table

TEXTS = ['He said "no; never".', "two\nlines, and a comma", "the old dog | saw it", "caf\u00e9 \u4e2d"] * 5
LABELS = ["neg", "pos", "neg", "neg"] * 5


def write_csv(file: Path, delimiter: str) -> None:
    with file.open("w", encoding="utf-8-sig", newline="") as out:
        writer = csv.writer(out, delimiter=delimiter)
        writer.writerow(["nr", "review", "stars"])
        writer.writerows(zip(range(20), TEXTS, LABELS, strict=True))


def write_jsonl(file: Path) -> None:
    rows = zip(range(20), TEXTS, LABELS, strict=True)
    file.write_text("".join(json.dumps({"nr": n, "review": text, "stars": label}) + "\n" for n, text, label in rows))


def arrow_table() -> pa.Table:
    """Return the rows as the library datasets stores them: classes are numbers, whose names are in the metadata."""
    features = {"stars": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "review": {"dtype": "string"}}
    columns = {"nr": list(range(20)), "review": TEXTS, "stars": [int(label == "pos") for label in LABELS]}
    table = pa.table(columns)
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def save_dataset(folder: Path, table: pa.Table) -> None:
    """Write a table as `datasets.save_to_disk` does, in two files."""
    folder.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(10 * number, 10))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def write(folder: Path, name: str) -> Path:
    file = folder / name
    if name.endswith(".csv"):
        write_csv(file, {"comma.csv": ",", "semicolon.csv": ";", "tab.csv": "\t", "bar.csv": "|"}[name])
    elif name.endswith(".jsonl"):
        write_jsonl(file)
    elif name.endswith(".parquet"):
        pq.write_table(arrow_table(), file)
    else:
        save_dataset(file, arrow_table())
    return file


def open_custom(data: Path, **fields: object) -> TextTask:
    task = open_task(TaskRequest(name="custom", data=data, **fields))  # type: ignore[arg-type]
    assert isinstance(task, TextTask)
    return task


@pytest.mark.parametrize("name", ["comma.csv", "semicolon.csv", "tab.csv", "bar.csv", "x.jsonl", "x.parquet", "saved"])
def test_each_format_gives_the_same_examples_with_columns_that_are_found(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, name)

    task = open_custom(file)

    examples = {
        line: (text, label)
        for texts in (task.train, task.dev[""])
        for text, label, line in zip(texts.a, texts.label, texts.line)
    }
    assert [examples[line] for line in sorted(examples)] == list(zip(TEXTS, LABELS, strict=True))
    assert task.labels == ("neg", "pos")
    assert task.notes[0] == f"{file}: the text is the column `review`, and the label `stars`"
    assert "no development file, so 2 of 20 examples are held out" in task.notes[1]


def test_held_out_examples_depend_on_labels_and_seed_and_each_label_loses_its_share(tmp_path: Path) -> None:
    lines = [f"the text {number},{'rare' if number % 10 == 0 else 'often'}" for number in range(200)]
    (tmp_path / "x.csv").write_text("\n".join(["text,label", *lines, "the text,once"]))

    tasks = [open_custom(tmp_path / "x.csv", dev_share=0.2, split_seed=seed) for seed in (0, 0, 1)]

    dev = tasks[0].dev[""]
    assert Counter(dev.label) == {"often": 36, "rare": 4}
    assert not set(dev.line) & set(tasks[0].train.line)
    assert len(dev.line) + len(tasks[0].train.line) == 201
    assert tasks[1].dev[""].line == dev.line and tasks[1].digest == tasks[0].digest
    assert tasks[2].dev[""].line != dev.line and tasks[2].digest != tasks[0].digest
    assert tasks[0].data["split"] == {"dev_share": 0.2, "split_seed": 0, "dev_lines": dev.line}


def test_a_development_file_and_the_splits_of_a_saved_dataset_are_used_as_they_are(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", ",")
    write_jsonl(tmp_path / "b.jsonl")
    assert open_custom(tmp_path / "a.csv", dev=tmp_path / "b.jsonl").dev[""].a == TEXTS
    for split in ("train", "validation", "test"):
        save_dataset(tmp_path / "saved" / split, arrow_table())
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')

    task = open_custom(tmp_path / "saved", with_test=True)

    assert task.train.a == task.dev[""].a == task.test_sets[0].texts.a == TEXTS
    assert task.data["split"] is None


def test_sentences_are_held_out_alike_of_those_with_and_without_entities(tmp_path: Path) -> None:
    blocks = [f"the O\nking{number} {'B-PER' if number % 4 == 0 else 'O'}" for number in range(80)]
    (tmp_path / "train.txt").write_text("\n\n".join(blocks) + "\n")

    tasks = [open_task(TaskRequest(name="ner", data=tmp_path, split_seed=seed)) for seed in (0, 0, 1)]

    task = tasks[0]
    assert isinstance(task, TaggingTask)
    assert [("B-PER" in sentence.tags) for sentence in task.dev].count(True) == 2
    assert len(task.dev) == 8 and not set(task.dev) & set(task.train) and len(task.train) == 72
    assert task.data["split"]["dev_sentences"] == [int(sentence.words[1][4:]) for sentence in task.dev]
    assert tasks[1].digest == task.digest != tasks[2].digest
    assert "no development file, so 8 of 80 sentences are held out" in task.notes[0]


BAD = {
    # name of the file -> (content, its error)
    "two.csv": ("title,summary,label\na b,c d,x\n", r"two\.csv: title and summary .* text; name .* with --text-a"),
    "none.csv": ("a,b\n1,2\n3,4\n", r"none\.csv: no column is clearly the label; name one of a, b with --label"),
    "width.csv": ("text,label\na b,x\nc, d,x\n", r"width\.csv:3: 3 columns where the header has 2, separated by `,`"),
    "quote.csv": ('text,label\n"a b,x\n', r"quote\.csv:2: not a line of a \.csv file"),
    "broken.parquet": ("PAR1", r"broken\.parquet: not readable as a table of Arrow"),
    "one.csv": ("text,label\na b,x\nc d,x\n", r"every example has the label `x`"),
    "few.csv": ("text,label\na b,x\nc d,y\n", r"few\.csv: 2 examples are too few to hold out 10% of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match=message) as error:
        open_custom(tmp_path / name)

    assert "\n" not in str(error.value)


def test_missing_parts_of_a_saved_dataset_and_two_training_files_are_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved", arrow_table())
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"saved: no table; .* with its state\.json and all its \.arrow files"):
        open_custom(tmp_path / "saved")
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"train\.csv and train\.jsonl are all train files"):
        open_custom(tmp_path)
    with pytest.raises(UserError, match=r"no table for training; name a \.tsv, \.csv"):
        open_custom(tmp_path / "saved" / "nowhere")


def test_a_delimiter_that_is_given_counts_more_than_that_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b;text\n1,2;the dog\n")
    assert read_table(tmp_path / "x.csv", ";").columns == ["a,b", "text"]
    with pytest.raises(UserError, match="--delimiter ab: one character is needed"):
        read_table(tmp_path / "x.csv", "ab")


@pytest.mark.real_start
def test_wrong_data_are_found_before_torch_and_transformers_are_imported(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3,4\n")
    script = (
        "import sys\nfrom electra_launcher.cli.main import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\nexcept Exception as error: print(error)\n"
        "print(sorted({'torch', 'transformers', 'sklearn', 'scipy'} & set(sys.modules)))\n"
    )
    for data, more in ((tmp_path / "x.csv", []), (tmp_path / "x.csv", ["--set", "lr=x"]), (tmp_path / "y", [])):
        arguments = ["finetune", "--model", "nowhere", "--data", str(data), *more]
        run = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
        error, modules = run.stdout.splitlines()
        assert error and modules == "[]", run.stdout

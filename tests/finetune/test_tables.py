"""Fine-tuning data as people have it: formats of tables, columns that are found, and examples that are held out."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
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
    assert "1 of 3 labels are too rare to be held out, so the score says nothing of them: once;" in tasks[0].notes[2]


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


def test_a_given_delimiter_is_that_of_the_test_table_too(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.csv").write_text("text^label\n" + "the dog, it saw^x\na bird^y\n" * 5)

    task = open_custom(tmp_path, delimiter="^", with_test=True)

    assert task.test_sets[0].texts.a == task.train.a == ["the dog, it saw", "a bird"] * 5


def test_empty_cells_keep_their_row_and_quotes_of_a_program_are_remarked_on(tmp_path: Path) -> None:
    texts = ['He said "no".', "", 'the "old" dog', "a bird"]
    frame = pandas.DataFrame({"text": texts, "label": ["x", "x", "y", "y"]})
    frame.to_csv(tmp_path / "x.csv", index=False)
    frame.to_csv(tmp_path / "x.tsv", index=False, sep="\t")

    assert open_custom(tmp_path / "x.csv", dev=tmp_path / "x.csv").train.a == texts
    literal = open_custom(tmp_path / "x.tsv", dev=tmp_path / "x.csv")
    assert literal.train.a[0] == '"He said ""no""."' and "some texts are in quotes" in literal.notes[1]
    as_csv = open_custom(tmp_path / "x.tsv", dev=tmp_path / "x.tsv", delimiter="\\t")
    assert as_csv.train.a == texts and not any("quotes" in note for note in as_csv.notes)
    assert sum("1 of 4 texts are empty (line 3)" in note for note in as_csv.notes) == len(as_csv.notes) - 1 == 2
    # Results are stored under the digest, so texts that are read otherwise have another one.
    without_delimiter = open_custom(tmp_path / "x.tsv", dev=tmp_path / "x.tsv")
    (tmp_path / "renamed.csv").write_bytes((tmp_path / "x.tsv").read_bytes())
    renamed = open_custom(tmp_path / "renamed.csv", dev=tmp_path / "renamed.csv")
    assert renamed.train.a == texts != without_delimiter.train.a
    assert without_delimiter.digest != as_csv.digest == renamed.digest
    of_bytes = hashlib.sha256((tmp_path / "x.csv").read_bytes()).hexdigest()
    assert read_table(tmp_path / "x.csv").sha256 == read_table(tmp_path / "x.csv", ",").sha256 == of_bytes
    (tmp_path / "y.csv").write_text("\n ,\ntext,label\na b,x\n,\nc d,y\n")
    with pytest.raises(UserError, match=r"y\.csv:5: the label is empty"):
        open_custom(tmp_path / "y.csv")
    (tmp_path / "z.csv").write_text("text,label\na b,\nc d,y\ne f,\ng h,\n")
    with pytest.raises(UserError, match=r"z\.csv:2: the label is empty in 3 rows \(line 2, 4, 5\); write"):
        open_custom(tmp_path / "z.csv")
    (tmp_path / "e.csv").write_text("text,label\na b,x\n ,y\nc d,x\n")
    assert any(
        "e.csv: 1 of 3 texts are empty (line 3), and are learnt" in note
        for note in open_custom(tmp_path / "e.csv", dev=tmp_path / "x.csv").notes
    )


def test_an_id_with_an_underscore_is_no_number(tmp_path: Path) -> None:
    lines = [f"a text {number},2019_{number},{number / 4}" for number in range(20)]
    (tmp_path / "x.csv").write_text("\n".join(["text,id,value", *lines]))

    task = open_custom(tmp_path / "x.csv", kind="regression")

    assert task.data["columns"]["label"] == "value"
    with pytest.raises(
        UserError, match=r"x\.csv:2: `2019_0` 1, .* and 10 more labels: labels that are no finite numbers"
    ):
        open_custom(tmp_path / "x.csv", kind="regression", label="id")


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
    "empty.csv": ("", r"empty\.csv: is empty; its first line must name the columns"),
    "head.csv": ("text,label\n", r"head\.csv: no examples; add at least one line with all columns \(text, label\)"),
    "head.tsv": ("text\tlabel", r"head\.tsv: no examples"),
    "wrong.tsv": ("text,label\na b,x\n", r"wrong\.tsv: only one column, `text,label`, .* pass it as --delimiter"),
    "example.csv": ("a b,x\nc d,y\ne f,x\ng h,y\ni j,x\n", r"example\.csv: the first line seems .* example, `x`"),
    "twice.csv": ("text,label,text\na b,x,c\n", r"twice\.csv: two columns have the name `text`; rename or remove one"),
    "labels.tsv": ("text\tlabel\tlabel\na b\tx\ty\n", r"labels\.tsv: two columns have the name `label`"),
    "alone.csv": ("text,label\na b,x\nc d,y\n", r"alone\.csv: .* another value .* --label, .*--kind regression"),
    "all.json": ('[{"text": "a b", "label": "x"}]', r"all\.json: no table, going by its name; convert"),
    "book.doc": ("PK", r"book\.doc: no table, going by its name; convert it .* or pass the --delimiter"),
    "book.xlsx": ("PK", r"book\.xlsx: a spreadsheet, which is not read; save it as CSV UTF-8 .* name the \.csv file"),
    "old.csv": ("text,label\ncaf\u00e9,x\n", r"old\.csv:2: not UTF-8 \(byte 14; .* 1 line\); .*iconv -f WIN"),
    "renamed.csv": ("PK\x03\x04\u00e9 \u00e9", r"renamed\.csv: a spreadsheet or a \.zip file, going by"),
    "joined.csv": ("text,label\na b,x\nc d,y\ntext,label\n", r"joined\.csv:4: the names of the columns stand"),
    "few.csv": ("text,label\na b,x\nc d,x\ne f,y\n", r"few\.csv: 3 examples are too few to hold out 10% of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_text(content, "cp1252")

    with pytest.raises(UserError, match=message) as error:
        open_custom(tmp_path / name)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_file_of_two_encodings_is_not_to_be_converted_as_a_whole(tmp_path: Path, line_end: bytes) -> None:
    lines = [b"text,label", *["caf\u00e9 \u4e2d,x".encode(), "na\u00efve b,y".encode("cp1252")] * 6]
    (tmp_path / "mixed.csv").write_bytes(line_end.join(lines))

    with pytest.raises(UserError, match=r"mixed\.csv:3: not UTF-8 .* in all 6 lines") as error:
        open_custom(tmp_path / "mixed.csv")

    assert "write line 3, 5, 7, 9, 11, ... again as UTF-8" in str(error.value)
    assert "iconv" not in str(error.value)


def test_the_name_of_a_missing_table_is_compared_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("text,label\na b,x\n")
    for read in (open_custom, read_table):
        with pytest.raises(UserError, match=r"ticket\.csv: no such file.* \(did you mean tickets\.csv\?\); name"):
            read(tmp_path / "ticket.csv")
    with pytest.raises(UserError, match=r"no such file or folder; name"):
        open_custom(tmp_path / "reviews.csv")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["x.csv", "X.CSV", "x.TSV", "Daten \u00fc\u4e2d/x y.Jsonl", "x.JSONL"])
def test_other_encodings_and_spellings_of_a_name_change_nothing(tmp_path: Path, name: str, encoding: str) -> None:
    kind = name.lower().rpartition(".")[2]
    rows = [("caf\u00e9 \u4e2d one", "a"), ("the dog", "b")] * 10
    lines = {
        "csv": ["text,label", *(",".join(row) for row in rows)],
        "tsv": ["text\tlabel", *("\t".join(row) for row in rows)],
        "jsonl": [json.dumps(dict(zip(("text", "label"), row))) for row in rows],
    }[kind]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    file.write_bytes((mark + "\r\n".join(lines)).encode(encoding))

    task = open_custom(file, dev=file)

    assert list(zip(task.train.a, task.train.label)) == list(zip(task.dev[""].a, task.dev[""].label)) == rows


def test_columns_of_one_name_in_arrow_files_and_one_column_for_two_uses_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a b"]), pa.array(["x"]), pa.array(["c d"])]
    pq.write_table(pa.Table.from_arrays(columns, ["text", "label", "text"]), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet: two columns have the name `text`"):
        open_custom(tmp_path / "x.parquet")
    write_csv(tmp_path / "x.csv", ",")
    for columns_of in ({"text_a": "stars"}, {"text_a": "review", "text_b": "review"}):
        with pytest.raises(UserError, match=r"x\.csv: .* are taken for texts and label, one column for two;"):
            open_custom(tmp_path / "x.csv", label="stars", **columns_of)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("cola", {"dev": Path("dev.csv")}),
        ("mnli", {"text_a": "text"}),
        ("rte", {"text_b": "text"}),
        ("cola", {"label": "label"}),
        ("cola", {"kind": "regression"}),
        ("cola", {"delimiter": ";"}),
        ("cola", {"dev_share": 0.2}),
        ("squad1", {"split_seed": 3}),
        ("squad2", {"dev": Path("dev.csv")}),
        ("ner", {"dev": Path("dev.csv")}),
    ],
)
def test_an_option_that_a_task_would_ignore_is_refused(tmp_path: Path, task: str, options: dict[str, Any]) -> None:
    option = f"--{next(iter(options)).replace('_', '-')}"
    with pytest.raises(UserError, match=f"^{option}: the task {task} has files of its own .* leave {option} out"):
        open_task(TaskRequest(name=task, data=tmp_path, **options))


def test_missing_parts_of_a_saved_dataset_and_two_training_files_are_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved", arrow_table())
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"saved: no table; .* with its state\.json and all its \.arrow files"):
        open_custom(tmp_path / "saved")
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"train\.csv and train\.jsonl are all train files"):
        open_custom(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: no such file or folder; name a \.tsv, \.csv"):
        open_custom(tmp_path / "saved" / "nowhere")
    (tmp_path / "without").mkdir()
    with pytest.raises(UserError, match=r"no table for training; name a \.tsv, \.csv"):
        open_custom(tmp_path / "without")
    for name in ("tickets.csv", "dev.csv", "notes.txt"):
        (tmp_path / "without" / name).write_text("")
    with pytest.raises(UserError, match=r"no table for training among dev\.csv, tickets\.csv; name a \.tsv"):
        open_custom(tmp_path / "without")


def test_a_delimiter_that_is_given_counts_more_than_that_of_the_header(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b;text\n1,2;the dog\n")
    assert read_table(tmp_path / "x.csv", ";").columns == ["a,b", "text"]
    (tmp_path / "x.txt").write_text("text\tlabel\nthe dog\ta\n")
    assert read_table(tmp_path / "x.txt", r"\t").columns == ["text", "label"]
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

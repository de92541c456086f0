"""Odd files of fine-tuning data: what is read equals an independent reading, everything else is refused in one line.

The independent readings are pyarrow's JSON reader, which the library datasets uses, Python's csv and json modules, and
the rules of CoNLL-2003 and CoNLL-U, written out below.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pyarrow.json
import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.sentences.pair_files import SentencePair, read_pair_files
from electra_dist.finetune.texts.text_specs import TextSpec
from electra_dist.finetune.texts.text_task import TextTask

CUSTOM = TextSpec(name="custom", text_a="text", text_b=None, label="kind")
END = '{"text": "end", "kind": "b"}\n'  # a second class, which every classification needs

JSONL = {  # name -> (content, what the refusal says, or None)
    "plain": ('{"text": "one", "kind": "a"}\n' + END, None),
    "key order, nested keys, no line end": ('{"kind": "a", "more": {"x": [1]}, "text": "one"}\n' + END.rstrip(), None),
    "integers": ('{"text": "one", "kind": 0}\n{"text": "two", "kind": -9007199254740993}\n', None),
    "fractions": ('{"text": "one", "kind": 0.5}\n{"text": "two", "kind": 1.5}\n', None),
    "whole pair": ('{"text": "an emoji \\ud83d\\ude00", "kind": "\\ud83d\\ude00"}\n' + END, None),
    "Unicode spaces": ('{"text": "a\u00a0b\u2028c\u0085d\u3000e", "kind": "a"}\n' + END, None),
    "escapes": ('{"text": "a\\tb\\nc\\r\\u0000\\u2028", "kind": "a"}\n' + END, None),
    "byte order mark": ('\ufeff{"text": "one", "kind": "a"}\n' + END, None),
    "Windows line ends, empty lines": ('\r\n{"text": "one", "kind": "a"}\r\n\r\n' + END, None),
    "empty text": ('{"text": "", "kind": "a"}\n' + END, None),
    "words that mean null elsewhere": ('{"text": "null", "kind": "NA"}\n{"text": "None", "kind": "null"}\n', None),
    "null text": (END + '{"text": null, "kind": "a"}\n', r"train\.jsonl:2: the value of `text` is no text, but null"),
    "null label": (END + '{"text": "one", "kind": null}\n', r":2: the value of `kind` is neither text nor a number"),
    "list": (END + '{"text": ["one"], "kind": "a"}\n', r':2: the value of `text` is no text, but \["one"\]'),
    "object": (END + '{"text": {"en": "one"}, "kind": "a"}\n', r":2: the value of `text` is no text"),
    "number as text": (END + '{"text": 3, "kind": "a"}\n', r":2: the value of `text` is no text, but 3"),
    "boolean text": (END + '{"text": true, "kind": "a"}\n', r":2: the value of `text` is no text, but true"),
    "boolean label": ('{"text": "one", "kind": false}\n' + END, r":1: the value of `kind` .* but false"),
    "list as label": ('{"text": "one", "kind": [1]}\n' + END, r":1: the value of `kind` .* but \[1\]"),
    "NaN": ('{"text": "one", "kind": NaN}\n' + END, r":1: the value of `kind` .* but NaN"),
    "1 and 1.0": ('{"text": "one", "kind": 1}\n{"text": "two", "kind": 1.0}\n' + END, r":2: the label `1\.0` is"),
    "0 and -0.0": ('{"text": "one", "kind": -0.0}\n{"text": "two", "kind": 0}\n', r"the same number as the label"),
    "empty label": ('{"text": "one", "kind": ""}\n' + END, r":1: the label is empty"),
    "two lines": ('{"text": "one", "kind": "a\\nb"}\n' + END, r":1: the label has a tab or a line end in it"),
    "half a pair": ('{"text": "half an emoji \\ud83d here", "kind": "a"}\n' + END, r":1: .* half of a surrogate pair"),
    "half a pair in a label": ('{"text": "one", "kind": "\\ude00"}\n' + END, r":1: .* surrogate pair, \\ude00"),
    "large integer": ('{"text": "one", "kind": 123456789012345678901234}\n' + END, r":1: not a JSON object .*24"),
    "cut off": (END + '{"text": "one", "ki', r":2: not a JSON object"),
    "array of all": ('[{"text": "one", "kind": "a"}]\n', r":1: not a JSON object"),
}  # fmt: skip
TSV = {
    "quotes": ('text\tkind\nHe said "no.\ta\n"quoted"\tb\n', None),
    "Unicode spaces": ("kind\ttext\na\tx\u00a0y\u2028z\u0085\x0b\x0c\x1cw\nb\t\u00a0\u3000\n", None),
    "old line ends": ("text\tkind\rone\ta\rtwo\tb\r", None),
    "Windows line ends": ("\ufefftext\tkind\r\none\ta\r\ntwo\tb\r\n", None),
    "more columns": ("id\ttext\tkind\tmore\n1\tone\ta\t\n2\ttwo\tb\tx\n", None),
    "words that mean null elsewhere": ("text\tkind\nNA\tNA\nnull\tNone\n", None),
    "codes that are no numbers": ("text\tkind\none\t1_1\ntwo\t11\n", None),
    "tab in a text": ("text\tkind\none\ta\ntwo\tthree\tb\n", r"train\.tsv:3: 3 columns where the header has 2"),
    "1 and 1.0": ("text\tkind\none\t1\ntwo\t0\nsix\t1.0\n", r"train\.tsv:4: the label `1\.0` is the same number"),
    "empty label": ("text\tkind\none\t\ntwo\tb\n", r"train\.tsv:2: the label is empty"),
}


def refusal(error: pytest.ExceptionInfo[UserError], message: str) -> None:
    """Check that an error is one line with the message."""
    assert re.search(message, str(error.value)), error.value
    assert "\n" not in str(error.value)


def check_texts(folder: Path, name: str, content: str, message: str | None, expected: list[tuple[str, str]]) -> None:
    """Check the examples of a custom task whose training file has the content, or its refusal."""
    (folder / name).write_bytes(content.encode())
    (folder / "dev.jsonl").write_text(json.dumps({"text": "end", "kind": expected[0][1] if expected else "b"}))
    if message is not None:
        with pytest.raises(UserError) as error:
            TextTask(CUSTOM, folder)
        refusal(error, message)
        return
    task = TextTask(CUSTOM, folder)
    assert list(zip(task.train.a, task.train.label, strict=True)) == expected
    assert task.labels == tuple(sorted({label for _, label in expected}))


@pytest.mark.parametrize("name", JSONL)
def test_json_lines_are_read_as_pyarrow_reads_them_or_refused(tmp_path: Path, name: str) -> None:
    content, message = JSONL[name]
    expected = []
    if message is None:
        table = pyarrow.json.read_json(io.BytesIO(content.removeprefix("\ufeff").encode())).to_pydict()
        expected = [(text, str(label)) for text, label in zip(table["text"], table["kind"], strict=True)]
    check_texts(tmp_path, "train.jsonl", content, message, expected)


@pytest.mark.parametrize("name", TSV)
def test_tables_are_read_as_the_csv_module_reads_them_or_refused(tmp_path: Path, name: str) -> None:
    content, message = TSV[name]
    lines = io.StringIO(content.removeprefix("\ufeff"), newline=None)
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    expected = [] if message is not None else [(row["text"], row["kind"]) for row in rows]
    check_texts(tmp_path, "train.tsv", content, message, expected)


PAIRS = {
    "half a pair": ('"half \\ud83d"', '"b"', "{}", r"p\.jsonl:1: the value of `sentence_good` .* surrogate pair"),
    "half a pair in the kind": ('"a"', '"b"', '{"UID": "\\ud83d"}', r"p\.jsonl:1: .* `UID` .* surrogate pair"),
    "number": ('"a"', "3", "{}", r"p\.jsonl:1: the value of `sentence_bad` is no text, but 3"),
    "list as kind": ('"a"', '"b"', '{"UID": ["x"]}', r"p\.jsonl:1: the value of `UID` is neither text nor a number"),
    "boolean as kind": ('"a"', '"b"', '{"UID": false}', r"p\.jsonl:1: the value of `UID` .* but false"),
    "null": ("null", '"b"', "{}", r"p\.jsonl:1: no sentence in `sentence_good`"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_minimal_pairs_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    good, bad, more, message = PAIRS[name]
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"sentence_good": {good}, "sentence_bad": {bad}, {more[1:]}'.replace(", }", "}"))
    with pytest.raises(UserError) as error:
        read_pair_files([file])
    refusal(error, message)


def test_minimal_pairs_have_the_kind_that_they_name_and_no_carriage_return(tmp_path: Path) -> None:
    pair = {"sentence_good": "a\u00a0b", "sentence_bad": "\U0001f600"}
    records = [{**pair, "UID": None, "linguistics_term": "term"}, {**pair, "UID": 7}, {**pair, "UID": ""}]
    (tmp_path / "p.jsonl").write_text("\r\n".join(map(json.dumps, records)))
    (tmp_path / "z.txt").write_bytes(b"bad one\r\ngood one\r\n")

    pairs = read_pair_files([tmp_path]).pairs

    assert pairs[:3] == [SentencePair(kind, "a\u00a0b", "\U0001f600") for kind in ("term", "7", "p")]
    assert pairs[3:] == [SentencePair("z", "good one", "bad one")]

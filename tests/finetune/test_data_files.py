"""Odd files of fine-tuning data: what is read equals an independent reading, everything else is refused in one line.

The independent readings are pandas, pyarrow's JSON reader, which the library datasets uses, Python's csv module, and
the rules of CoNLL-2003 and CoNLL-U, written out below.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pandas
import pyarrow.json
import pytest

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.passage_windows import read_squad
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.word_files import TaggedSentence, read_tagged_file
from electra_dist.scoring.pair_files import SentencePair, read_pair_files

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
COLUMNS = {
    "names of the columns": ("Token\tNER_tag\nJohn\tB-PER\n\nhere\tO\n", "names the columns and is no word"),
    "a word that is called like a column": ("token\tNN\nhere\tlabel\n\nNN\tlabel\n", None),
    "a tag that is called like a column": ("word\tTAG\nhere\tTAG\n", None),
    "CoNLL-2003": ("-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n", None),
    "spaces at the ends, several between": ("EU  B-ORG \n rejects   O\n\n \nPeter B-PER", None),
    "Unicode spaces in words": ("Anna\u00a0Maria B-PER\na\u3000b\u2028c O\nx\x0b\x0c\x1c\x85y O\n\u00a0 O\n", None),
    "Unicode spaces in words, tabs": ("Anna\u00a0Maria\tB-PER\n\u2009x\u2009\tO\nNew York\tB-LOC\n", None),
    "old line ends": ("EU B-ORG\rrejects O\r\rPeter B-PER\r", None),
    "Windows line ends": ("\ufeffEU\tB-ORG\r\nrejects\tO\r\n\r\nPeter\tB-PER\r\n", None),
    "comments": ("# id 1\nEU B-ORG\nrejects O\n\n# text = Vitamin O\nPeter B-PER\n\n# end of file\n", None),
    "comments, tabs": ("# id 1\tdomain=en\tx\nEU\tB-ORG\nrejects\tO\n\n# text = a\nPeter\tB-PER\n", None),
    "the word #": ("# O\n5 O\n# O\n\n#nice O\n#Apple B-ORG\n", None),
    "the word #, four columns": ("# # I-NP O\n5 CD I-NP O\nEU NNP I-NP B-ORG\n", None),
    "comment as wide as words": ("# 1\nEU B-ORG\n", r"train\.txt:1: `# 1` may be a comment"),
    "a sentence and its tags": ("EU rejects\tB-ORG O\nPeter\tB-PER\n", r"train\.txt:1: the tag `B-ORG O` has a space"),
    "tags after the words": ("EU rejects B-ORG O\nPeter B-PER\n", r"train\.txt:2: 2 columns, but line 1 has 4"),
    "words and tags with slashes": ("The/DT cat/NN sat/VB\nA/DT dog/NN\n", r":2: 2 columns, but line 1 has 3"),
    "line of words, line of tags": ("EU rejects it\nB-ORG O O\n\nIt rains\nO O\n", r":4: 2 columns, but line 1 has 3"),
    "word with a space": ("EU B-ORG\nNew York B-LOC\n", r"train\.txt:2: 3 columns, but line 1 has 2"),
    "no-break space as separator": ("EU B-ORG\nrejects\u00a0O\n", r"train\.txt:2: `rejects\u00a0O` has no tag"),
    "no-break space after a tag": ("EU\tB-ORG\nrejects\tO\u00a0\n", r"train\.txt:2: the tag `O\u00a0` has a space"),
    "no word": ("EU\tB-ORG\n\tX\tO\n", r"train\.txt:2: `\tX\tO` has no word"),
    "no tag": ("EU\tNNP\tB-ORG\nrejects\tVBZ\t\n", r"train\.txt:2: .* has no tag"),
    "numbered words": ("1\tEU\tB-ORG\n2\trejects\tO\n\n1\tPeter\tB-PER\n", r"column has numbers in place of words"),
    "CoNLL-U of another name": ("1-2\tam\t_\n1\ta\tDET\n2\tm\tX\n", r"name the file train\.conllu if"),
    "document first": ("doc1 0 EU B-ORG\ndoc1 1 it O\n", r"every word is `doc1`; put the words into the first column"),
    "without its words": ("a O\nb O\n\n_ B-ORG\n_ O\n", r"train\.txt:4: all 2 words are underscores"),
}  # fmt: skip
CONLLU = {
    "spaces in words": ("1\tAnna\u00a0Maria\t_\tPROPN\t_\t_\t0\t_\t_\t_\n2\ta b\t_\tX\t_\t_\t1\t_\t_\t_\n", None),
    "multiword token, empty node, comments": (
        "# text = am _\n1-2\tam\t_\t_\t_\t_\t_\t_\t_\t_\n1\ta\t_\tX\t_\t_\t0\t_\t_\t_\n"
        "1.1\t_\t_\t_\t_\t_\t_\t_\t_\t_\n2\t_\t_\tPUNCT\t_\t_\t1\t_\t_\t_\n\n# end\n",
        None,
    ),
    "Windows line ends": ("\ufeff1\t#\t_\tSYM\t_\t_\t0\t_\t_\t_\r\n\r\n1\t____\t_\tPUNCT\t_\t_\t0\t_\t_\t_\r\n", None),
    "without its words": (
        "1\t_\t_\tX\t_\t_\t0\t_\t_\t_\n2\t___\t_\tX\t_\t_\t1\t_\t_\t_\n",
        r"sentence at line 1: all 2 words are underscores",
    ),
    "no form": ("1\t\t_\tX\t_\t_\t0\t_\t_\t_\n", r"line 1: word 1 .* FORM and UPOS must not be empty"),
    "no tag": ("1\ta\t_\t\t_\t_\t0\t_\t_\t_\n", r"UPOS  and HEAD 0; IDs must count from 1, FORM and UPOS must not"),
}  # fmt: skip


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
def test_json_lines_are_read_as_pyarrow_and_pandas_read_them_or_refused(tmp_path: Path, name: str) -> None:
    content, message = JSONL[name]
    expected = []
    if message is None:
        encoded = content.removeprefix("\ufeff").encode()
        table = pyarrow.json.read_json(io.BytesIO(encoded)).to_pydict()
        expected = [(text, str(label)) for text, label in zip(table["text"], table["kind"], strict=True)]
        frame = pandas.read_json(io.BytesIO(encoded), lines=True, dtype=False, convert_dates=False)
        assert [(text, str(label)) for text, label in zip(frame["text"], frame["kind"], strict=True)] == expected
    check_texts(tmp_path, "train.jsonl", content, message, expected)


@pytest.mark.parametrize("name", TSV)
def test_tables_are_read_as_the_csv_module_and_pandas_read_them_or_refused(tmp_path: Path, name: str) -> None:
    content, message = TSV[name]
    lines = io.StringIO(content.removeprefix("\ufeff"), newline=None)
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    expected = []
    if message is None:
        expected = [(row["text"], row["kind"]) for row in rows]
        frame = pandas.read_csv(
            io.BytesIO(content.encode()), sep="\t", quoting=csv.QUOTE_NONE, dtype=str, keep_default_na=False
        )
        assert list(zip(frame["text"], frame["kind"], strict=True)) == expected
    check_texts(tmp_path, "train.tsv", content, message, expected)


def column_sentences(text: str) -> list[TaggedSentence]:
    """Read words and tags as the script of CoNLL-2003 in the library datasets does, which splits at the separator."""
    sentences: list[list[tuple[str, str]]] = [[]]
    has_comments = text.count("# ") > 0 and "= " in text
    for line in io.StringIO(text.removeprefix("\ufeff"), newline=None):
        line = line.strip("\n ")
        if not line or line.startswith("-DOCSTART-"):
            sentences.append([])
        elif not (has_comments and line.startswith("# ")):
            cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
            sentences[-1].append((cells[0], cells[-1]))
    return [TaggedSentence(*map(tuple, zip(*sentence, strict=True))) for sentence in sentences if sentence]


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_read_as_the_script_of_conll_2003_reads_them_or_refused(tmp_path: Path, name: str) -> None:
    content, message = COLUMNS[name]
    file = tmp_path / "train.txt"
    file.write_bytes(content.encode())
    if message is None:
        assert read_tagged_file(file) == column_sentences(content)
        return
    with pytest.raises(UserError) as error:
        read_tagged_file(file)
    refusal(error, message)


@pytest.mark.parametrize("name", CONLLU)
def test_treebanks_have_the_words_whose_id_is_an_integer_or_are_refused(tmp_path: Path, name: str) -> None:
    content, message = CONLLU[name]
    file = tmp_path / "train.conllu"
    file.write_bytes(content.encode())
    if message is not None:
        with pytest.raises(UserError) as error:
            read_tagged_file(file)
        refusal(error, message)
        return
    expected = []
    for block in re.split("\n\n", content.removeprefix("\ufeff").replace("\r\n", "\n")):
        words = [line.split("\t") for line in block.split("\n") if re.match(r"\d+\t", line)]
        if words:
            expected.append(TaggedSentence(tuple(word[1] for word in words), tuple(word[3] for word in words)))
    assert read_tagged_file(file) == expected


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


CONTEXT = "The old house is near the river."  # "the river" is at 22 to 31, "The" at 0
RIVER = {"text": "the river", "answer_start": 22}
QUESTIONS: dict[str, tuple[dict, int | None, int | None]] = {
    # name -> (fields other than id and question, start of the answer in version 1 and in version 2); -1: without an
    # answer (version 2) or not in the passage; None: left out
    "plain": ({"answers": [RIVER], "is_impossible": False}, 22, 22),
    "negative start": ({"answers": [{**RIVER, "answer_start": -1}]}, 22, 22),
    "start after the end": ({"answers": [{**RIVER, "answer_start": 10**6}]}, 22, 22),
    "start as text": ({"answers": [{**RIVER, "answer_start": "22"}]}, 22, 22),
    "start as a fraction": ({"answers": [{**RIVER, "answer_start": 22.0}]}, 22, 22),
    "no is_impossible": ({"answers": [RIVER]}, 22, 22),
    "null is_impossible": ({"answers": [RIVER], "is_impossible": None}, 22, 22),
    "no answers": ({"answers": []}, None, -1),
    "null answers": ({"answers": None, "is_impossible": True}, None, -1),
    "answers missing": ({}, None, -1),
    "impossible with plausible answer": ({"answers": [RIVER], "is_impossible": True}, 22, -1),
    "empty answer": ({"answers": [{"text": " ", "answer_start": 3}]}, None, -1),
    "empty answer before another": ({"answers": [{"text": "", "answer_start": 0}, RIVER]}, 22, 22),
    "elsewhere": ({"answers": [{"text": "the sea", "answer_start": -1}]}, -1, -1),
    "null answer": ({"answers": [{**RIVER, "text": None}]}, None, None),
    "half a pair": ({"answers": [{**RIVER, "text": "\ud83d"}]}, None, None),
    "answer as text": ({"answers": ["the river"]}, None, None),
    "answers as object": ({"answers": {"text": ["the river"], "answer_start": [22]}}, None, None),
    "no start": ({"answers": [{"text": "the river", "answer_start": None}]}, None, None),
    "is_impossible of another type": ({"answers": [RIVER], "is_impossible": "maybe"}, None, None),
    "null question": ({"answers": [RIVER], "question": None}, None, None),
    "half a pair in the question": ({"answers": [RIVER], "question": "\ude00?"}, None, None),
    "list as id": ({"answers": [RIVER], "id": [1]}, None, None),
    "boolean as id": ({"answers": [RIVER], "id": True}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_each_question_of_a_file_like_squad_is_used_or_left_out_and_counted(tmp_path: Path, version: int) -> None:
    """The ids are integers; two more questions are no object, and of a passage that is no text."""
    entries: list[object] = []
    expected = []
    for number, (fields, *starts) in enumerate(QUESTIONS.values()):
        entries.append({"id": number, "question": "where?", **fields})
        if starts[version - 1] is not None:
            expected.append((str(number), starts[version - 1]))
    paragraphs = [{"context": CONTEXT, "qas": [*entries, "where?"]}]
    paragraphs += [{"context": context, "qas": entries[:1]} for context in (None, "half \ud83d")]
    label = {1: "v1.1", 2: "v2.0"}[version]
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}-{label}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))

    file = read_squad(tmp_path / f"train-{label}.json", version)
    task = SquadTask(version, tmp_path)

    assert [(question.id, question.start) for question in file.questions] == expected
    assert {question.text for question in file.questions} == {"where?"}
    assert sum(map(len, file.left_out.values())) == len(entries) + 3 - len(expected)
    assert file.left_out["their passage is no text"] == [len(entries) + 2, len(entries) + 3]
    assert sum("because their passage is no text; first: question" in note for note in task.notes) == 2


def test_development_questions_with_an_id_of_another_are_left_out_and_training_questions_are_not(
    tmp_path: Path,
) -> None:
    entries = [{"id": number, "question": "where?", "answers": [RIVER]} for number in (7, "7", 8)]
    for stem in ("train", "dev"):
        text = json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": entries}]}]})
        (tmp_path / f"{stem}-v1.1.json").write_text(text)

    task = SquadTask(1, tmp_path)

    assert [question.id for question in task.train.questions] == ["7", "7", "8"]
    assert [question.id for question in task.dev.questions] == ["7", "8"]
    dev_file = tmp_path / "dev-v1.1.json"
    assert task.notes == [
        f"{dev_file}: 1 questions are left out, because they have the id of an earlier question; first: question 2"
    ]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], r"train-v1\.1\.json: no questions, 1 left out because they have no answer; replace it"),
        ([{"text": "sea", "answer_start": 0}], r"train-v1\.1\.json: no answer is in the passage of its question"),
    ],
)
def test_a_file_of_which_no_question_can_be_used_is_refused(tmp_path: Path, answers: list, message: str) -> None:
    entries = [{"id": 1, "question": "where?", "answers": answers}]
    for stem in ("train", "dev"):
        text = json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": entries}]}]})
        (tmp_path / f"{stem}-v1.1.json").write_text(text)
    with pytest.raises(UserError) as error:
        SquadTask(1, tmp_path)
    refusal(error, message)

"""`corpus find`: it names exactly the rows and steps whose batches contain a planted sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from electra_launcher.cli.main import corpus_app as app
from support.corpus_texts import make_prose, make_vocabulary
from support.run_records import STEP
from typer.testing import CliRunner

from electra_dist.config import CorpusConfig
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.errors import UserError
from electra_dist.run.records import encode
from electra_dist.tokenizer import WordPieceTokenizer

PLANTED = "quite a rare sentence with zebras"
MARKS = "!$%&*+;<=>?@"  # one for each document of the source wiki; no other document has such a token
SEED = 5
WINDOW = 2
GLOBAL_BATCH = 8
NUM_STEPS = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 300 documents, every 50th of which begins with the planted sentence.

    The twelve documents of the source `wiki` have an id and consist of a mark each.
    """
    folder = tmp_path_factory.mktemp("find")
    texts = make_prose(300, 3)
    lines = [f"{PLANTED}\n{text}" if number % 50 == 7 else text for number, text in enumerate(texts)]
    (folder / "in").mkdir()
    (folder / "in" / "web.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in lines))
    (folder / "in" / "wiki").mkdir()
    records = [{"id": f"page-{number}", "text": marked(mark)} for number, mark in enumerate(MARKS)]
    (folder / "in" / "wiki" / "pages.jsonl").write_text("\n".join(map(json.dumps, records)))
    request = BuildRequest(
        inputs=find_inputs([folder / "in"]),
        vocabulary=make_vocabulary(),
        output=str(folder / "corpus"),
        seq_len=64,
        seed=3,
        corpus=CorpusConfig(shard_size_mb=0.02),
    )
    build_corpus(request)
    return folder / "corpus"


def marked(mark: str) -> str:
    """Return a document of 20 lines in which one marker word is repeated."""
    return "\n".join([" ".join([mark] * 15)] * 20)


def rows_of(corpus: Path) -> list[np.ndarray]:
    """Return the rows of each shard."""
    manifest = json.loads((corpus / "corpus.json").read_text())
    shards = [Shard(corpus / entry["name"], 64, np.dtype(manifest["dtype"])) for entry in manifest["shards"]]
    return [shard.rows(np.arange(shard.num_rows)) for shard in shards]


def contains(row: np.ndarray, tokens: list[int]) -> bool:
    """Return whether a row contains the tokens one after another; special tokens are passed over."""
    special = make_vocabulary().special
    added = [str(special[token]) for token in ("[CLS]", "[SEP]", "[PAD]")]
    kept = [str(token) for token in row.tolist() if str(token) not in added]
    return f" {' '.join(map(str, tokens))} " in f" {' '.join(kept)} "


def find(*arguments: str) -> dict[str, Any]:
    """Return what `corpus find ... --json` prints."""
    result = CliRunner().invoke(app, ["find", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_rows_that_are_named_contain_the_sentence_and_no_other_row_does(corpus: Path) -> None:
    [tokens] = WordPieceTokenizer(make_vocabulary().ids, lowercase=True).encode([PLANTED])
    least = len(tokens)

    found = find(PLANTED, "--corpus", str(corpus), "--least", str(least))

    names = [entry["name"] for entry in json.loads((corpus / "corpus.json").read_text())["shards"]]
    expected = {
        (names[shard], row)
        for shard, rows in enumerate(rows_of(corpus))
        for row in range(len(rows))
        if contains(rows[row], tokens)
    }
    assert {(row["shard"], row["row"]) for row in found["rows"]} == expected
    assert len(expected) >= 4  # of six; a sentence may be divided between rows
    assert all(row["tokens"] == least == found["tokens"] for row in found["rows"])


def test_the_steps_that_are_named_read_the_sentence_and_no_other_step_does(corpus: Path, tmp_path: Path) -> None:
    """The independent truth is the batches of all steps. Step 3 is skipped, and the run has done 20 steps."""
    [tokens] = WordPieceTokenizer(make_vocabulary().ids, lowercase=True).encode([PLANTED])
    run = write_run(corpus, tmp_path / "run")

    found = find(PLANTED, "--run", str(run), "--least", str(len(tokens)))

    expected = steps_with(corpus, [tokens])
    uses = [use for row in found["rows"] for use in row["uses"]]
    assert {use["step"] for use in uses} == expected
    assert all(use["is_skipped"] == (use["step"] == 3) for use in uses)
    assert all(use["is_done"] == (use["step"] < 20) for use in uses)


def write_run(corpus: Path, run: Path) -> Path:
    """Write the folder of a run of 60 steps, of which step 3 is skipped and 20 are done; return its path."""
    run.mkdir()
    config = {
        "run_dir": str(run),
        "seed": SEED,
        "model": {
            "vocab_size": make_vocabulary().size,
            "max_positions": 64,
            "discriminator": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
            "generator": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
        },
        "data": {"corpus": str(corpus), "seq_len": 64, "shuffle_window_shards": WINDOW},
        "train": {"num_steps": NUM_STEPS, "global_batch": GLOBAL_BATCH, "micro_batch": 1, "skip_steps": [3]},
    }
    (run / "config.yaml").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_bytes(encode(STEP.model_copy(update={"step": 20})))
    return run


def steps_with(corpus: Path, texts: list[list[int]]) -> set[int]:
    """Read all batches; return the steps that have a row with the tokens of one of the texts."""
    rows = rows_of(corpus)
    order = RowOrder([CorpusOrder([len(shard) for shard in rows], SEED, WINDOW)])
    expected = set()
    for step in range(NUM_STEPS):
        _, shards, row_numbers = order.locate(np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        if any(contains(rows[shard][row], text) for shard, row in zip(shards, row_numbers) for text in texts):
            expected.add(step)
    return expected


def test_a_text_that_is_in_no_row_is_reported(corpus: Path) -> None:
    result = CliRunner().invoke(app, ["find", "zebras were never here before", "--corpus", str(corpus)])
    assert result.exit_code == 0
    assert "contains the text" in result.output


def rows_with(corpus: Path, texts: list[list[int]]) -> set[tuple[str, int]]:
    """Read all rows; return those that contain the tokens of one of the texts."""
    names = [entry["name"] for entry in json.loads((corpus / "corpus.json").read_text())["shards"]]
    return {
        (names[shard], row)
        for shard, rows in enumerate(rows_of(corpus))
        for row in range(len(rows))
        if any(contains(rows[row], text) for text in texts)
    }


@pytest.mark.parametrize(
    ("option", "number"),
    [
        (("--source", "wiki"), None),
        (("--document", "page-4"), 4),
        (("--document", "page-1"), 1),  # not page-10 and page-11
        (("--document", "wiki/pages.jsonl#7"), 7),
    ],
)
def test_the_rows_and_steps_of_a_source_or_a_document_are_exactly_those_with_its_marks(
    corpus: Path, tmp_path: Path, option: tuple[str, str], number: int | None
) -> None:
    """The expected rows and steps are found by marker words of these documents, in all rows and batches."""
    run = write_run(corpus, tmp_path / "run")
    marks = MARKS if number is None else MARKS[number]
    tokens = [[make_vocabulary().ids[mark]] for mark in marks]

    found = find(str(corpus), str(run), *option)

    rows = {(row["shard"], row["row"]) for row in found["rows"]}
    assert rows == rows_with(corpus, tokens)
    assert len(rows) >= 3
    steps = steps_with(corpus, tokens)
    assert {use["step"] for row in found["rows"] for use in row["uses"]} == steps
    assert found["steps"] == {
        "read": len({step for step in steps if step < 20} - {3}),
        "to_come": len({step for step in steps if step >= 20}),
        "skipped": len(steps & {3}),
    }
    if number is not None:
        documents = [document for row in found["rows"] for document in row["documents"]]
        assert {document["document"] for document in documents} == {f"page-{number}"}
        assert {document["place"] for document in documents} == {f"wiki/pages.jsonl#{number}"}


def test_a_row_with_a_text_is_shown_with_its_documents(corpus: Path) -> None:
    found = find(str(corpus), " ".join([MARKS[3]] * 10))

    assert found["rows"]
    for row in found["rows"]:
        assert "page-3" in [document["document"] for document in row["documents"]]


def run_find(*arguments: object) -> Any:
    """Run `corpus find` with text output; return the result of the command."""
    return CliRunner().invoke(app, ["find", *map(str, arguments)])


def test_a_run_folder_may_stand_for_its_corpus(corpus: Path, tmp_path: Path) -> None:
    run = write_run(corpus, tmp_path / "run")

    assert find(str(run), "--document", "page-4") == find(str(corpus), str(run), "--document", "page-4")
    result = run_find(run, "--document", "page-4")
    assert "of the 60 steps of the run" in result.stdout
    assert "pages.jsonl" not in result.stdout  # its id is shown
    assert "page-4" in result.stdout


def test_the_folder_of_a_corpus_or_run_is_no_text_to_find(corpus: Path, tmp_path: Path) -> None:
    run = write_run(corpus, tmp_path / "run")

    for words in ([corpus], [run], [corpus, run]):
        error = run_find(*words).exception
        assert isinstance(error, UserError)
        assert f"TEXT is missing: {words[-1]} is the folder of a corpus or a run; give CORPUS" in str(error)


def test_a_source_that_does_not_exist_is_answered_with_those_that_do(corpus: Path) -> None:
    result = run_find(corpus, "--source", "books")
    assert result.exit_code == 0
    assert "no row of" in result.stdout
    assert f"the sources are {corpus.parent}/in, {corpus.parent}/in/wiki" in result.stdout
    assert "no row of" in run_find(corpus, "--document", "page").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "a", "--document", "b"], "both are given; give one of them"),
        ([], "nothing to find; give CORPUS"),
        (["only a text"], "CORPUS is missing; give CORPUS"),
        (["s3://bucket/corpus"], "TEXT is missing after s3://bucket/corpus; give CORPUS"),
        (["corpus", "run", "some", "text"], "some: one argument too many"),
    ],
)
def test_arguments_that_make_no_search_are_refused(arguments: list[str], message: str) -> None:
    result = run_find(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_corpus_without_origin_files_is_searched_by_text_only(corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    (copy / "origins.json").unlink()

    result = run_find(copy, "--source", "wiki")

    assert isinstance(result.exception, UserError)
    assert "has no origin files" in str(result.exception)
    assert "corpus.origins=true" in str(result.exception)
    [row, *_] = find(str(copy), PLANTED)["rows"]
    assert row["documents"] is None


def test_a_source_of_a_later_phase_is_found_in_its_corpus_with_the_steps_of_the_phase(
    corpus: Path, tmp_path: Path
) -> None:
    """From step 40 on, the run reads another corpus, whose documents have marker words that the first one lacks."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "notes.txt").write_text("\n\n".join([" ".join(["#"] * 500)] * 30))
    request = BuildRequest(
        inputs=find_inputs([tmp_path / "late"]),
        vocabulary=make_vocabulary(),
        output=str(tmp_path / "second"),
        seq_len=64,
        seed=3,
        corpus=CorpusConfig(shard_size_mb=0.02),
    )
    manifest = build_corpus(request).manifest
    run = write_run(corpus, tmp_path / "run")
    config = json.loads((run / "config.yaml").read_text())
    config["data"]["phases"] = [{"corpus": request.output, "from_step": 40}]
    (run / "config.yaml").write_text(json.dumps(config))

    found = find(str(run), "--source", "late")

    assert len(found["rows"]) == manifest.num_rows
    assert all(row["shard"].startswith("phase-1/") for row in found["rows"])
    assert all(row["documents"][0]["place"].startswith("notes.txt#") for row in found["rows"])
    assert {use["step"] for row in found["rows"] for use in row["uses"]} == set(range(40, 60))
    early = find(str(run), "--source", "wiki")
    assert early["rows"]
    assert all(use["step"] < 40 for row in early["rows"] for use in row["uses"])
    result = run_find(corpus, run, "--source", "late")
    assert "leave CORPUS out to search all of them" in str(result.exception)


def test_all_texts_of_files_are_found_at_once_with_the_steps_that_read_them(corpus: Path, tmp_path: Path) -> None:
    """The independent truth is the rows and batches; one text is the beginning of a document."""
    folder = tmp_path / "tests"
    folder.mkdir()
    tokenizer = WordPieceTokenizer(make_vocabulary().ids, lowercase=True)
    starts = [" ".join(text.split()[:10]) for text in make_prose(300, 3)]
    line = next(start for start in starts if rows_with(corpus, tokenizer.encode([start])))
    other = " ".join(line.split()[:5])
    absent = "zebras were never seen in this place before today"
    (folder / "pairs.jsonl").write_text(json.dumps({"sentence_good": line, "sentence_bad": absent, "UID": "a_b"}))
    (folder / "test.tsv").write_text(f"index\tsentence\n0\t{PLANTED}\n1\t{other}\n2\t{line}\n")
    run = write_run(corpus, tmp_path / "run")

    found = find("--run", str(run), "--file", str(folder), "--min-words", "6", "--least", "100")

    tokens = tokenizer.encode([line, PLANTED])
    assert [(text["place"], text["text"]) for text in found["texts"]] == [
        (f"{folder}/pairs.jsonl:1", line),
        (f"{folder}/test.tsv:2", PLANTED),
    ]
    for text, of_text in zip(found["texts"], tokens, strict=True):
        assert {(row["shard"], row["row"]) for row in text["rows"]} == rows_with(corpus, [of_text])
        assert text["tokens"] == len(of_text) == min(row["tokens"] for row in text["rows"])
        assert {use["step"] for row in text["rows"] for use in row["uses"]} == steps_with(corpus, [of_text])
    assert (found["texts_sought"], found["texts_found"]) == (3, 2)
    assert found["texts_too_short"] == len({"a_b", "index", "sentence", "0", "1", "2", other})
    steps = steps_with(corpus, tokens)
    assert found["steps"]["read"] == len({step for step in steps if step < 20} - {3})
    shown = run_find(run, "--file", folder, "--min-words", "6", "--least", "100").stdout
    assert "2 of 3 texts are in the corpus" in shown and "the run has read" in shown
    (folder / "pairs.jsonl").rename(folder / "PAIRS.JSONL")
    (folder / "more.JSON").write_text(json.dumps({"invisible": "\u200b " * 10, "data": [line]}))
    again = find("--run", str(run), "--file", str(folder), "--min-words", "6", "--least", "100")
    assert [text["text"] for text in again["texts"]] == [line, PLANTED]
    # The invisible text has ten words, but no token.
    assert (again["texts_sought"], again["texts_too_short"]) == (3, found["texts_too_short"] + 1)

    (tmp_path / "half.json").write_text('["one two three four \\ud83d five six seven eight"]')
    (tmp_path / "invisible.json").write_text(json.dumps(["\u200b " * 10]))
    for message, options in {
        "half.json: the text .* has half of a surrogate pair": ("--file", tmp_path / "half.json"),
        "none of the 1 texts has a token": ("--file", tmp_path / "invisible.json"),
        "there is no file": ("--file", tmp_path / "absent"),
        "none of the 3 texts": ("--file", folder / "PAIRS.JSONL", "--min-words", "400"),
        "both are given": ("--file", folder, "--source", "wiki"),
    }.items():
        assert re.search(message, str(run_find(corpus, *options).exception))

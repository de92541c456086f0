"""Planted sentences of evaluation files: a preparation drops them, and `corpus find --file` names the same ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from made_sources import english, lines
from prepare_processes import finish, start_prepare
from support.corpus_texts import make_vocabulary
from typer.testing import CliRunner

from electra_dist.config import CorpusConfig
from electra_dist.config.load import load_section
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.errors import UserError

# None of the words is in the made sources, so no other text can have them.
SHORT = "No zebra jumped here"  # fewer words than an n-gram
LONG = "The old captain of a wooden vessel asked nine sailors whether anyone knew how deep that river was"
LABEL = "zebra jumped"  # fewer words than the least
ABSENT = "Nobody ever wrote this sentence into a document of the web"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test sets in two formats, and 20 documents, of which four have a text of a test set or a part of one."""
    folder = tmp_path_factory.mktemp("decontamination")
    for name in ("blimp", "glue", "in"):
        (folder / name).mkdir()
    pairs = [{"sentence_good": SHORT, "sentence_bad": ABSENT, "UID": LABEL}]
    (folder / "blimp" / "pairs.jsonl").write_bytes(b"\n".join(json.dumps(pair).encode() for pair in pairs))
    (folder / "glue" / "test.tsv").write_text(f"index\tsentence\n0\t{LONG}.\n1\t{ABSENT}\n")
    texts = [english(seed) for seed in range(20)]
    texts[3] += f" {SHORT.upper()}!"
    texts[7] = f"{LONG}. {texts[7]}"
    texts[9] += " " + " ".join(LONG.split()[2:15])  # thirteen words
    texts[12] += " " + " ".join(LONG.split()[2:14])  # twelve are too few
    texts[15] += f" {LABEL}."
    texts[16] += " Then the old captain of a wooden vessel, again."
    texts[18] += " He said: no zebra, jumped here."
    (folder / "in" / "web.jsonl").write_bytes(lines(texts))
    return folder


def config(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "output": str(folder / "out"),
        "work": str(folder / "work"),
        "sources": [{"name": "web", "path": str(folder / "in")}],
        "filters": {
            "decontamination": {"files": [str(folder / "blimp"), str(folder / "glue")], "min_words": 4, **settings}
        },
    }


def test_documents_with_planted_sentences_are_dropped_and_counted_by_file(folder: Path) -> None:
    done = finish(start_prepare(config(folder), folder))

    assert done.returncode == 0, done.stderr
    assert "documents with one of 3 evaluation texts are dropped; 5 shorter texts are not looked for" in done.stdout
    report = json.loads((folder / "out" / "prepare.json").read_text())
    assert report["dropped"] == {
        "decontamination": {"blimp/pairs.jsonl": {"web": 2}, "glue/test.tsv": {"web": 2}},
    }
    kept = [
        json.loads(line)["id"]
        for file in sorted((folder / "out" / "documents").iterdir())
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    assert kept == [f"web/web.jsonl#{number}" for number in range(20) if number not in (3, 7, 9, 18)]


def test_the_same_sentences_are_found_in_a_corpus_that_was_built_without_the_step(folder: Path) -> None:
    request = BuildRequest(
        inputs=find_inputs([folder / "in"]),
        vocabulary=make_vocabulary(),
        output=str(folder / "corpus"),
        seq_len=128,
        seed=1,
        corpus=CorpusConfig(),
    )
    build_corpus(request)
    words = ["corpus", "find", str(folder / "corpus"), "--file", str(folder / "blimp")]
    result = CliRunner().invoke(app, [*words, "--file", str(folder / "glue"), "--min-words", "4", "--json"])

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [text["text"] for text in found["texts"]] == [SHORT, f"{LONG}."]


def test_settings_that_find_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    from electra_dist.corpus.prepare.preparation import check

    for settings, message in (
        ({"files": [str(tmp_path / "absent.txt")]}, "filters.decontamination.files: there is no file"),
        ({"min_words": 19, "n_grams": 19}, "none of the 8 texts"),
        ({"n_grams": 3}, "set min_words to at most n_grams"),
    ):
        file = tmp_path / "prepare.yaml"
        file.write_text(json.dumps(config(folder, **settings)))
        with pytest.raises(UserError, match=message) as error:
            check(load_section(file, PrepareConfig))
        assert "\n" not in str(error.value)

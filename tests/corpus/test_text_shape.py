"""Text that is none is named with its figures, for each source and wherever it is read; text is not."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from support.real_runs import write_tiny_config
from typer.testing import CliRunner

from electra_dist.config.load import load_config
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.counts import remarks_on_texts
from electra_dist.data.corpora import open_corpora
from electra_dist.finetune.retrieval_task import RetrievalTask
from electra_dist.train.check_inputs import remarks_on_corpora

REPOSITORY = Path(__file__).resolve().parents[2]
RNG = random.Random(1)
ENGLISH = "The discriminator decides for every word whether it was replaced, and learns from each of them. " * 20
BASE64 = base64.encodebytes(RNG.randbytes(3000)).decode()
NO_TEXT = {
    "base64": (BASE64, r"words have 6\d characters on average, as in base64"),
    "base64 without line ends": (BASE64.replace("\n", ""), "words have 500 characters"),
    "hashes": ("\n".join(RNG.randbytes(20).hex() for _ in range(50)), r"words have 3\d characters"),
    "bytes in hexadecimal": (RNG.randbytes(500).hex(" "), "words have 2.0 characters on average, as in a dump"),
    "UTF-16 read as UTF-8": (ENGLISH.encode("utf-16-le").decode(), r"5\d.\d% of its characters are control"),
    "bytes read as Latin-1": (RNG.randbytes(3000).decode("latin-1"), r"2\d\.\d% of its characters are control"),
    "bytes read as UTF-8": (RNG.randbytes(3000).decode(errors="replace"), "% of its characters are control"),
    "a character on each line": ("\n".join(ENGLISH), "lines have 1.0 characters"),
    "a Chinese character on each line": ("\n".join("\u4e2d\u6587" * 600), "lines have 1.0 characters"),
    "spaces between letters": (" ".join(ENGLISH), "words have 1.0 characters"),
}
TEXT = {
    "English": ENGLISH,
    "German": "Die Rechtsschutzversicherungen verweigern den Donaudampfschiffern die Kostenerstattung. " * 20,
    "Chinese": "\u6211\u4eec\u5728\u8fd9\u91cc\u5b66\u4e60\u4e2d\u6587\u3002" * 100,
    "Thai": "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e44\u0e21\u0e48\u0e21\u0e35\u0e0a\u0e48\u0e2d\u0e07" * 100,
    "little text": "A\nB\nC\n",
    "words of a lexicon": "\n".join(ENGLISH.split()),
}


def in_documents(text: str) -> list[str]:
    """Return a text in documents of 500 characters, so that all of it is measured."""
    return [text[start : start + 500] for start in range(0, len(text), 500)]


@pytest.mark.parametrize("kind", NO_TEXT)
def test_text_that_is_none_is_named_with_its_figures(kind: str) -> None:
    text, reason = NO_TEXT[kind]
    (line,) = remarks_on_texts("in/a", in_documents(text))
    assert line.startswith("in/a looks like no text: ")
    assert re.search(reason, line), line
    assert line.endswith("; check it, and leave it out or decode it first")


@pytest.mark.parametrize("kind", TEXT)
def test_text_is_not_named(kind: str) -> None:
    assert remarks_on_texts("in/a", in_documents(TEXT[kind])) == []


def test_no_page_program_or_config_of_this_repository_is_named() -> None:
    files = [
        file for suffix in ("md", "py", "yaml", "toml") for file in sorted(REPOSITORY.glob(f"[a-z]*/**/*.{suffix}"))
    ]
    assert len(files) > 300
    named = {file.name: line for file in files for line in remarks_on_texts("", in_documents(file.read_text("utf-8")))}
    assert named == {}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a source of text and one of base64."""
    for source, text in {"good": ENGLISH, "bad": BASE64}.items():
        (tmp_path / "in" / source).mkdir(parents=True)
        (tmp_path / "in" / source / "a.txt").write_text(text)
    return tmp_path / "in"


def test_a_build_and_a_run_name_the_source_of_it(
    sources: Path, build_request: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    request = build_request(sources, max_unk_rate=1.0)
    build_corpus(request)
    shown = CliRunner().invoke(app, ["corpus", "info", request.output]).stdout
    (line,) = [line for line in shown.splitlines() if "looks like no text" in line]
    assert line.startswith(f"{sources}/bad looks like no text: its words have 7")
    settings: dict[str, Any] = {"data.seq_len": 64, "model.max_positions": 64, "data.heldout": None}
    config = load_config(write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", request.output, **settings))
    remarks = remarks_on_corpora(config, open_corpora(config.data), False)
    assert [remark for remark in remarks if "no text" in remark] == [f"{request.output}: {line}"]


def test_an_older_report_has_no_shape_and_is_not_judged(
    sources: Path, build_request: Callable[..., BuildRequest]
) -> None:
    request = build_request(sources, max_unk_rate=1.0)
    build_corpus(request)
    file = Path(request.output) / "build.json"
    tree = json.loads(file.read_text())
    for source in tree["sources"].values():
        assert source.pop("shape")["lines"] > 0
    file.write_text(json.dumps(tree))
    shown = CliRunner().invoke(app, ["corpus", "info", request.output])
    assert shown.exit_code == 0 and "looks like no text" not in shown.stdout


def test_a_build_without_held_out_documents_says_so(sources: Path, build_request: Callable[..., BuildRequest]) -> None:
    (sources / "good" / "b.txt").write_text("\n\n".join(f"{ENGLISH} {number}" for number in range(50)))
    for fraction, is_named in ((0.0, True), (0.5, False)):
        request = build_request(sources, output=f"corpus-{fraction}", max_unk_rate=1.0, heldout_fraction=fraction)
        build_corpus(request)
        shown = CliRunner().invoke(app, ["corpus", "info", request.output]).stdout
        assert ("no document is held out" in shown) == is_named, shown


def test_pairs_of_texts_are_judged_too(tmp_path: Path) -> None:
    rows = [f"what is number {number},{base64.b64encode(RNG.randbytes(60)).decode()}" for number in range(40)]
    (tmp_path / "pairs.csv").write_text("query,document\n" + "\n".join(rows))
    task = RetrievalTask(tmp_path / "pairs.csv", "query", "document")
    named = [note for note in task.notes if "looks like no text" in note]
    assert len(named) == 1 and "pairs.csv, second texts, looks like no text: its words have 80" in named[0]

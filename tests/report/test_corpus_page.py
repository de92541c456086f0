"""`corpus stats`: the numbers on the page agree with the rows, and the page loads no other file."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from electra_launcher.cli.main import corpus_app as app
from support.corpus_texts import make_prose, make_vocabulary
from typer.testing import CliRunner

from electra_dist.config import CorpusConfig
from electra_dist.corpus.build_report import find_preparations
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import search_inputs
from electra_dist.corpus.origins import open_origins
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import UserError
from electra_dist.report.corpus_page import NUM_BINS, RowFigures, bar_chart, read_row_figures
from electra_dist.store.open_store import open_store

SEQ_LEN = 64
SPECIAL = make_vocabulary().special


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of two prepared sources and a folder whose name needs escaping; some inputs are dropped."""
    folder = tmp_path_factory.mktemp("stats")
    prepared = folder / "prepared" / "documents"
    own = folder / "in" / "<i>own"
    prepared.mkdir(parents=True)
    own.mkdir(parents=True)
    counts = {"documents_in": 60, "documents_dropped": 20, "documents_out": 40}
    sources = {"web": {"license": "odc-by", **counts}, "wiki": {"license": "cc-by-sa-4.0", **counts}}
    dropped = {"minhash": {"near_duplicate": {"web": 20, "wiki": 13}}}
    report = {"format": 1, "sources": sources, "dropped": dropped}
    (folder / "prepared" / "prepare.json").write_text(json.dumps(report))
    lines = []
    for number, text in enumerate(make_prose(80, 1)):
        name = "web" if number % 4 else "wiki"
        lines.append(json.dumps({"text": text, "id": f"{name}/a#{number}", "metadata": {"source": name}}))
    (prepared / "00000.jsonl").write_text("\n".join(lines))
    (own / "b.txt").write_text("\n\n".join(make_prose(40, 2)))
    (own / "c.jsonl").write_text("not json\n")
    (own / "d.pdf").write_text("no text")
    given = [str(prepared), str(folder / "in")]
    files, skipped = search_inputs(given)
    request = BuildRequest(
        inputs=files,
        vocabulary=make_vocabulary(),
        output=str(folder / "corpus"),
        seq_len=SEQ_LEN,
        seed=3,
        corpus=CorpusConfig(shard_size_mb=0.04, licences={f"{folder}/in/<i>own": "cc0 & more"}),
        skipped_inputs=skipped,
        prepared=find_preparations(given, None),
    )
    build_corpus(request)
    return folder / "corpus"


@pytest.fixture(scope="module")
def text(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the HTML page that the command writes."""
    path = tmp_path_factory.mktemp("page") / "new" / "stats.html"
    result = CliRunner().invoke(app, ["stats", str(corpus), "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(path)
    return path.read_text(encoding="utf-8")


def all_rows(corpus: Path) -> np.ndarray:
    """Return the token ids of all rows of the corpus, [rows, seq_len]."""
    manifest = read_manifest(open_store(str(corpus)))
    shards = [Shard(corpus / entry.name, SEQ_LEN, manifest.numpy_dtype) for entry in manifest.shards]
    return np.concatenate([shard.rows(np.arange(shard.num_rows)) for shard in shards])


def figures_of(corpus: Path) -> RowFigures:
    """Return the counts for the page, computed from the rows of the corpus."""
    store = open_store(str(corpus))
    manifest = read_manifest(store)
    return read_row_figures(store, manifest, make_vocabulary(), open_origins(store, manifest))


def test_counts_are_those_of_all_rows_read_one_by_one(corpus: Path) -> None:
    figures = figures_of(corpus)

    padding: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    examples: Counter[int] = Counter()
    num_unk = 0
    for row in all_rows(corpus).tolist():
        ids = [token for token in row if token != SPECIAL["[PAD]"]]
        num_unk += ids.count(SPECIAL["[UNK]"])
        padding[(SEQ_LEN - len(ids)) * NUM_BINS // (SEQ_LEN + 1)] += 1
        starts = [place for place, token in enumerate(ids) if token == SPECIAL["[CLS]"]]
        examples[len(starts)] += 1
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            lengths[(end - start) * NUM_BINS // (SEQ_LEN + 1)] += 1
    assert figures.rows_by_padding.tolist() == [padding[number] for number in range(NUM_BINS)]
    assert figures.examples_by_length.tolist() == [lengths[number] for number in range(NUM_BINS)]
    assert figures.rows_by_examples == examples
    assert figures.unk_tokens == num_unk
    assert figures.tokens == read_manifest(open_store(str(corpus))).num_tokens


def test_tokens_by_source_add_up_to_all_tokens(corpus: Path) -> None:
    figures = figures_of(corpus)

    assert {name for _, name in figures.tokens_by_source} == {None, "web", "wiki"}
    assert sum(figures.tokens_by_source.values()) == figures.tokens
    prepared = str(corpus.parent / "prepared" / "documents")
    by_name = {name: tokens for (source, name), tokens in figures.tokens_by_source.items() if source == prepared}
    assert by_name["web"] > 2 * by_name["wiki"]  # three of four documents


def test_the_page_shows_sources_licences_drops_and_samples(corpus: Path, text: str) -> None:
    build = json.loads((corpus / "build.json").read_text())
    shown = html.unescape(re.sub(r"<[^>]*>", " ", text))
    for source in build["sources"].values():
        assert f"{source['tokens']:,}" in shown
    assert "cc0 & more" in shown
    assert "cc-by-sa-4.0, odc-by" in shown
    assert re.search(r"near_duplicate\s+33\s+20\s+13", shown)
    assert re.search(r"wiki\s+cc-by-sa-4.0\s+documents", shown)
    assert "a line that is not a JSON object" in shown
    assert ".pdf" in shown
    [first, *_] = figures_of(corpus).samples
    assert first.texts[0][:60] in shown
    assert first.documents[0].document in shown


def test_the_page_needs_no_other_file_and_escapes_names(text: str) -> None:
    assert "<i>own" not in text
    assert "&lt;i&gt;own" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|url\((?!#)|@import", text)
    assert text.count('<table class="bars">') == 4


def test_what_was_left_out_comes_in_the_order_of_the_steps_each_table_with_a_caption(text: str) -> None:
    titles = re.findall(r"<(?:h2|caption)>(.*?)</", text)
    assert titles[:8] == [
        "Dropped by the preparation",
        "Documents of each source",
        "Dropped documents by step, in the order of the steps",
        "Left out by the build",
        "Inputs that were not read",
        "Documents that were read and not used",
        "Files with most of these documents, at most ten for a reason",
        "Sources",
    ]


def test_figures_are_aligned_to_the_right_and_text_to_the_left(text: str) -> None:
    assert '<td data-name="reason">near_duplicate</td>' in text
    assert '<td class="figure" data-name="dropped">33</td>' in text
    assert re.search(r"<td>\.pdf</td><td class=\"figure\">1</td>", text)


def test_the_table_of_sources_has_the_files_of_each_and_says_what_a_source_is(text: str) -> None:
    assert re.search(r'<td class="figure" data-name="files">\d+</td>', text)
    assert "A source is an input as it was given, or a folder directly in it; its files are counted together." in text


def test_bars_have_their_numbers_and_become_logarithmic_where_one_hides_the_others() -> None:
    even = bar_chart("t", ["0", "1", "2", "3"], [0, 50, 100, 0])
    assert (even.bars, even.is_logarithmic) == ([("1", "50", 50.0), ("2", "100", 100.0)], False)

    steep = bar_chart("t", ["a", "b", "c"], [9, 99, 99_999])
    assert [number for _label, number, _length in steep.bars] == ["9", "99", "99,999"]
    assert [length for _label, _number, length in steep.bars] == [20.0, 40.0, 100.0]
    assert steep.is_logarithmic
    assert bar_chart("t", ["a"], [0]).bars == []


def test_a_corpus_without_report_and_origin_files_has_a_page_too(corpus: Path, tmp_path: Path) -> None:
    for path in corpus.iterdir():
        if path.is_file() and path.name not in ("build.json", "origins.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())

    result = CliRunner().invoke(app, ["stats", str(tmp_path), "--output", str(tmp_path / "stats.html")])

    assert result.exit_code == 0, result.output
    assert "The corpus has no build.json" in (tmp_path / "stats.html").read_text()


def test_a_folder_without_a_corpus_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stats", str(tmp_path), "--output", str(tmp_path / "stats.html")])

    assert isinstance(result.exception, UserError)
    assert "no finished corpus" in str(result.exception)
    assert not (tmp_path / "stats.html").exists()

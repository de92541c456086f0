"""One preparation of made sources in all formats: what was planted is gone, the rest is there, every count adds up."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from electra_dist.corpus.inputs.text_decoding import RawDocument, decode_counted
from electra_dist.corpus.prepare.filter_steps import OfflineLanguageFilter
from electra_dist.corpus.prepare.prepare_config import LanguageSection, SourceSection
from electra_dist.corpus.prepare.read_sources import _read_record

Run = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture
def documents(full_run: Run) -> list[dict[str, Any]]:
    folder, done = full_run
    assert done.returncode == 0, done.stderr
    files = sorted((folder / "out" / "documents").iterdir())
    return [json.loads(line) for file in files for line in gzip.open(file, "rt", encoding="utf-8")]


@pytest.fixture
def report(full_run: Run) -> dict[str, Any]:
    folder, done = full_run
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "prepare.json").read_text())


def test_every_good_document_is_kept_once_and_nothing_planted(documents: list[dict[str, Any]]):
    from made_sources import BAD_WORD, GOOD_SEEDS, english

    first_sentences = {english(seed).split(".")[0]: seed for seed in GOOD_SEEDS}
    kept = []
    for document in documents:
        text = document["text"]
        matches = {seed for sentence, seed in first_sentences.items() if sentence in text}
        assert len(matches) == 1, text[:200]
        kept += matches
        for planted in ("MENUENTRY", "FOOTERTEXT", "cookies", BAD_WORD, "{", "nicht", "@mail.invalid"):
            assert planted not in text
    assert sorted(kept) == sorted(GOOD_SEEDS)


def test_documents_carry_their_source_licence_and_address(documents: list[dict[str, Any]]):
    by_source = {document["metadata"]["source"]: document["metadata"] for document in documents}
    assert by_source["crawl"]["license"] == "CC-BY-4.0"
    assert by_source["lines"]["license"] == "unknown"
    from_wet = [document for document in documents if document["id"].startswith("crawl/b.wet.gz#")]
    assert len(from_wet) == 10
    assert all(document["metadata"]["url"].startswith("http://wet.example.com/") for document in from_wet)


def test_an_address_with_half_a_surrogate_pair_can_be_written() -> None:
    document = RawDocument(b'{"text": "a", "url": "http://x.example.com/\\ud83d"}', is_json=True)
    source = SourceSection(name="web", path="in")
    read = _read_record(document, decode_counted(document, source.text_field, "skip"), source)
    assert read.url == "http://x.example.com/\ufffd"


def test_addresses_of_people_are_replaced(documents: list[dict[str, Any]]):
    replaced = [document for document in documents if document["text"].startswith("Write to ")]
    assert len(replaced) == 1
    assert replaced[0]["text"].startswith("Write to email@example.com.")


def test_counts_are_those_of_what_was_planted(report: dict[str, Any]):
    from made_sources import DOCUMENTS_IN

    assert {name: counts["documents_in"] for name, counts in report["sources"].items()} == DOCUMENTS_IN
    dropped = {
        (step, source): sum(by_source.get(source, 0) for by_source in reasons.values())
        for step, reasons in report["dropped"].items()
        for source in DOCUMENTS_IN
    }
    assert {key: number for key, number in dropped.items() if number} == {
        ("read", "crawl"): 2,  # the picture and the 404
        ("read", "lines"): 2,  # white space, broken JSON
        ("read", "tables"): 1,  # null
        ("url", "crawl"): 1,
        ("extraction", "crawl"): 1,
        ("language", "crawl"): 1,
        ("language", "lines"): 1,
        ("gopher_repetition", "lines"): 1,
        ("gopher_quality", "lines"): 1,
        ("c4_quality", "lines"): 1,
        ("c4_bad_words", "lines"): 1,
        ("exact", "lines"): 1,
        ("exact", "tables"): 1,
        ("minhash", "lines"): 1,
    }


def test_counts_add_up_and_name_the_files(report: dict[str, Any], full_run: Run, documents: list[dict[str, Any]]):
    for counts in report["sources"].values():
        assert counts["documents_in"] == counts["documents_out"] + counts["documents_dropped"]
    assert report["documents_out"] == len(documents) == sum(file["documents"] for file in report["outputs"])
    assert report["documents_in"] == report["documents_out"] + report["documents_dropped"]
    for file in report["outputs"]:
        assert (full_run[0] / "out" / file["name"]).stat().st_size == file["size_bytes"]


def test_samples_of_each_step_are_documents_that_it_dropped(report: dict[str, Any], full_run: Run):
    for step, reasons in report["dropped"].items():
        if step == "read":
            continue  # these have no text
        lines = (full_run[0] / "out" / "samples" / f"{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert samples
        assert all(reasons[sample["reason"]][sample["source"]] > 0 for sample in samples)


def test_the_tables_on_the_console_name_each_step_and_the_next_command(full_run: Run, report: dict[str, Any]):
    text = full_run[1].stdout
    assert all(step in text for step in report["dropped"])
    assert f"electra-dist corpus build --input {full_run[0]}/out/documents" in text


def test_nothing_reached_for_the_network(full_run: Run):
    attempts = full_run[0] / "attempts"
    assert not attempts.exists(), attempts.read_text()


def test_corpus_build_reads_what_was_prepared(full_run: Run, report: dict[str, Any]):
    from electra_dist.corpus.inputs.find_inputs import find_inputs
    from electra_dist.corpus.inputs.text_decoding import decode
    from electra_dist.corpus.inputs.text_readers import DocumentStream

    stream = DocumentStream(find_inputs([full_run[0] / "out" / "documents"]))
    assert len([decode(document) for document in stream]) == report["documents_out"]


def test_the_reason_of_a_document_in_a_wanted_language_names_the_score(language_model: Path) -> None:
    from datatrove.data import Document
    from made_sources import english

    def reason(languages: tuple[str, ...], threshold: float) -> object:
        settings = LanguageSection(model=language_model, languages=languages, threshold=threshold)
        return OfflineLanguageFilter(settings, None).filter(Document(text=english(1), id="1"))

    assert reason(("en",), 0.5) is True
    assert reason(("en",), 1.0) == (False, "en, score below 1")
    (is_kept, other) = reason(("de",), 0.9)  # type: ignore[misc]
    assert not is_kept and other == "en"

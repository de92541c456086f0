"""Text with planted duplicates and boilerplate is prepared, built by four tasks, one of them killed, and merged."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drills.kill_matrix.durable_operations import Kill
from made_sources import BAD_WORD, GOOD_SEEDS, english
from support.killed_forks import operations_of, run_killed

from electra_dist.corpus.builder.build_corpus import Part, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.data.shard import Shard
from electra_dist.tokenizer import Vocabulary

NUM_PARTS = 4
Run = tuple[Path, subprocess.CompletedProcess[str]]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by its relative path, without unfinished writes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def letters_of(corpus: Path, vocabulary: Vocabulary, seq_len: int) -> str:
    """Return the text of all training and held-out rows, without spaces and special tokens."""
    tokens = vocabulary.text.splitlines()
    special = set(vocabulary.special.values())
    text = []
    for path in sorted(corpus.rglob("shard-*.tar")):
        shard = Shard(path, seq_len, np.dtype(np.uint16))
        ids = shard.rows(np.arange(shard.num_rows)).ravel()
        shard.close()
        text += [tokens[number].removeprefix("##") for number in ids.tolist() if number not in special]
    return "".join(text)


@pytest.mark.sample
def test_text_is_prepared_built_in_four_killed_parts_and_merged(
    full_run: Run, build_request: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    prepared = full_run[0] / "out"
    report = json.loads((prepared / "prepare.json").read_text())
    whole = build_request(prepared / "documents", "whole", heldout_fraction=0.1, shard_size_mb=0.02)
    build_corpus(whole)
    request = dataclasses.replace(whole, output=str(tmp_path / "parts"))

    build_part(request, Part(1, NUM_PARTS))
    rehearsal = dataclasses.replace(whole, output=str(tmp_path / "rehearsal"))
    build_part(rehearsal, Part(1, NUM_PARTS))
    operations = operations_of(lambda: build_part(rehearsal, Part(2, NUM_PARTS)), Path(rehearsal.output))
    (first_shard, *_) = [each for each in operations if each.kind == "rename" and "shard-" in each.file]
    run_killed(lambda: build_part(request, Part(2, NUM_PARTS)), Path(request.output), Kill(first_shard, "after"))
    for number in (2, 3, 4):
        build_part(request, Part(number, NUM_PARTS))
    merged = join_parts(request.output, None)

    assert contents(Path(request.output)) == contents(Path(whole.output))
    assert merged.report is not None
    assert merged.report.text.documents == report["documents_out"] == len(GOOD_SEEDS)
    assert merged.manifest.totals["documents_in"] == report["documents_out"]
    text = letters_of(Path(request.output), request.vocabulary, request.seq_len)
    for planted in ("menuentry", "footertext", "cookies", BAD_WORD, "mail.invalid", "strasse"):
        assert planted not in text
    for seed in GOOD_SEEDS:  # the end of an example may cut some sentences of a document
        sentences = [sentence.lower().replace(" ", "") for sentence in english(seed).split(".") if sentence.strip()]
        found = [text.count(sentence) for sentence in sentences]
        assert max(found) == 1 and sum(found) >= len(found) / 2, (seed, found)

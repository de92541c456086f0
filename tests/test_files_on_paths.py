"""How many of this project's files the longest ways of data lead through; `pytest -s` prints them.

A way is one call of the product's functions. Every file counts of which a function runs, in any thread. The numbers
below only fall: who adds a file to a way says here why.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import support.checkpoints as small
from support.corpus_texts import make_prose, make_vocabulary
from support.real_runs import write_corpus
from support.s3_fixtures import bucket
from support.s3_fixtures import moto as s3
from support.s3_server import S3Server
from support.trace_run import Function, function_of

from electra_dist.checkpoint.reader import load_newest
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CorpusConfig, DataConfig
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.data.corpora import open_corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.shard_cache import open_cache
from electra_dist.engine.process_group import init_distributed
from electra_dist.store.open_store import LocalStore

__all__ = ["bucket", "s3"]

MOST_FILES = {"text to shard": 28, "S3 to batch": 19, "save": 9, "restore": 9}


def files_of(way: str, work: Callable[[], object]) -> list[str]:
    """Return the files of this project of which a function runs while `work` does, sorted; print them."""
    found: dict[CodeType, Function | None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code not in found:
            found[frame.f_code] = function_of(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions = {function for function in found.values() if function is not None}
    files = sorted({file for file, _ in functions})
    print(f"\n{way}: {len(functions)} functions in {len(files)} files")
    print("".join(f"    {file}\n" for file in files), end="")
    return files


def test_text_becomes_shards(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in make_prose(200, 1)]
    (tmp_path / "in.jsonl").write_text("".join(lines))

    def build() -> None:
        request = BuildRequest(
            inputs=find_inputs([tmp_path / "in.jsonl"]),
            vocabulary=make_vocabulary(),
            output=str(tmp_path / "corpus"),
            seq_len=64,
            seed=1,
            corpus=CorpusConfig(shard_size_mb=0.04),
        )
        assert len(build_corpus(request).manifest.shards) > 1

    way = "text to shard"
    assert len(files_of(way, build)) <= MOST_FILES[way]


def test_rows_come_from_s3_to_a_batch(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    write_corpus(f"{bucket}/corpus", [20, 20], endpoint_url=s3.endpoint_url)
    data = DataConfig(corpus=f"{bucket}/corpus", endpoint_url=s3.endpoint_url, seq_len=32)

    def read() -> None:
        corpora = open_corpora(data)
        with closing(open_cache(corpora, data, tmp_path)) as cache:
            order = corpora.row_order(seed=1, window_shards=2, global_batch=8)
            with closing(RowLoader(cache, order, global_batch=8, rank=0, world_size=1, start_step=0)) as loader:
                assert len(loader.next().ids) == 8

    way = "S3 to batch"
    assert len(files_of(way, read)) <= MOST_FILES[way]


def test_a_state_is_saved_and_restored(tmp_path: Path) -> None:
    init_distributed()
    store = LocalStore(tmp_path)
    state = small.state_at(4, world_size=1)
    values = small.content(4)

    def save() -> None:
        with closing(CheckpointWriter([store], 0, small.KEEP_ALL)) as writer:
            writer.save(state, small.share(values, 0, 1))

    def restore() -> None:
        loaded = small.empty()
        found = load_newest([store], small.share(loaded, 0, 1), small.state_at(0, world_size=1))
        assert found.state is not None
        assert small.equal(loaded, values)

    for way, work in (("save", save), ("restore", restore)):
        assert len(files_of(way, work)) <= MOST_FILES[way]

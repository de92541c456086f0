"""A small vocabulary, random prose and build requests for the corpus tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpus_texts import prose, vocabulary
from support.s3_fixtures import bucket, s3

from electra_dist.config import CorpusConfig
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.text_readers import find_inputs
from electra_dist.tokenizer import Vocabulary

__all__ = ["bucket", "jsonl", "make_request", "prose", "s3", "vocab_file", "vocabulary"]


@pytest.fixture
def vocab_file(vocabulary: Vocabulary, tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text(vocabulary.text)
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """`jsonl(texts, name)` writes a JSON-lines file and returns its path."""

    def write(texts: list[str], name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def make_request(vocabulary: Vocabulary, tmp_path: Path) -> Callable[..., BuildRequest]:
    """`make_request(inputs, output_name, num_workers=..., packing=...)`; shards of about 40 kB, rows of 64."""

    def make(inputs: Path | list[Path], output: str = "corpus", **settings: object) -> BuildRequest:
        corpus = {key: settings.pop(key) for key in list(settings) if key in CorpusConfig.model_fields}
        request: dict = {
            "inputs": find_inputs(inputs if isinstance(inputs, list) else [inputs]),
            "vocabulary": vocabulary,
            "output": output if "://" in output else str(tmp_path / output),
            "seq_len": 64,
            "seed": 3,
            "corpus": CorpusConfig.model_validate({"shard_size_mb": 0.04, **corpus}),
            **settings,
        }
        return BuildRequest(**request)

    return make

"""Fixtures of the corpus tests: a small vocabulary, random prose, JSON-lines files and build requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpus_texts import prose, vocabulary
from support.s3_fixtures import bucket, proxy, s3

from electra_dist.config import CorpusConfig
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.tokenizer import Vocabulary

__all__ = ["bucket", "build_request", "inputs", "jsonl_file", "prose", "proxy", "s3", "vocab_file", "vocabulary"]


@pytest.fixture
def vocab_file(vocabulary: Vocabulary, tmp_path: Path) -> Path:
    """The small vocabulary as a file vocab.txt."""
    path = tmp_path / "vocab.txt"
    path.write_text(vocabulary.text)
    return path


@pytest.fixture
def jsonl_file(tmp_path: Path) -> Callable[..., Path]:
    """The function `jsonl_file(texts, name)`, which writes one document a line and returns the path of the file."""

    def write(texts: list[str], name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        path.write_text("".join(lines))
        return path

    return write


@pytest.fixture
def build_request(vocabulary: Vocabulary, tmp_path: Path) -> Callable[..., BuildRequest]:
    """The function `build_request(inputs, output, ...)`: a request for rows of 64 ids in shards of about 40 kB.

    Other arguments replace fields of the request (`num_workers=4`) or of its corpus config (`packing="none"`). An
    output without "://" is a folder in this test's temporary folder.
    """

    def request(inputs: Path | list[Path], output: str = "corpus", **settings: object) -> BuildRequest:
        corpus_settings: dict[str, object] = {"shard_size_mb": 0.04}
        request_settings: dict[str, object] = {}
        for key, value in settings.items():
            if key in CorpusConfig.model_fields:
                corpus_settings[key] = value
            else:
                request_settings[key] = value

        fields: dict = {
            "inputs": find_inputs(inputs if isinstance(inputs, list) else [inputs]),
            "vocabulary": vocabulary,
            "output": output if "://" in output else str(tmp_path / output),
            "seq_len": 64,
            "seed": 3,
            "corpus": CorpusConfig.model_validate(corpus_settings),
            **request_settings,
        }
        return BuildRequest(**fields)

    return request


@pytest.fixture
def inputs(prose: Callable[[int, int], list[str]], jsonl_file: Callable[..., Path]) -> list[Path]:
    """Two JSON-lines files with 120 and 150 documents."""
    return [jsonl_file(prose(120, 1), "a.jsonl"), jsonl_file(prose(150, 2), "b.jsonl")]

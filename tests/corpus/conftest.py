"""A small vocabulary, random prose and build requests for the corpus tests."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import s3_server

from electra_dist.config import CorpusConfig
from electra_dist.corpus.readers import find_inputs
from electra_dist.corpus.request import BuildRequest
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

WORDS = ["the", "of", "and", "a", "to", "in", "he", "was", "that", "it", "his", "her", "as", "had", "with", "for"]


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Special tokens (not at the front, to catch fixed ids), letters, digits, punctuation and some words."""
    chars = string.ascii_lowercase + string.digits
    tokens = [
        *string.punctuation,
        *SPECIAL_TOKENS,
        *chars,
        *("##" + char for char in chars),
        *WORDS[4:],
        "sep",
        "mask",
    ]
    return Vocabulary("\n".join(dict.fromkeys(tokens)) + "\n", "test vocabulary")


@pytest.fixture
def vocab_file(vocabulary: Vocabulary, tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text(vocabulary.text)
    return path


def make_prose(num_documents: int, seed: int) -> list[str]:
    """Documents of 1 to 12 lines of 1 to 40 words; now and then a paragraph of 300 words on one line."""
    draw = random.Random(seed)
    documents = []
    for number in range(num_documents):
        sizes = [300 if draw.random() < 0.05 else draw.randint(1, 40) for _ in range(draw.randint(1, 12))]
        lines = [" ".join(draw.choice(WORDS) + draw.choice(["", "", "s", ","]) for _ in range(n)) for n in sizes]
        documents.append("\n".join([f"document {number}", *lines]))
    return documents


@pytest.fixture(scope="session")
def prose() -> Callable[[int, int], list[str]]:
    return make_prose


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


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """URL of an empty bucket and the endpoint of its S3 server, with credentials in the environment."""
    with s3_server.running_s3() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield s3_server.make_bucket(*server, "corpus-test"), server.endpoint_url

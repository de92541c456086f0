"""Every reader refuses a vocab.txt that is not the one of corpus.json, and reads a wrong body from S3 again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import write_corpus, write_tiny_config
from support.remote_store import Remote
from typer.testing import CliRunner

import electra_dist as ed
from electra_dist.config_file import load_config
from electra_dist.data.corpus_manifest import read_manifest
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.library.corpus import Corpus
from electra_dist.pretrained.load_encoder import load_pretrained
from electra_dist.store.local_store import LocalStore
from electra_dist.tokenizer import NamedDigest, Vocabulary
from electra_dist.train.input_checks import check_inputs
from launcher.cli.main import app

ERROR_DOCUMENT = b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code></Error>\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config of a run on a small corpus that a test may damage."""
    write_corpus(str(tmp_path / "corpus"), [20, 20])
    write_corpus(str(tmp_path / "corpus" / "heldout"), [20], seed=9)
    return write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", str(tmp_path / "corpus"))


def change_a_token(path: Path) -> tuple[str, str]:
    """Change one letter of a vocabulary, which stays one; return the digests of the file before and after."""
    before = path.read_bytes()
    after = before.replace(b"\nw17\n", b"\nv17\n")
    assert after != before
    path.write_bytes(after)
    return hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest()


READERS: dict[str, Callable[[Path], object]] = {
    "train": lambda config: check_inputs(load_config(config), world_size=1),
    "library": lambda config: ed.open_corpus(load_config(config).data.corpus).vocabulary(),
    "initial weights": lambda config: load_pretrained(f"random:{config}"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_vocabulary_is_refused_with_both_digests(config: Path, tmp_path: Path, reader: str) -> None:
    READERS[reader](config)
    expected, found = change_a_token(tmp_path / "corpus" / "vocab.txt")
    with pytest.raises(UserError) as caught:
        READERS[reader](config)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/corpus/vocab.txt: its sha256 is {found}")
    assert f"corpus.json names {expected}; restore the file" in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_other_line_ends_are_the_same_vocabulary(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus" / "vocab.txt"
    tokens = ed.open_corpus(str(tmp_path / "corpus")).vocabulary().tokens
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert ed.open_corpus(str(tmp_path / "corpus")).vocabulary().tokens == tokens
    assert check_inputs(load_config(config), world_size=1).vocabulary.text == "\n".join(tokens) + "\n"


def test_a_folder_without_a_manifest_and_a_file_of_the_users_are_checked_by_their_form(
    config: Path, tmp_path: Path
) -> None:
    change_a_token(tmp_path / "corpus" / "vocab.txt")
    given = load_pretrained(f"random:{config}", vocab=tmp_path / "corpus" / "vocab.txt")
    (tmp_path / "corpus" / "corpus.json").unlink()
    assert load_pretrained(f"random:{config}").vocabulary.tokens == given.vocabulary.tokens
    with pytest.raises(ManifestMismatch, match="list names 00"):
        Vocabulary.parse(b"\xff\xfe", "x", NamedDigest("00", "list", "restore it"))


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_build_refuses_a_changed_vocabulary_in_its_output(config: Path, tmp_path: Path, is_finished: bool) -> None:
    """The error names the file, and does not advise to delete the corpus."""
    words = " ".join(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    (tmp_path / "text.txt").write_text("\n\n".join([f"{words}.\n{words} again."] * 20))
    output = tmp_path / "built"
    command = ["corpus", "build", "--config", str(config), "--output", str(output)]
    command += ["--input", str(tmp_path / "text.txt"), "--set", "model.vocab_size=88", "--workers", "1"]
    built = CliRunner().invoke(app, command)
    assert built.exit_code == 0, built.output
    digest = read_manifest(LocalStore(output)).tokenizer.sha256
    named_by = "corpus.json"
    if not is_finished:
        (output / "corpus.json").unlink()
        (output / "progress").mkdir()
        (output / "progress" / "build.json").write_text(f'{{"tokenizer": "{digest}"}}\n')
        named_by = "progress/build.json"
    vocab = output / "vocab.txt"
    vocab.write_bytes(vocab.read_bytes().replace(b"\na\n", b"\n\xc3\xa6\n"))
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0
    assert isinstance(again.exception, UserError), again.exception
    message = str(again.exception)
    assert message.startswith(f"{vocab}: its sha256 is ")
    assert f"{output}/{named_by} names {digest}" in message
    assert "delete" not in message


class WrongAtFirst(Remote):
    """Store that answers the first `num_wrong` readings of each object with an error document, as S3 may do."""

    def __init__(self, folder: Path, num_wrong: int) -> None:
        super().__init__(folder)
        self.num_wrong = num_wrong
        self.readings: dict[str, int] = {}

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        self.readings[key] = self.readings.get(key, 0) + 1
        is_wrong = self.readings[key] <= self.num_wrong
        return ERROR_DOCUMENT if is_wrong else (Path(self.url) / key).read_bytes()


@pytest.mark.parametrize("num_wrong", [0, 2, 4, 5])
def test_an_error_document_is_not_taken_for_a_file_of_the_corpus(
    config: Path, tmp_path: Path, monkeypatch: Any, num_wrong: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    expected = read_manifest(LocalStore(tmp_path / "corpus"))
    store = WrongAtFirst(tmp_path / "corpus", num_wrong)
    corpus = Corpus(store, expected, seed=1, shuffle_window_shards=1, cache_dir=tmp_path / "cache")
    if num_wrong == 5:
        with pytest.raises(ManifestMismatch, match=r"corpus\.json"):
            read_manifest(store)
        with pytest.raises(ManifestMismatch, match=r"vocab.txt: its sha256 is .* restore the file"):
            corpus.vocabulary()
    else:
        assert read_manifest(store).fingerprint == expected.fingerprint
        assert corpus.vocabulary().sha256 == expected.tokenizer.sha256
    corpus.close()
    assert set(store.readings.values()) == {min(num_wrong + 1, 5)}

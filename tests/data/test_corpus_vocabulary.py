"""Every reader refuses a vocab.txt that is not the one of corpus.json, and reads a wrong body from S3 again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.cli.main import app
from support.real_runs import write_corpus, write_tiny_config
from support.remote_store import Remote
from typer.testing import CliRunner

import electra_dist as ed
from electra_dist.api import Corpus
from electra_dist.config.load import load_config
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.store.atomic_files import NamedDigest
from electra_dist.store.open_store import LocalStore
from electra_dist.tokenizer import Vocabulary
from electra_dist.train.check_inputs import check_inputs

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


def change_tokenizer(folder: Path, **values: Any) -> None:
    """Change fields of the tokenizer's entry in the corpus.json of a folder."""
    tree = json.loads((folder / "corpus.json").read_text())
    tree["tokenizer"].update(values)
    (folder / "corpus.json").write_text(json.dumps(tree))


def find(config: Path) -> None:
    """Search the corpus of a config for a text by the command line; raise its error."""
    done = CliRunner().invoke(app, ["corpus", "find", load_config(config).data.corpus, "w1 w2"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception


SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
WRONG_ENTRIES = {
    "[MASK] and [UNK] exchanged": (
        {"special": {**SPECIAL, "[MASK]": 1, "[UNK]": 4}},
        r"special \[UNK\] is 4, .* is 1",
    ),
    "[MASK] is [CLS]": ({"special": {**SPECIAL, "[MASK]": 2}}, r"special \[MASK\] is 2, .* is 4"),
    "[PAD] is a word": ({"special": {**SPECIAL, "[PAD]": 17}}, r"special \[PAD\] is 17, .* is 0"),
    "another size": ({"vocab_size": 301}, "vocab_size is 301, .* has 300 tokens"),
    "a huge size": ({"vocab_size": 2**24}, "vocab_size is 16777216, .* has 300"),
}


@pytest.mark.parametrize("reader", [*READERS, "open", "find", "plain size"])
@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_an_entry_that_contradicts_the_vocabulary_is_refused(
    config: Path, tmp_path: Path, reader: str, wrong: str
) -> None:
    values, message = WRONG_ENTRIES[wrong]
    readers = {
        **READERS,
        "open": lambda config: ed.open_corpus(load_config(config).data.corpus),
        "find": find,
        # A config with the same wrong number fits the entry.
        "plain size": lambda config: check_inputs(
            load_config(config, [f"model.vocab_size={values.get('vocab_size', 300)}"]), world_size=1
        ),
    }
    if reader == "train" and "vocab_size" in values:
        message = "the model has 300"
    change_tokenizer(tmp_path / "corpus", **values)
    with pytest.raises(ManifestMismatch, match=message) as caught:
        readers[reader](config)
    assert "\n" not in str(caught.value)
    assert f"{tmp_path}/corpus" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "values", [{"lowercase": False}, {"special": {**SPECIAL, "[MASK]": 1, "[UNK]": 4}}, {"sha256": "0" * 64}]
)
def test_a_held_out_corpus_of_another_tokenizer_is_refused(config: Path, tmp_path: Path, values: Any) -> None:
    check_inputs(load_config(config), world_size=1)
    change_tokenizer(tmp_path / "corpus" / "heldout", **values)
    with pytest.raises(ManifestMismatch, match=r"data\.heldout .* than data\.corpus"):
        check_inputs(load_config(config), world_size=1)


def test_a_search_for_a_text_refuses_an_exchanged_vocabulary_and_changed_shards(config: Path, tmp_path: Path) -> None:
    find(config)
    vocab = tmp_path / "corpus" / "vocab.txt"
    good = vocab.read_bytes()
    for content in (good.replace(b"\nw17\n", b"\nv17\n"), b"\xff\xfe"):
        vocab.write_bytes(content)
        with pytest.raises(ManifestMismatch, match=r"vocab\.txt: its sha256 is"):
            find(config)
    vocab.write_bytes(good)
    shard = tmp_path / "corpus" / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(ManifestMismatch, match=r"shard-000001\.tar: .*sha256"):
        find(config)


def test_a_shard_that_arrives_with_wrong_bytes_is_fetched_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    manifest = read_manifest(LocalStore(tmp_path / "corpus"))

    class WrongOnce(Remote):
        num_wrong = 1

        def fetch(self, key: str, destination: Path) -> None:
            super().fetch(key, destination)
            if self.fetched.count(key) <= self.num_wrong:
                destination.write_bytes(ERROR_DOCUMENT)

    store = WrongOnce(tmp_path / "corpus")
    local = dict(rows_of_shards(Corpora.of(LocalStore(tmp_path / "corpus"), manifest), range(2)))
    for index, rows in rows_of_shards(Corpora.of(store, manifest), range(2)):
        assert (rows == local[index]).all()
    assert len(store.fetched) == 4
    WrongOnce.num_wrong = 100
    with pytest.raises(ManifestMismatch, match=r"shard-000000\.tar: .*sha256"):
        list(rows_of_shards(Corpora.of(WrongOnce(tmp_path / "corpus"), manifest), range(2)))


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
        record = f'{{"tokenizer": "{digest}"}}'
        record_sha256 = hashlib.sha256(record.encode()).hexdigest()
        (output / "progress" / "build.json").write_text(f"{record}\n{record_sha256}\n")
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

    def read(self, key: str) -> bytes:
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
    corpora = Corpora.of(store, expected)
    corpus = Corpus(corpora, seed=1, shuffle_window_shards=1, cache_dir=tmp_path / "cache", global_batch=None)
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


def test_a_run_takes_the_size_of_its_corpus_vocabulary_if_the_config_has_more(config: Path) -> None:
    plain = load_config(config)
    larger = load_config(config, ["model.vocab_size=500"])

    inputs = check_inputs(larger, world_size=1)

    assert inputs.config == plain
    [line] = inputs.notes
    assert "300 entries, as in data.corpus, and not 500 (model.vocab_size)" in line
    assert check_inputs(plain, world_size=1).notes == []
    smaller = load_config(config, ["model.vocab_size=299"])
    with pytest.raises(ManifestMismatch, match=r"the model has 299; set model\.vocab_size: 300 or more"):
        check_inputs(smaller, world_size=1)


def test_a_start_reads_each_corpus_json_once(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    read = LocalStore.read

    def counted(store: LocalStore, key: str) -> bytes:
        keys.append(f"{store.url}/{key}")
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", counted)
    check_inputs(load_config(config), world_size=1)
    manifests = [key for key in keys if key.endswith("corpus.json")]
    assert sorted(manifests) == [f"{tmp_path}/corpus/corpus.json", f"{tmp_path}/corpus/heldout/corpus.json"]

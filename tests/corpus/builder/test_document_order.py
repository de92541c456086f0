"""The shuffle of documents: spill files lose nothing, copies are found, and every stretch has each source's share."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.corpus.builder import shuffle, worker_stages
from electra_dist.corpus.builder.build_corpus import build_corpus, divide_into_buckets
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.shuffle import (
    NUM_CELLS,
    SPILLS_FOLDER,
    SpillFile,
    cell_of,
    cell_of_original,
    cells_of_bucket,
    copy_key,
    open_spills,
    source_epochs,
    write_spill,
)
from electra_dist.corpus.inputs.text_decoding import RawDocument
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.open_store import LocalStore
from electra_dist.tokenizer import Vocabulary

KEYS = st.integers(0, 2**64 - 1)
DOCUMENTS = st.lists(
    st.builds(
        RawDocument,
        st.none() | st.binary(max_size=50),
        st.booleans(),
        st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        fields=st.none(),
        file=st.integers(0, 2**32 - 1),
        number=st.integers(0, 2**40),
        key=KEYS,
    ),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, num_buckets=st.integers(1, 40))
def test_a_spill_file_returns_every_document_in_the_order_of_keys(
    tmp_path_factory: pytest.TempPathFactory, documents: list[RawDocument], num_buckets: int
) -> None:
    """The buckets, read one by one, hold together what was written."""
    store = LocalStore(tmp_path_factory.mktemp("spill"))
    expected = sorted(documents, key=lambda document: document.place)
    write_spill(store, "spill", list(documents))

    spill = SpillFile(store, "spill", store.size("spill"))
    found = [entry for bucket in range(num_buckets) for entry in spill.documents(cells_of_bucket(bucket, num_buckets))]

    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert [entry.key for entry in found] == [entry.key for entry in expected]


def test_a_damaged_spill_file_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_spill(store, "spill", [RawDocument(b"some text " * 20, False, key=7)])
    path = tmp_path / "spill"
    data = bytearray(path.read_bytes())

    data[-8] ^= 1
    path.write_bytes(data)
    with pytest.raises(ManifestMismatch, match="damaged"):
        list(SpillFile(store, "spill", len(data)).documents(range(NUM_CELLS)))
    path.write_bytes(data[:100])
    with pytest.raises(ManifestMismatch, match="damaged"):
        SpillFile(store, "spill", 100)


def test_a_changed_byte_of_a_spill_file_is_found_also_where_the_text_is_not_compressed(tmp_path: Path) -> None:
    """Bytes without repetitions are stored as they are, so only the checksum of the frame shows the change."""
    store = LocalStore(tmp_path)
    text = np.random.default_rng(0).bytes(300)
    write_spill(store, "spill", [RawDocument(text, False, key=7)])
    data = (tmp_path / "spill").read_bytes()
    spill = SpillFile(store, "spill", len(data))
    cell = range(cell_of(7), cell_of(7) + 1)
    assert [document.data for document in spill.documents(cell)] == [text]

    for place in range(len(data) - 200, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        (tmp_path / "spill").write_bytes(damaged)
        with pytest.raises(ManifestMismatch, match="damaged"):
            list(spill.documents(cell))


@given(key=KEYS, copy=st.integers(0, 300))
def test_a_copy_is_found_through_the_cell_of_its_original(key: int, copy: int) -> None:
    assert cell_of_original(cell_of(copy_key(key, copy)), copy) == cell_of(key)


@pytest.mark.parametrize("num_buckets", [1, 3, 1000, NUM_CELLS])
def test_the_buckets_divide_all_cells(num_buckets: int) -> None:
    cells = [cell for bucket in range(num_buckets) for cell in cells_of_bucket(bucket, num_buckets)]
    assert cells == list(range(NUM_CELLS))


def test_every_stretch_of_the_order_has_each_sources_share_within_three_standard_errors() -> None:
    """Two files, of 2,000 and 98,000 documents: 100 windows of 1,000 documents; the share is 0.02."""
    sizes = (2_000, 98_000)
    documents = [(file, number) for file, size in enumerate(sizes) for number in range(size)]
    keys = sorted((shuffle.document_key(5, file, number), file) for file, number in documents)
    files = np.array([file for _, file in keys]).reshape(100, 1000)
    shares = (files == 0).mean(axis=1)

    standard_error = math.sqrt(0.02 * 0.98 / 1000)
    distance = np.abs(shares - 0.02) / standard_error
    assert (distance > 3).sum() <= 2  # 0.3 of 100 windows are expected
    assert np.sqrt((distance**2).mean()) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("epochs", [0.0, 0.3, 1.0, 2.5])
def test_documents_are_used_as_often_as_asked_on_average(epochs: float) -> None:
    keys = [shuffle.document_key(1, 0, number) for number in range(20_000)]
    copies = [shuffle.num_copies(key, epochs) for key in keys]
    assert set(copies) <= {math.floor(epochs), math.ceil(epochs)}
    assert np.mean(copies) == pytest.approx(epochs, abs=0.015)


def _words_of_rows(folder: Path, vocabulary: Vocabulary) -> list[list[str]]:
    """Return the tokens of each row of the corpus in a folder, as text."""
    manifest = read_manifest(LocalStore(folder))
    tokens = vocabulary.text.splitlines()
    rows = []
    for entry in manifest.shards:
        shard = Shard(folder / entry.name, manifest.seq_len, manifest.numpy_dtype)
        rows += [[tokens[token] for token in row] for row in shard.rows(np.arange(shard.num_rows))]
        shard.close()
    return rows


def test_the_sample_that_sets_the_number_of_shards_is_bounded_and_the_same_for_any_spill_files(
    build_request: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all documents lie in one cell, which has more bytes than the sample."""
    (tmp_path / "a.txt").write_text("of")
    request = build_request(tmp_path / "a.txt")
    store = LocalStore(tmp_path / "store")
    text = b"it was " * 100
    draw = random.Random(1)
    documents = [RawDocument(text, False, number=number, key=draw.getrandbits(40)) for number in range(60)]
    documents += [RawDocument(b"that", False, number=60, key=1 << 60)]
    samples = []
    for num_files in (1, 3):
        names = [f"{SPILLS_FOLDER}{num_files}-{number}" for number in range(num_files)]
        for number, name in enumerate(names):
            write_spill(store, name, documents[number::num_files])
        spills = open_spills(store, names)
        with monkeypatch.context() as patch:
            patch.setattr(worker_stages, "SAMPLE_BYTES", 10 * len(text))
            samples.append(worker_stages.sample_rows(spills, request))
        assert worker_stages.sample_rows(spills, request).unknown.tokens == 60 * 200 + 1
    assert samples[0] == samples[1]
    assert samples[0].unknown.tokens == 10 * 200


def test_sources_are_mixed_and_used_as_often_as_their_epochs(
    build_request: Callable[..., BuildRequest], vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """Source a is used two and a half times, source b once, source c never."""
    for source, count in (("a", 200), ("b", 300), ("c", 50)):
        folder = tmp_path / "in" / source
        folder.mkdir(parents=True)
        word = {"a": "sep", "b": "mask", "c": "that"}[source]
        lines = [json.dumps({"text": f"{word} and it was"}) for _ in range(count)]
        (folder / "x.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "in"
    epochs = {f"{folder}/a": 2.5, f"{folder}/c": 0}

    request = build_request(folder, source_epochs=epochs, packing="none", single_segment_prob=0.999)
    result = build_corpus(request)

    words = Counter(word for row in _words_of_rows(Path(request.output), vocabulary) for word in row)
    assert words["mask"] == 300
    assert words["that"] == 0
    assert words["sep"] == pytest.approx(500, abs=25)
    assert result.report is not None
    assert result.report.sources[f"{folder}/a"].documents == words["sep"]


def test_every_window_of_the_rows_has_each_sources_weight_within_three_standard_errors(
    build_request: Callable[..., BuildRequest], vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """Documents of three sources, one row each, are read source by source; the shards must mix the sources."""
    weights = {"sep": 0.05, "mask": 0.25, "that": 0.70}
    num_documents = {"sep": 1000, "mask": 1400, "that": 5600}  # source_shares changes their shares to the weights
    folder = tmp_path / "in"
    for word, count in num_documents.items():
        (folder / word).mkdir(parents=True)
        (folder / word / "x.jsonl").write_text("\n".join([json.dumps({"text": f"{word:4} and it was"})] * count))
    shares = {f"{folder}/{word}": weight for word, weight in weights.items()}
    request = build_request(
        folder, source_shares=shares, packing="none", single_segment_prob=0.999, shard_size_mb=0.02
    )
    build_corpus(request)

    sources = [
        next(word for word in weights if word in row) for row in _words_of_rows(Path(request.output), vocabulary)
    ]
    window = 200
    num_windows = len(sources) // window
    assert num_windows >= 15
    windows = np.array(sources[: num_windows * window]).reshape(num_windows, window)
    for word, weight in weights.items():
        distance = ((windows == word).mean(axis=1) - weight) / math.sqrt(weight * (1 - weight) / window)
        assert np.abs(distance).max() <= 3.0
        assert 0.5 < np.sqrt((distance**2).mean()) < 1.5  # as drawn at random, neither clustered nor laid out in turn


def test_shares_are_those_of_the_bytes() -> None:
    epochs = source_epochs({"a": 1000, "b": 8000}, {}, {"a": 1, "b": 3})
    assert epochs == {"a": 1.0, "b": 0.375}  # 1,000 and 3,000 bytes


@pytest.mark.parametrize(
    ("epochs", "shares", "message"),
    [
        ({"x": 2.0}, {}, r"corpus\.source_epochs: x is not a source of these inputs; use one of a, b"),
        ({}, {"a": 1.0}, r"corpus\.source_shares: no share for the source b"),
        ({}, {"a": 0.0, "b": 0.0}, "all shares are 0"),
    ],
)
def test_a_source_that_does_not_exist_or_has_no_share_is_refused(
    epochs: dict[str, float], shares: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        source_epochs({"a": 1, "b": 1}, epochs, shares)


@pytest.mark.parametrize(
    ("total_bytes", "num_shards", "expected"),
    [
        (0, 0, (1, 1)),
        (1e9, 3.2, (4, 1)),
        (1e9, 1024, (1024, 1)),
        (100e9, 2000, (1000, 2)),
        (512e9, 2000, (2000, 1)),  # memory asks for 2,000 buckets, in which one shard each is enough
        (2000e9, 16_000, (4096, 4)),
    ],
)
def test_shards_keep_their_size_if_memory_asks_for_more_buckets(
    total_bytes: float, num_shards: float, expected: tuple[int, int]
) -> None:
    assert divide_into_buckets(total_bytes, num_shards) == expected

"""Tar and zip archives and WebDataset shards of others as input, from a folder, by a brace pattern and from S3."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from support.fault_server import FaultPlan, FaultProxy
from support.s3_server import S3Server

from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import SkippedDocument, decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

ONE_TEXT = b"A title\n\nA paragraph, and a blank line before it."
MEMBERS = {  # name of a member -> its content, and the texts that a build reads from it
    "./folder/one.txt": (ONE_TEXT, [ONE_TEXT.decode()]),
    "folder/two.md": (b"# Two\n\ntext", ["# Two\n\ntext"]),
    "v1.2/three.txt.gz": (gzip.compress(b"three"), ["three"]),
    "records.jsonl": (b'{"text": "four"}\n{"text": "five"}\n', ["four", "five"]),
    "part.00-of-01.json": (b'[{"text": "six"}]', ["six"]),
    "table.csv": (b"id,text\n1,seven\n", ["seven"]),
    "other.csv": (b"id,body\n1,x\n", []),
    "picture.jpg": (b"\xff\xd8", []),
    "LICENSE": (b"none", []),
    ".hidden.txt": (b"hidden", []),
    "__MACOSX/one.txt": (b"hidden", []),
    "inner.zip": (b"PK", []),
}
SKIPPED = {"unknown_kind": {"(none)": 1, ".jpg": 1, ".zip": 1}, "hidden": {".txt": 2}, "no_text_column": {".csv": 1}}


def tar_of(members: dict[str, bytes]) -> bytes:
    """Return a tar archive with the members in order; a name that ends in `/` is a folder."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    """Return a compressed zip archive with the members in order."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", b"")
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def read(inputs: list[Any], text_field: str = "text", endpoint_url: str | None = None) -> tuple[list[str], Any]:
    """Return the texts of all documents of the inputs that have text, and the counts of the stream."""
    stream = DocumentStream(find_inputs(inputs, endpoint_url), text_field, endpoint_url)
    texts = []
    for document in stream:
        with contextlib.suppress(SkippedDocument):
            texts.append(decode(document, text_field))
    return texts, stream.counts


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("texts.tar", tar_of),
        ("texts.tgz", lambda members: gzip.compress(tar_of(members))),
        ("texts.zip", zip_of),
    ],
)
def test_the_texts_in_an_archive_are_read_and_all_other_members_counted(
    tmp_path: Path, name: str, write: Callable[[dict[str, bytes]], bytes]
) -> None:
    (tmp_path / name).write_bytes(write({member: content for member, (content, _) in MEMBERS.items()}))

    texts, counts = read([tmp_path])

    assert texts == [text for _, member_texts in MEMBERS.values() for text in member_texts]
    assert counts.skipped_by_reason() == SKIPPED
    assert f"{name}: picture.jpg" in counts.skipped_names["unknown_kind"]
    assert counts.members == {".txt": 1, ".md": 1, ".txt.gz": 1, ".jsonl": 1, ".json": 1, ".csv": 1}
    assert [numbers["files"] for numbers in counts.files.values()] == [1]


@pytest.mark.parametrize(("name", "write"), [("a.tar", tar_of), ("a.zip", zip_of)])
def test_names_that_webdataset_uses_itself_and_endings_in_capitals_lose_no_text(
    tmp_path: Path, name: str, write: Callable[[dict[str, bytes]], bytes]
) -> None:
    """`json.__init__.txt` has an ending that begins like webdataset's own entries of a sample."""
    texts = {"json.__init__.txt": b"one", "numpy.linalg.__init__.md": b"two", "c.txt": b"three", "c.TXT": b"four"}
    (tmp_path / name).write_bytes(write(texts))

    found, counts = read([tmp_path])

    assert found == ["one", "two", "three", "four"]
    assert counts.members == {".txt": 3, ".md": 1}


def test_two_members_of_one_name_in_a_row_are_refused_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of({"b.txt": b"two"}).rstrip(b"\0").ljust(1024, b"\0") * 2 + bytes(1024))

    with pytest.raises(UserError, match=r"a\.tar: .*\(two members, one after the other, have the name b\.txt\)"):
        read([tmp_path])


def test_a_link_in_a_tar_is_counted(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        link = tarfile.TarInfo("link.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = "one.txt"
        tar.addfile(link)
    (tmp_path / "a.tar").write_bytes(data.getvalue())

    texts, counts = read([tmp_path])

    assert texts == []
    assert counts.skipped_by_reason() == {"not_a_file": {".txt": 1}}


def test_a_tar_that_is_cut_or_damaged_anywhere_is_an_error(tmp_path: Path) -> None:
    """Python's tarfile takes a cut between two members, and a damaged header, for the end of the archive."""
    path = tmp_path / "a.tar"
    whole = tar_of({f"{number}.txt": b"x" * (700 + number) for number in range(4)})
    second_header = 512 * 3  # after one header and two blocks of content

    for size in [100, 512, 800, second_header, second_header + 100, 2 * second_header]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.tar: cannot be read to its end"):
            read([path])
    damaged = bytearray(whole)
    damaged[second_header : second_header + 4] = b"\xff\xff\xff\xff"
    for content in (bytes(damaged), whole + whole, b"no tar" * 500, gzip.compress(whole)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.tar: cannot be read to its end"):
            read([path])


def test_a_zip_that_is_cut_damaged_or_encrypted_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    whole = zip_of({"a.txt": bytes(range(48, 100)) * 50, "b.txt": b"b"})
    damaged = bytearray(whole)
    damaged[damaged.index(b"a.txt") + 20] ^= 0xFF
    encrypted = bytearray(whole)
    for signature, offset_of_flags in [(b"PK\x03\x04", 6), (b"PK\x01\x02", 8)]:  # local header, directory
        place = whole.index(signature, whole.index(signature) + 1)  # of the second member; the first one is a folder
        encrypted[place + offset_of_flags] |= 1

    for content in (whole[:-30], bytes(damaged), bytes(encrypted), b"no zip"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.zip: cannot be read to its end") as error:
            read([path])
        assert "\n" not in str(error.value)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with three WebDataset shards of four samples each, as ShardWriter writes them.

    Samples have text, or JSON, or both, or a caption, with a class label and a picture beside them.
    """
    folder = tmp_path / "shards"
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/shard-%06d.tar", maxcount=4, verbose=0) as sink:
        for number in range(12):
            sample: dict[str, Any] = {"__key__": f"sample{number:03d}", "cls": number, "jpg": b"\xff\xd8"}
            if number % 4 in (0, 2):
                sample["txt"] = f"text {number}\n\nwith a blank line"
            if number % 4 in (1, 2):
                sample["json"] = {"text": f"json {number}", "width": 5}
            if number % 4 == 3:
                sample["Caption"] = f"caption {number}".encode()
            sink.write(sample)
    return folder


def expected_texts(folder: Path) -> list[str]:
    """Return the texts of the shards by the webdataset library's own reader, which is the independent truth."""
    texts = []
    urls = sorted(map(str, folder.glob("*.tar")))
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        if "txt" in sample:
            texts.append(sample["txt"].decode())
        elif "json" in sample:
            texts.append(json.loads(sample["json"])["text"])
    return texts


def test_webdataset_shards_of_others_give_the_texts_that_the_library_reads(shards: Path) -> None:
    texts, counts = read([shards])
    texts_of_pattern, _ = read([f"{shards}/shard-{{000000..000001}}.tar"])

    assert texts == expected_texts(shards)
    assert len(texts) == 9
    assert texts_of_pattern == texts[:6]
    assert counts.members == {".txt": 6, ".json": 3}
    assert counts.skipped_by_reason() == {
        "unknown_kind": {".caption": 3, ".cls": 12, ".jpg": 12},
        "metadata": {".json": 3},
    }


def test_the_text_field_names_the_ending_of_members_that_are_texts(shards: Path) -> None:
    """Where a sample has such a member, no other one of it is read."""
    captions, caption_counts = read([shards], "caption")
    labels, label_counts = read([shards], "cls")

    assert [text for text in captions if text.startswith("caption")] == ["caption 3", "caption 7", "caption 11"]
    assert caption_counts.members == {".caption": 3, ".txt": 6, ".json": 3}
    assert labels == [str(number) for number in range(12)]
    assert label_counts.skipped_by_reason()["metadata"] == {".json": 6, ".txt": 6}


def test_shards_on_s3_are_read_through_faults_from_a_prefix_and_by_a_pattern(
    shards: Path, bucket: str, s3: S3Server, proxy: FaultProxy
) -> None:
    store = open_store(f"{bucket}/theirs", s3.endpoint_url)
    for path in sorted(shards.iterdir()):
        store.upload(path, f"part/{path.name}")
    store.write("part/notes.html", b"x")
    expected = expected_texts(shards)

    proxy.plan = FaultPlan(seed=3, faults=("reset", "short"), only="shard-", in_a_row=1, most=2)
    texts, counts = read([f"{bucket}/theirs"], endpoint_url=proxy.endpoint_url)
    texts_of_pattern, _ = read([f"{bucket}/theirs/part/shard-{{000001..000002}}.tar"], endpoint_url=proxy.endpoint_url)

    assert texts == expected
    assert texts_of_pattern == expected[3:]
    assert sum(proxy.plan.counts.values()) > 0, "no fault was injected"
    assert {source: numbers["files"] for source, numbers in counts.sources.items()} == {f"{bucket}/theirs/part": 3}
    with pytest.raises(UserError, match=r"shard-000008\.tar.*no such object"):
        find_inputs([f"{bucket}/theirs/part/shard-{{000008..000009}}.tar"], s3.endpoint_url)

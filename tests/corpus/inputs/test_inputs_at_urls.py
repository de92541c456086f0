"""Inputs at URLs: found, pinned and read as the same files on the disk are."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.folder_contents import file_contents
from support.hub_server import TOKEN, Hub, hub

from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import InputFile, find_inputs, search_inputs
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.errors import UserError
from electra_dist.store import url_files

__all__ = ["hub"]

SET = "hf://datasets/we/texts"


@pytest.fixture
def memory() -> Iterator[Callable[[str, bytes], None]]:
    """The function `memory(name, data)`, which writes memory://in/NAME."""

    def write(name: str, data: bytes) -> None:
        with fsspec.open(f"memory://in/{name}", "wb") as file:
            file.write(data)  # type: ignore[attr-defined]

    yield write
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def parquet_set(prose: Callable[[int, int], list[str]], tmp_path: Path) -> Path:
    """A data set of two parquet files in a folder with a card, as on the Hub."""
    folder = tmp_path / "set"
    for number in (1, 2):
        file = folder / "data" / f"train-0000{number}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": prose(100, number)}), file)
    (folder / "README.rst").write_text("the card\n")
    return folder


def texts(files: list[InputFile]) -> list[bytes]:
    return [document.data for document in DocumentStream(files)]


def test_a_corpus_of_a_set_on_the_hub_equals_that_of_the_files_on_the_disk(
    hub: Hub, parquet_set: Path, build_request: Callable[..., BuildRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_files, "_RANGE_BYTES", 10_000)
    hub.commit("we/texts", parquet_set)
    local = build_request(parquet_set, "local", heldout_fraction=0.1, origins=False)
    build_corpus(local)
    build_corpus(dataclasses.replace(local, inputs=find_inputs([SET]), output=local.output.replace("local", "hub")))

    ours, theirs = (file_contents(Path(local.output.replace("local", name))) for name in ("hub", "local"))
    names_of_places = {"build.json"}  # it has the input as the user gave it
    assert ours.keys() == theirs.keys() and len(ours) > 3
    for name in ours.keys() - names_of_places:
        assert ours[name] == theirs[name], name
    sizes = [path.stat().st_size for path in sorted(parquet_set.rglob("*.parquet"))]
    ranges = [line for line in hub.requests if "bytes=" in line]
    assert len(ranges) == sum(-(-size // 10_000) for size in sizes)  # each byte is read once


def test_what_is_found_at_a_url_is_what_is_found_in_the_folder(hub: Hub, parquet_set: Path) -> None:
    (parquet_set / "data" / "more" / ".hidden").mkdir(parents=True)
    (parquet_set / "data" / "more" / "a.txt").write_text("one\n\ntwo\n")
    (parquet_set / "data" / "more" / "b.png").write_bytes(b"png")
    (parquet_set / "data" / "empty.txt").write_bytes(b"")
    commit = hub.commit("we/texts", parquet_set)

    for part in ("", "/data", "/data/more"):
        local = search_inputs([f"{parquet_set}{part}"])
        remote = search_inputs([f"{SET}{part}"])
        assert [(file.name, file.size) for file in remote.files] == [(file.name, file.size) for file in local.files]
        assert texts(remote.files) == texts(local.files)
        assert remote.skipped.skipped["unknown_kind"] == local.skipped.skipped["unknown_kind"]
    [file] = find_inputs([f"{SET}@{commit}/data/more/a.txt"])
    assert (file.name, file.is_given) == ("a.txt", True)
    assert len(find_inputs([f"{SET}/data/*.parquet"])) == 2
    assert len(find_inputs([f"{SET}/data/train-{{00001..00002}}.parquet"])) == 2


def test_a_set_stays_at_the_commit_of_its_listing(hub: Hub, parquet_set: Path) -> None:
    hub.commit("we/texts", {"a.txt": b"old text"})
    files = find_inputs([SET])
    hub.commit("we/texts", {"a.txt": b"new text"})
    assert texts(files) == [b"old text"]
    assert texts(find_inputs([SET])) == [b"new text"]
    hub.commit("we/texts", {"a.txt": b"branch"}, branch="v 1/2")
    assert texts(find_inputs([f"{SET}@v%201%2F2"])) == [b"branch"]


def test_a_file_that_changes_after_its_listing_ends_the_build(memory: Callable[[str, bytes], None]) -> None:
    memory("a.txt", b"old text")
    memory("b.txt", b"more text")
    files = find_inputs(["memory://in"])
    assert texts(files) == [b"old text", b"more text"]
    memory("b.txt", b"MORE TEXT")  # of the same size
    with pytest.raises(UserError, match=r"memory://.*/b.txt: has changed since it was listed") as error:
        texts(files)
    assert "\n" not in str(error.value)


def test_a_file_that_changes_while_it_is_read_ends_the_build(
    memory: Callable[[str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_files, "_RANGE_BYTES", 4)
    memory("a.txt", b"old text")
    files = find_inputs(["memory://in/a.txt"])
    cat_file = MemoryFileSystem.cat_file

    def read_and_replace(self: MemoryFileSystem, path: str, start: int = 0, end: int = 0) -> bytes:
        data = cat_file(self, path, start=start, end=end)
        memory("a.txt", b"new text")
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", read_and_replace)
    with pytest.raises(UserError, match="has changed since it was listed"):
        texts(files)


def test_a_range_that_fails_is_read_again_and_a_whole_answer_is_taken(
    memory: Callable[[str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_files, "_RANGE_BYTES", 4)
    memory("a.txt", b"some text")
    files = find_inputs(["memory://in/*.txt"])
    cat_file = MemoryFileSystem.cat_file
    calls: list[int] = []

    def sometimes(self: MemoryFileSystem, path: str, start: int = 0, end: int = 0) -> bytes:
        calls.append(start)
        if len(calls) == 1:
            raise ConnectionResetError("reset")
        return cat_file(self, path) if start == 4 else cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", sometimes)
    assert texts(files) == [b"some text"]
    assert calls == [0, 0, 4]


def test_a_gated_set_needs_the_token(hub: Hub, parquet_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("we/texts", parquet_set)
    hub.gated.add("we/texts")
    with pytest.raises(UserError, match=rf"{SET}: gated on http://.*; accept its terms there, then set HF_TOKEN"):
        find_inputs([SET])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(find_inputs([SET])) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://datasets/we/missing", "hf://datasets/we/missing: not found on http"),
        (f"{SET}@other", f"{SET}@other: no such revision on http"),
        (f"{SET}/data/missing.txt", f"{SET}/data/missing.txt: no such file; correct the URL"),
        (f"{SET}/*.zip", r"/\*.zip: no such file; correct the URL"),
        ("hf://we", "hf://we: not a URL of the Hub; write hf://datasets/ORG/NAME"),
        ("memory://nothing", "memory://nothing: no such file; correct the URL"),
        ("unheard-of://x", "unheard-of://x: unknown kind of storage; give a local path"),
        ("sftp://host/x.txt", "sftp://host/x.txt: a package is missing; .*paramiko"),
    ],
)
def test_a_wrong_url_is_refused_in_one_line(
    hub: Hub, parquet_set: Path, url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    hub.commit("we/texts", parquet_set)
    with pytest.raises(UserError, match=message) as error:
        find_inputs([url])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://bob:word123@host.example/a.txt",
        "https://word123@host.example/a.txt",
        "sftp://bob:word123@host.example/a.txt",
        "https://host.example/a.txt?X-Amz-Date=1&X-Amz-Signature=word123",
        "https://host.example/a.txt?sv=2024&sig=word123",
        "https://host.example/a.txt?download=1&access_token=word123",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(UserError, match=r"://host\.example/a\.txt: the URL holds credentials") as refused:
        find_inputs([url])
    assert "word123" not in str(refused.value)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **_: Any) -> None:
        raise ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"https://host/a.txt needs packages that are not installed; run: pip"):
        find_inputs(["https://host/a.txt"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"hf://datasets/we/texts needs packages that are not installed; run: pip"):
        find_inputs([SET])


def test_a_command_that_needs_a_path_gets_a_copy_of_each_version_once(
    memory: Callable[[str, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_files, "user_cache_folder", lambda: tmp_path / "cache")
    memory("a/train.tsv", b"text\tlabel\n")
    memory("a/more/dev.tsv", b"dev")
    folder = url_files.local_copy("memory://in/a")
    assert file_contents(folder) == {"train.tsv": b"text\tlabel\n", "more/dev.tsv": b"dev"}
    file = url_files.local_copy("memory://in/a/train.tsv")
    assert (file.name, file.read_bytes()) == ("train.tsv", b"text\tlabel\n")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", None)
    assert url_files.local_copy("memory://in/a") == folder
    monkeypatch.undo()
    monkeypatch.setattr(url_files, "user_cache_folder", lambda: tmp_path / "cache")
    memory("a/train.tsv", b"TEXT\tlabel\n")
    assert url_files.local_copy("memory://in/a/train.tsv").read_bytes() == b"TEXT\tlabel\n"
    assert url_files.local_copy("some/path") == Path("some/path")


def test_a_file_at_an_https_url_is_pinned_by_its_etag_and_read_in_ranges(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of the Hub answers with an ETag and honours ranges, as web servers do."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(url_files, "_RANGE_BYTES", 4)
    url = f"{hub.url}/datasets/we/texts/resolve/main/a.txt"
    hub.commit("we/texts", {"a.txt": b"old text"})
    files = find_inputs([url])
    assert [(file.name, file.size) for file in files] == [("a.txt", 8)]
    assert texts(files) == [b"old text"]
    assert [line.rpartition(" ")[2] for line in hub.requests if "bytes=" in line] == ["bytes=0-3", "bytes=4-7"]
    hub.commit("we/texts", {"a.txt": b"new text"})
    with pytest.raises(UserError, match=r"/a.txt: has changed since it was listed"):
        texts(files)
    with pytest.raises(UserError, match=r"/missing.txt: no such file; correct the URL"):
        find_inputs([url.replace("a.txt", "missing.txt")])

"""Search for inputs: everything in a folder is read or counted with its reason, and links never make a difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.counting_store import CountingStore, Service
from support.s3_server import S3Server

from electra_dist.corpus.inputs import find_inputs as module
from electra_dist.corpus.inputs.file_kinds import ending_of, kind_of
from electra_dist.corpus.inputs.find_inputs import find_inputs, search_inputs
from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.open_store import open_store


def write_files(folder: Path, names: list[str]) -> None:
    """Write files of two bytes, with the folders that they are in."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12")


@pytest.mark.parametrize(
    ("name", "file_format", "compression"),
    [
        ("c4-train.00000-of-01024.json.gz", "json", ".gz"),
        ("folder.d/train-00000-of-00010.parquet", "parquet", ""),
        ("A.TXT.BZ2", "txt", ".bz2"),
        ("notes.v2.md", "md", ""),
        ("table.csv.zst", "csv", ".zst"),
        ("table.tsv", "tsv", ""),
        ("shard-000000.tar", "tar", ""),
        ("texts.tar.xz", "tar", ".xz"),
        ("texts.tgz", "tar", ".gz"),
        ("texts.zip", "zip", ""),
    ],
)
def test_the_endings_of_a_name_give_the_kind_of_the_file(name: str, file_format: str, compression: str) -> None:
    assert kind_of(name) == (file_format, compression)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("a.parquet.gz", ".parquet.gz"),
        ("a.zip.gz", ".zip.gz"),
        ("page.html", ".html"),
        ("wiki_00", "(none)"),
        ("news.en-00001-of-00100", "(none)"),
        ("data.gz", ".gz"),
        ("backup.txt.0001", "(none)"),
        ("song.mp3", ".mp3"),
        (".txt", "(none)"),
        ("folder.txt/README", "(none)"),
    ],
)
def test_other_names_are_of_no_known_kind_and_are_counted_by_their_ending(name: str, ending: str) -> None:
    assert kind_of(name) is None
    assert ending_of(name) == ending


def test_everything_in_a_folder_is_read_or_counted_with_its_reason_and_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_files(folder, ["b.txt", "wiki/a.jsonl", "page.html", "wiki/page.html", "x/blob", ".git/c.txt", ".x.txt"])
    os.link(folder / "b.txt", folder / "b_hard.txt")  # another file for the search, as a copy would be
    (folder / "c.txt").symlink_to(folder / "b.txt")
    (folder / "gone.txt").symlink_to(folder / "missing.txt")
    (folder / "ring.txt").symlink_to(folder / "ring.txt")
    os.mkfifo(folder / "pipe.txt")

    files, skipped = search_inputs([folder])

    assert [file.name for file in files] == ["b.txt", "b_hard.txt", "wiki/a.jsonl"]
    assert skipped.skipped_by_reason() == {
        "unknown_kind": {"(none)": 1},
        "page": {".html": 2},
        "hidden": {"(none)": 1, ".txt": 1},
        "broken_link": {".txt": 2},
        "read_before": {".txt": 1},
        "not_a_file": {".txt": 1},
    }
    assert skipped.skipped_names["broken_link"] == ["gone.txt", "ring.txt"]
    assert skipped.skipped_names["read_before"] == ["c.txt"]


def test_linked_folders_are_searched_once_each_and_cycles_of_links_end(tmp_path: Path) -> None:
    """`a_link` sorts before the real folder that it leads to, whose files keep their names all the same."""
    folder = tmp_path / "in"
    elsewhere = tmp_path / "elsewhere"
    write_files(folder, ["real/one.txt"])
    write_files(elsewhere, ["deep/two.txt"])
    (folder / "a_link").symlink_to(folder / "real")
    (folder / "out").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere / "deep")
    (elsewhere / "up").symlink_to(folder)
    (elsewhere / "deep/self").symlink_to(elsewhere)

    files, skipped = search_inputs([folder])

    assert {Path(file.location).resolve() for file in files} == {folder / "real/one.txt", elsewhere / "deep/two.txt"}
    assert [file.name for file in files] == ["again/two.txt", "real/one.txt"]
    # Links to the folder itself and to folders that were searched; `elsewhere/deep` under the name out/deep.
    assert len(skipped.skipped_names["read_before"]) == 4


def test_a_folder_that_cannot_be_listed_and_a_file_that_may_not_be_read_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusals are injected, because root may read everything."""
    write_files(tmp_path, ["open/a.txt", "closed/b.txt"])
    scandir = os.scandir

    def scandir_but_closed(path: Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir_but_closed)
        with pytest.raises(UserError, match=r"closed: the folder cannot be listed \(Permission denied\)"):
            find_inputs([tmp_path])
    monkeypatch.setattr(os, "access", lambda path, mode, **settings: Path(path).name != "b.txt")
    with pytest.raises(UserError, match=r"b\.txt: the file may not be read"):
        find_inputs([tmp_path])


def test_a_brace_pattern_gives_its_files_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, [f"shard-{number:03d}.tar" for number in range(12)])

    files = find_inputs([f"{tmp_path}/shard-{{002..010}}.tar"])

    assert [file.name for file in files] == [f"shard-{number:03d}.tar" for number in range(2, 11)]
    with pytest.raises(UserError, match=r"shard-012\.tar: no such file or folder \(one of the pattern"):
        find_inputs([f"{tmp_path}/shard-{{000..020}}.tar"])
    with pytest.raises(UserError, match="the braces are not balanced"):
        find_inputs([f"{tmp_path}/shard-{{000..020.tar"])


def test_a_path_that_cannot_be_looked_up_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)"):
        find_inputs([tmp_path / ("x" * 300 + ".txt")])


def test_an_s3_url_without_a_bucket_is_an_error() -> None:
    with pytest.raises(UserError, match=r"s3://: the URL has no bucket"):
        find_inputs(["s3://"])


def test_a_file_whose_name_has_braces_is_no_pattern(tmp_path: Path) -> None:
    write_files(tmp_path, ["a{1,2}.txt"])

    assert [file.name for file in find_inputs([tmp_path / "a{1,2}.txt"])] == ["a{1,2}.txt"]


def test_the_source_of_a_file_is_the_given_input_and_the_first_folder_below_it(tmp_path: Path) -> None:
    write_files(tmp_path, ["in/wiki/a/1.txt", "in/wiki/2.txt", "in/books/3.txt", "in/4.txt", "5.txt"])

    files = find_inputs([f"{tmp_path}/in/", tmp_path / "5.txt"])

    sources = {file.name: file.source.removeprefix(str(tmp_path)) for file in files}
    assert sources == {
        "wiki/a/1.txt": "/in/wiki",
        "wiki/2.txt": "/in/wiki",
        "books/3.txt": "/in/books",
        "4.txt": "/in",
        "5.txt": "/5.txt",
    }


def test_an_error_without_a_file_to_read_counts_what_is_there(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.html", "b.html"])

    pages = r"no file with a known ending \(left out: \.html 2 \(web pages, .* `electra-dist corpus prepare` first"
    with pytest.raises(UserError, match=pages):
        find_inputs([tmp_path])


SPARK_FILES = {  # name in a folder that Spark wrote -> reason to leave it out; None for data
    "part-00000-1f.c000.snappy.parquet": None,
    "date=2024-01-01/hour=01/part-00000.parquet": None,
    "date=2024-01-02/part-00000.parquet": None,
    "_year=2024/part-00000.parquet": None,
    "_notes/a.md": None,
    "_SUCCESS": "unknown_kind",
    "_metadata": "unknown_kind",
    "_common_metadata": "unknown_kind",
    "_metadata.parquet": "no_data",
    "._SUCCESS.crc": "hidden",
    "date=2024-01-01/.part-00000.parquet.crc": "hidden",
    "part-00000.parquet.crc": "unknown_kind",
    "_temporary/0/task_1/part-00000.parquet": "no_data",
    "_temporary/0/task_1/part-00000.json": "no_data",
    "_delta_log/00000000000000000000.json": "no_data",
    "_delta_log/00000000000000000010.checkpoint.parquet": "no_data",
}


@pytest.mark.parametrize("place", ["a folder", "S3", "S3 with a slash"])
def test_a_folder_of_sparks_is_read_without_what_is_no_data(
    tmp_path: Path, bucket: str, s3: S3Server, place: str
) -> None:
    """A folder on a disk and on S3 give the same files, also where the folder has the name of a file."""
    for name in ("data.parquet", "data.parquet-2"):
        if place == "a folder":
            write_files(tmp_path / name, list(SPARK_FILES))
        else:
            store = open_store(f"{bucket}/{name}", s3.endpoint_url)
            for file in SPARK_FILES:
                store.write(file, b"12")
    given = {"a folder": str(tmp_path), "S3": bucket, "S3 with a slash": bucket}[place] + "/data.parquet"

    found = search_inputs([given + "/" if place == "S3 with a slash" else given], s3.endpoint_url)

    assert [file.name for file in found.files] == sorted(name for name, why in SPARK_FILES.items() if why is None)
    assert {file.source for file in found.files} == {
        given,
        *(f"{given}/{folder}" for folder in ("date=2024-01-01", "date=2024-01-02", "_year=2024", "_notes")),
    }
    reasons = {why for why in SPARK_FILES.values() if why}
    counts = {reason: sum(numbers.values()) for reason, numbers in found.skipped.skipped_by_reason().items()}
    assert counts == {reason: list(SPARK_FILES.values()).count(reason) for reason in reasons}


def test_an_object_with_a_known_ending_is_no_folder_and_a_missing_one_is_an_error(bucket: str, s3: S3Server) -> None:
    store = open_store(bucket, s3.endpoint_url)
    for key in ("a.jsonl", "b.jsonl", "b.jsonl/part-0.jsonl"):
        store.write(key, b"12")

    def names(url: str) -> list[str]:
        return [file.name for file in find_inputs([f"{bucket}/{url}"], s3.endpoint_url)]

    assert names("a.jsonl") == names("a.jsonl/") == ["a.jsonl"]
    assert names("b.jsonl") == ["b.jsonl"]
    assert names("b.jsonl/") == ["part-0.jsonl"]
    with pytest.raises(StoreMissing, match=r"c\.jsonl"):
        names("c.jsonl")


def test_inputs_on_s3_are_found_by_one_request_for_each_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    service.objects = {f"wiki/{number:05d}.jsonl": bytes(number % 7) for number in range(100_000)}
    store = CountingStore(service)
    monkeypatch.setattr(module, "open_store", lambda url, endpoint_url: store)

    found = find_inputs(["s3://bucket/texts"])

    print(f"requests of a listing of 100,000 inputs: {dict(store.requests)}")
    assert [(file.name, file.size) for file in found] == [
        (f"wiki/{number:05d}.jsonl", number % 7) for number in range(100_000)
    ]
    assert store.requests == {"LIST": 100}


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a.warc.gz"])
def test_a_page_that_is_given_by_its_name_is_sent_to_the_preparation(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, [name])
    with pytest.raises(UserError, match=r"holds web pages, not text; .*`electra-dist corpus prepare`"):
        find_inputs([tmp_path / name])


def test_a_file_is_named_in_reports_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, ["in/wiki/a.txt", "in/b.txt", "x/c.txt"])
    monkeypatch.chdir(tmp_path)
    files = [*find_inputs(["in"]), *find_inputs(["./x/c.txt"])]
    assert [file.given_path for file in files] == ["in/b.txt", "in/wiki/a.txt", "x/c.txt"]

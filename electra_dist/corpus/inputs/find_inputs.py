"""Find the input files of a corpus build, in a fixed order, and count everything that is left out.

Guarantee: the order is that of the files' names below the input path, wherever the files are. Each file is read once,
also if links or several paths lead to it. Whatever is found and not read is counted with its reason (`SkippedInputs`);
a folder or file that may not be read is an error.

How: `folder_files.py` searches local folders; S3 prefixes are listed by their store.

Limits: objects on S3 are listed once, a thousand by a request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import braceexpand

from electra_dist.corpus.inputs.file_kinds import FileKind, is_no_data, kind_of, known_endings
from electra_dist.corpus.inputs.folder_files import files_in_folder
from electra_dist.corpus.inputs.skipped_inputs import SkippedInputs, encodable
from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


class InputFile(NamedTuple):
    """One input file of a corpus.

    Files are read in the order of their names. A corpus records names and sizes only, so the input folder may be
    moved.
    """

    name: str  # path relative to the given input folder; only the file's own name if the user gave the file
    path: Path  # on a local disk; for a file on S3 its name again, which is the key in `store`
    format: str  # a value of FORMATS or PAGES
    size: int  # bytes on disk
    source: str = ""  # the given input and the first folder below it, such as "texts/wiki"; a key of the report
    is_given: bool = False  # True: the user gave the file or a brace pattern; False: a folder that contains the file
    store: Store | None = None  # the S3 prefix that holds the file; None for a local file

    @property
    def location(self) -> str:
        """Return the path or the s3:// URL of the file, for messages."""
        if self.store is None:
            return str(self.path)
        return f"{self.store.url}/{self.name}"


class FoundInputs(NamedTuple):
    """Result of a search for inputs: the files to read, in reading order, and counts of what is left out."""

    files: list[InputFile]
    skipped: SkippedInputs


def find_inputs(paths: Sequence[str | Path], endpoint_url: str | None = None) -> list[InputFile]:
    """Return the input files at `paths` in reading order; `search_inputs` also counts what is left out."""
    return search_inputs(paths, endpoint_url).files


def search_inputs(
    paths: Sequence[str | Path], endpoint_url: str | None = None, *, with_pages: bool = False
) -> FoundInputs:
    """Find the input files at `paths`, and count everything found there that is not read.

    A path is a file with a known ending, a folder, an s3:// URL of either, or a brace pattern of files or URLs such as
    `shard-{000000..000099}.tar`. A file at which two paths lead is read once, under its name below the first path.
    `with_pages` also finds HTML pages and WARC files, which a corpus build does not read. Raises UserError if a path
    is missing, of unknown kind or unreadable, or if no file was found.
    """
    search = _Search(endpoint_url, with_pages)
    for path in paths:
        search.add(str(path))
    if not search.file_of_identity:
        all_paths = " ".join(str(path) for path in paths)
        left_out = search.skipped.summary()
        found = f" (left out: {left_out})" if left_out else ""
        raise UserError(
            f"--input {all_paths}: no file with a known ending{found}; give files or folders with "
            f"{known_endings(with_pages=with_pages)}"
        )
    files = sorted(search.file_of_identity.values(), key=lambda file: (file.name, file.location))
    return FoundInputs(files, search.skipped)


class _Search:
    """State of one search: the files found so far, each once, and counts of what is left out."""

    def __init__(self, endpoint_url: str | None, with_pages: bool) -> None:
        self._with_pages = with_pages
        self.file_of_identity: dict[str, InputFile] = {}  # resolved path or s3:// URL -> the file
        self.skipped = SkippedInputs()
        self._endpoint_url = endpoint_url
        self._store_of_url: dict[str, Store] = {}  # one client for all files of a brace pattern

    def add(self, given: str) -> None:
        """Add the files of one --input: a file, a folder, a brace pattern, or an s3:// URL."""
        is_remote = given.startswith("s3://")
        source = encodable(given.rstrip("/") if is_remote else os.path.normpath(given))
        paths = paths_of_input(given)
        for path in paths:
            if is_remote:
                self._add_remote(path, source)
            else:
                self._add_local(path, source, is_pattern=paths != [given])

    def _add_local(self, path: str, source: str, is_pattern: bool) -> None:
        """Add a local file, or the files below a local folder; `source` is the input that the user gave."""
        root = Path(path)
        if "://" in path:
            raise UserError(f"--input {path}: unknown kind of storage; give a local path or s3://bucket/prefix")
        try:
            exists = root.exists()
        except OSError as error:  # a folder on the path may not be entered, or a name is too long
            raise UserError(f"--input {path}: cannot be read ({error.strerror}); correct it") from None
        if not exists:
            whole = f" (one of the pattern {source})" if is_pattern else ""
            raise UserError(f"--input {path}: no such file or folder{whole}; correct the path")
        if root.is_dir():
            for name, file in files_in_folder(root, self.skipped, with_pages=self._with_pages):
                self._add_file(name, file, _source_of(source, name), is_given=False)
            return
        if self._kind_of(root.name) is None:
            known = known_endings(with_pages=self._with_pages)
            raise UserError(f"--input {path}: unknown kind of file; known: {known}; convert or rename it")
        if root.is_file():
            self._add_file(root.name, root, source, is_given=True)
        else:
            self.skipped.add("not_a_file", root.name)

    def _add_file(self, name: str, path: Path, source: str, *, is_given: bool) -> None:
        """Add a local file of known kind, unless it was added before through another path."""
        kind = self._kind_of(name)
        assert kind is not None
        identity = str(path.resolve())  # equal for two paths that lead to one file, for example through a link
        if identity in self.file_of_identity:
            self.skipped.add("read_before", name)
            return
        if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise UserError(f"{path}: the file may not be read; give read permission, or move it out of the input")
        size = path.stat().st_size
        self.file_of_identity[identity] = InputFile(name, path, kind.format, size, source, is_given)

    def _add_remote(self, url: str, source: str) -> None:
        """Add an object on S3, or all objects below the URL.

        A URL with a known file ending, such as .parquet, is taken for an object. If there is no such object, the URL
        is taken for a folder, because Spark makes folders with such names. After a slash at the end, the folder is
        tried first.
        """
        may_be_object = self._kind_of(url) is not None
        if may_be_object and not url.endswith("/"):
            with contextlib.suppress(StoreMissing):
                self._add_named_object(url, source)
                return
        store = self._open(url)
        sizes = store.sizes()
        if may_be_object and not sizes:
            self._add_named_object(url, source)
        for key, size in sizes.items():
            if _is_hidden(key):
                self.skipped.add("hidden", key)
            elif self._kind_of(key) is None:
                self.skipped.add("unknown_kind", key)
            elif is_no_data(key):
                self.skipped.add("no_data", key)
            else:
                self._add_object(store, key, size, _source_of(source, key), is_given=False)

    def _add_named_object(self, url: str, source: str) -> None:
        """Add the object that a URL names; raise StoreMissing if there is none."""
        parent, _, name = url.rstrip("/").rpartition("/")
        store = self._open(parent)
        self._add_object(store, name, store.size(name), source, is_given=True)

    def _add_object(self, store: Store, key: str, size: int, source: str, *, is_given: bool) -> None:
        """Add an object of known kind, unless it was added before through another path."""
        kind = self._kind_of(key)
        assert kind is not None
        identity = f"{store.url}/{key}"
        if identity in self.file_of_identity:
            self.skipped.add("read_before", key)
            return
        self.file_of_identity[identity] = InputFile(key, Path(key), kind.format, size, source, is_given, store)

    def _kind_of(self, name: str) -> FileKind | None:
        return kind_of(name, with_pages=self._with_pages)

    def _open(self, url: str) -> Store:
        if url not in self._store_of_url:
            self._store_of_url[url] = open_store(url, self._endpoint_url)
        return self._store_of_url[url]


def paths_of_input(given: str) -> list[str]:
    """Return the paths that an input stands for; braces expand as in bash: `a-{0..2}.tar` gives a-0.tar to a-2.tar."""
    if "{" not in given or ("://" not in given and Path(given).exists()):
        return [given]
    try:
        return list(braceexpand.braceexpand(given))
    except ValueError:  # UnbalancedBracesError, which is one
        raise UserError(
            f"--input {given}: the braces are not balanced; write a pattern like shard-{{000..099}}.tar"
        ) from None


def _source_of(given: str, name: str) -> str:
    """Return a file's source: in the input folder texts, "texts/wiki" for wiki/a.txt, and "texts" for a.txt."""
    first_folder, separator, _ = name.partition("/")
    return f"{given}/{encodable(first_folder)}" if separator else given


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)

"""Find the input files of a corpus build, in a fixed order, and count everything that is left out.

Guarantee: the order is that of the files' names below the input path, wherever the files are. Each file is read once,
also if links or several paths lead to it. Whatever is found and not read is counted with its reason (`Counts`); a
folder or file that may not be read is an error.

Limits: objects on S3 are listed once, a thousand by a request; other URLs as `store/url_files.py` says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import braceexpand

from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.file_kinds import FileKind, encodable, is_no_data, is_page, kind_of, known_endings
from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.atomic_files import did_you_mean
from electra_dist.store.interface import Store
from electra_dist.store.open_store import REMOTE_SCHEMES, open_store
from electra_dist.store.url_files import list_url

_PREPARE_PAGES = "extract the text with `electra-dist corpus prepare` first (docs/corpus_prepare.md)"


class InputFile(NamedTuple):
    """One input file of a corpus, as the search for inputs found it.

    Files are read in the order of their names. A corpus records names and sizes only, so the input folder may be
    moved.
    """

    name: str  # path relative to the given input folder; only the file's own name if the user gave the file
    location: str  # local path or URL
    format: str  # a value of FORMATS or PAGES
    size: int  # bytes on disk
    source: str = ""  # the given input and the first folder below it, such as "texts/wiki"; a key of the report
    is_given: bool = False  # True: the user gave the file or a pattern; False: a folder that contains the file
    version: str = ""  # of a file at a URL other than s3://, by which a change is noticed; see `store/url_files.py`

    @property
    def is_remote(self) -> bool:
        """Return whether the file is at a URL, so that it is fetched before it is read."""
        return "://" in self.location

    @property
    def given_path(self) -> str:
        """Return the path of the file as the user would write it: as it was given, or below the given folder."""
        name = encodable(self.name)
        if self.is_given:
            return self.source if self.source.endswith(name) else name
        folder, separator, _ = name.partition("/")
        given = self.source.removesuffix(f"/{folder}") if separator else self.source
        return f"{given}/{name}"


class FoundInputs(NamedTuple):
    """Result of a search for inputs: the files to read, in reading order, and counts of what is left out."""

    files: list[InputFile]
    skipped: Counts


def num_with_content(files: Iterable[InputFile]) -> int:
    """Return how many files are not empty; an empty file is counted as left out."""
    return sum(file.size > 0 for file in files)


def refuse_output_among_inputs(output: str, inputs: Sequence[str]) -> None:
    """Raise UserError if an output is inside an input or is one: it would be read as text, or replace the text."""
    for path in itertools.chain.from_iterable(map(paths_of_input, inputs)):
        if "://" in output:
            is_inside = f"{output.rstrip('/')}/".startswith(f"{path.rstrip('/')}/")
        else:
            is_inside = "://" not in path and Path(output).resolve().is_relative_to(Path(path).resolve())
        if is_inside:
            raise UserError(f"--output {output} is inside the input {path}; choose a path outside of {path}")


def find_inputs(paths: Sequence[str | Path], endpoint_url: str | None = None) -> list[InputFile]:
    """Return the input files at `paths` in reading order; `search_inputs` also counts what is left out."""
    return search_inputs(paths, endpoint_url).files


def search_inputs(
    paths: Sequence[str | Path], endpoint_url: str | None = None, *, with_pages: bool = False
) -> FoundInputs:
    """Find the input files at `paths`, and count everything found there that is not read.

    A path is a file with a known ending, a folder, a URL of either, or a brace pattern of files or URLs such as
    `shard-{000000..000099}.tar`. A file at which two paths lead is read once, under its name below the first path.
    `with_pages` also finds HTML pages and WARC files, which a corpus build does not read. Raises UserError if a path
    is missing, of unknown kind or unreadable, or if no file was found.
    """
    search = _Search(endpoint_url, with_pages)
    for path in paths:
        search.add(str(path))
    if not search.file_of_identity:
        all_paths = " ".join(str(path) for path in paths)
        left_out = search.skipped.summary_of_skipped()
        found = f" (left out: {left_out})" if left_out else ""
        next_step = f"give files or folders with {known_endings(with_pages=with_pages)}"
        if "page" in search.skipped.skipped:
            next_step = f"{_PREPARE_PAGES}, or {next_step}"
        raise UserError(f"--input {all_paths}: no file with a known ending{found}; {next_step}")
    files = sorted(search.file_of_identity.values(), key=lambda file: (file.name, file.location))
    return FoundInputs(files, search.skipped)


class _Search:
    """State of one search: the files found so far, each once, and counts of what is left out."""

    def __init__(self, endpoint_url: str | None, with_pages: bool) -> None:
        self._with_pages = with_pages
        self.file_of_identity: dict[str, InputFile] = {}  # resolved path or s3:// URL -> the file
        self.skipped = Counts()
        self._endpoint_url = endpoint_url
        self._store_of_url: dict[str, Store] = {}  # one client for all files of a brace pattern

    def add(self, given: str) -> None:
        """Add the files of one --input: a file, a folder, a brace pattern, or a URL."""
        is_remote = "://" in given
        source = encodable(given.rstrip("/") if is_remote else os.path.normpath(given))
        paths = paths_of_input(given)
        for path in paths:
            if path.startswith(REMOTE_SCHEMES):
                self._add_remote(path, source)
            elif is_remote:
                self._add_url(path, source)
            else:
                self._add_local(path, source, is_pattern=paths != [given])

    def _add_local(self, path: str, source: str, is_pattern: bool) -> None:
        """Add a local file, or the files below a local folder; `source` is the input as the user gave it.

        `is_pattern` says that `path` is one of the paths for which a brace pattern stands. Raises UserError if there
        is none.
        """
        root = Path(path)
        try:
            exists = root.exists()
        except OSError as error:  # a folder on the path may not be entered, or a name is too long
            raise UserError(f"--input {path}: cannot be read ({error.strerror}); correct it") from None
        if not exists:
            whole = f" (one of the pattern {source})" if is_pattern else ""
            raise UserError(f"--input {path}: no such file or folder{whole}{did_you_mean(root)}; correct the path")
        if root.is_dir():
            self._add_folder(root, source)
            return
        self._refuse_unknown_kind(path)
        if root.is_file():
            self._add_file(root.name, root, source, is_given=True)
        else:
            self.skipped.skip_input("not_a_file", root.name)

    def _add_folder(self, root: Path, source: str) -> None:
        for name, file in _FolderSearch(root, self.skipped).files():
            reason = _reason_to_skip(file, name, self._with_pages)
            if reason is None:
                self._add_file(name, file, _source_of(source, name), is_given=False)
            else:
                self.skipped.skip_input(reason, name)

    def _refuse_unknown_kind(self, path: str) -> None:
        name = Path(path).name
        if self._kind_of(name) is not None:
            return
        if is_page(name):
            raise UserError(f"--input {path}: holds web pages, not text; {_PREPARE_PAGES}")
        known = known_endings(with_pages=self._with_pages)
        raise UserError(f"--input {path}: unknown kind of file; known: {known}; convert or rename it")

    def _add_file(self, name: str, path: Path, source: str, *, is_given: bool) -> None:
        if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise UserError(f"{path}: the file may not be read; give read permission, or move it out of the input")
        identity = str(path.resolve())  # equal for two paths that lead to one file, for example through a link
        self._add(name, str(path), path.stat().st_size, source, is_given=is_given, identity=identity)

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
            if self._is_read(key):
                self._add(key, f"{store.url}/{key}", size, _source_of(source, key), is_given=False)

    def _is_read(self, key: str) -> bool:
        """Return whether an object below a given folder is read; count it with its reason if it is not."""
        is_hidden = any(part.startswith(".") for part in PurePosixPath(key).parts)
        reason = "hidden" if is_hidden else _reason_by_name(key, self._with_pages)
        if reason is not None:
            self.skipped.skip_input(reason, key)
        return reason is None

    def _add_named_object(self, url: str, source: str) -> None:
        """Add the object that a URL names; raise StoreMissing if there is none."""
        parent, _, name = url.rstrip("/").rpartition("/")
        store = self._open(parent)
        self._add(name, f"{store.url}/{name}", store.size(name), source, is_given=True)

    def _add_url(self, url: str, source: str) -> None:
        """Add the file at a URL, or all files below it whose ending names a format; `source` labels their text."""
        listing = list_url(url)
        for file in listing.files:
            if self._is_read(file.name):
                label = _source_of(source, file.name) if listing.is_folder else source
                is_given = not listing.is_folder
                self._add(file.name, file.location, file.size, label, is_given=is_given, version=file.version)

    def _add(
        self,
        name: str,
        location: str,
        size: int,
        source: str,
        *,
        is_given: bool,
        identity: str = "",
        version: str = "",
    ) -> None:
        """Add a file with a known ending, unless it was added before through another path.

        `name` is its path below the input folder. `is_given` says that the user gave this file, not a folder around
        it. `identity`, by default the location, is equal for two paths that lead to one file. An empty file is also
        counted as left out, but keeps its place in the order of the files.
        """
        identity = identity or location
        if identity in self.file_of_identity:
            self.skipped.skip_input("read_before", name)
            return
        kind = self._kind_of(name)
        assert kind is not None
        self.file_of_identity[identity] = InputFile(name, location, kind.format, size, source, is_given, version)
        if size == 0:
            self.skipped.skip_input("empty_file", name)

    def _kind_of(self, name: str) -> FileKind | None:
        return kind_of(name, with_pages=self._with_pages)

    def _open(self, url: str) -> Store:
        if url not in self._store_of_url:
            self._store_of_url[url] = open_store(url, self._endpoint_url)
        return self._store_of_url[url]


def _reason_to_skip(path: Path, name: str, with_pages: bool) -> str | None:
    """Return why an entry of a folder is left out, as a key of `SKIP_REASONS`; None if the entry is read."""
    try:
        if not path.exists():  # the target is missing, or links lead to one another in a circle
            return "broken_link"
        if not path.is_file():
            return "not_a_file"
    except OSError as error:
        raise UserError(
            f"{path}: what the link leads to cannot be read ({error.strerror}); give read permission, or remove it"
        ) from None
    return _reason_by_name(name, with_pages)


def _reason_by_name(name: str, with_pages: bool) -> str | None:
    if kind_of(name, with_pages=with_pages) is None:
        return "page" if is_page(name) else "unknown_kind"
    return "no_data" if is_no_data(name) else None


class _FolderSearch:
    """Search for the visible files below a folder: first in real folders, then in folders that links lead to.

    No folder is searched twice, which also ends cycles of links. If a folder is reached by a real path and by a link,
    its files therefore have the names of the real path.
    """

    def __init__(self, root: Path, skipped: Counts) -> None:
        self._root = root
        self._skipped = skipped  # gets hidden entries, and folders that are reached again
        self._waiting = deque([root])  # this folder, then the links to folders that are found
        self._searched: set[tuple[int, int]] = set()  # device and inode of the folders

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the name below the folder and the path of each file, sorted within what one link leads to."""
        while self._waiting:
            for path in sorted(self._files_below(self._waiting.popleft())):
                yield self._name(path), path

    def _files_below(self, start: Path) -> Iterator[Path]:
        """Yield the paths of the files in `start` and its real sub-folders; put links to folders off."""
        waiting = [start]
        while waiting:
            folder = waiting.pop()
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in self._searched:
                self._skipped.skip_input("read_before", self._name(folder))
                continue
            self._searched.add(identity)
            for entry in _entries(folder):
                path = folder / entry.name
                if entry.name.startswith("."):
                    self._skipped.skip_input("hidden", self._name(path))
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_symlink() and os.path.isdir(path):  # False, not an error, for a link in a circle
                    self._waiting.append(path)
                else:
                    yield path

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"{folder}: the folder cannot be listed ({error.strerror}); give read permission, or move it out of the "
            "input"
        ) from None


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
    """Return the label of a file's text in reports: the input folder and the first folder below it, if there is one.

    In the input folder texts, wiki/a.txt is of the source "texts/wiki", and a.txt of "texts".
    """
    first_folder, separator, _ = name.partition("/")
    return f"{given}/{encodable(first_folder)}" if separator else given

"""Find the members with texts in tar and zip archives, among them WebDataset shards that others wrote.

Guarantee: each member of known kind is yielded once, in the order of the archive; every other one is counted with the
reason why it is left out. A tar that was cut off or has a damaged header is an error, even where Python's tarfile
takes the damage for the end of the archive.

How: the `webdataset` package joins consecutive members whose names differ only in their ending to one sample. The
ending is everything from the first dot of the file name on.

    .TEXT_FIELD                one document, whatever the ending is (TEXT_FIELD is --text-field)
    .txt, .md                  each is one document, blank lines or not; left out beside .TEXT_FIELD
    .json                      a document, or several; left out beside one of the above
    .jsonl .csv .parquet ...   read as the same file outside of an archive
    all others (.cls, .jpg)    left out

Limits: a sample is held in memory as a whole; a member of more than 256 MiB and a sample of more than 1 GiB are
errors. Archives within archives are not read.
"""

from __future__ import annotations

import functools
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, BinaryIO, NamedTuple

from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.file_kinds import MOST_DOCUMENT_BYTES, FileKind, kind_of
from electra_dist.data.shard import CheckedTarInfo

ARCHIVES = ("tar", "zip")
_ONE_TEXT = FileKind("md", "")  # a member that is one document as a whole
_READ_BYTES = 1 << 20
_MOST_SAMPLE_BYTES = 1 << 30  # a sample has as many members as have names that are equal up to the first dot


class _Member(NamedTuple):
    """One regular file in an archive; its content is read only when `read` is called."""

    name: str
    read: Callable[[], bytes]


class TextMember(NamedTuple):
    """A file in an archive that holds documents, with its whole content, which may be compressed."""

    name: str  # in the archive
    kind: FileKind
    data: bytes


class ArchiveReader:
    """Reader of the files with texts in one tar or zip archive, which counts those that it leaves out."""

    def __init__(self, name: str, text_field: str, counts: Counts) -> None:
        """Take the archive's `name` for reports, and `counts`, to which the members that are left out are added.

        `text_field` is also a file ending: with "caption", each member *.caption is one document of plain text.
        """
        self._name = name
        self._text_field = text_field
        self._counts = counts
        self._newest = ""  # name of the member that was read last

    def members(self, stream: BinaryIO | io.BufferedIOBase, file_format: str) -> Iterator[TextMember]:
        """Yield the files with texts in a decompressed archive.

        `file_format` is "tar" or "zip"; the stream of a zip archive must be seekable. Raises an error of
        `DAMAGED_FILE_ERRORS` (`text_readers.py`) if the archive is damaged, cut off or encrypted.
        """
        from webdataset.tariterators import group_by_keys  # its import takes long

        members = self._tar_members(stream) if file_format == "tar" else self._zip_members(stream)
        samples = group_by_keys(self._known_members(members), keys=_sample_and_ending, lcase=False)
        while True:
            try:
                sample = next(samples, None)
            except ValueError:
                raise OSError(f"two members, one after the other, have the name {self._newest}") from None
            if sample is None:
                return
            yield from self._members_of_sample(sample)

    def _known_members(self, members: Iterator[_Member]) -> Iterator[dict[str, Any]]:
        """Yield members with a known ending as dictionaries, which webdataset groups to samples; count the others."""
        newest_sample = None
        sample_bytes = 0
        for member in members:
            name = member.name.removeprefix("./")
            parts = name.split("/")
            sample, ending = _sample_and_ending(name)
            if parts[0] == "__MACOSX" or any(part.startswith(".") for part in parts):
                self.skip("hidden", name)
            elif ending is None or self._kind_of_member(ending) is None:
                self.skip("unknown_kind", name)
            else:
                data = member.read()
                sample_bytes = len(data) + (sample_bytes if sample == newest_sample else 0)
                if sample_bytes > _MOST_SAMPLE_BYTES:
                    raise OSError(
                        f"more than {_MOST_SAMPLE_BYTES >> 30} GiB in members whose names are equal up to the first "
                        f"dot and are taken for one WebDataset sample, such as {name}; give them other names"
                    )
                newest_sample = sample
                self._newest = name
                yield {"fname": name, "data": data, "__url__": self._name}

    def _members_of_sample(self, sample: dict[str, Any]) -> Iterator[TextMember]:
        """Yield the texts of a WebDataset sample (files that differ in their endings only), without its metadata.

        `sample` maps endings, such as ".txt", to contents, and `__key__` to the name that the files have in common.
        """
        kinds = {ending: self._kind_of_member(ending) for ending in sample if ending.startswith(".")}
        text_field_endings = [ending for ending in kinds if self._is_text_field_ending(ending)]
        text_endings = [ending for ending, kind in kinds.items() if kind and kind.format == _ONE_TEXT.format]
        chosen_endings = text_field_endings or text_endings
        for ending, kind in kinds.items():
            assert kind is not None
            name = sample["__key__"] + ending
            if chosen_endings and ending not in chosen_endings and kind.format in (_ONE_TEXT.format, "json"):
                self.skip("metadata", name)
            else:
                yield TextMember(name, kind, sample[ending])

    def _kind_of_member(self, ending: str) -> FileKind | None:
        """Return the kind of a member by its ending, such as ".2.json.gz"; None if it is left out."""
        if self._is_text_field_ending(ending):
            return _ONE_TEXT
        kind = kind_of(f"member{ending}")
        if kind is None or kind.format in ARCHIVES:
            return None
        if kind.format == "txt":
            return FileKind(_ONE_TEXT.format, kind.compression)
        return kind

    def _is_text_field_ending(self, ending: str) -> bool:
        return ending.lower() == f".{self._text_field.lower()}"

    def skip(self, reason: str, member_name: str) -> None:
        """Count a member that is left out; `reason` is a key of `SKIP_REASONS`."""
        self._counts.skip_input(reason, f"{self._name}: {member_name}")

    def _tar_members(self, stream: BinaryIO | io.BufferedIOBase) -> Iterator[_Member]:
        """Yield the regular files of a tar archive; links and devices in it are counted as left out."""
        watched = _WatchedStream(stream)
        # Mode "r|" reads forwards only, and no file is kept: the archive may be larger than memory.
        with tarfile.open(fileobj=watched, mode="r|", tarinfo=CheckedTarInfo) as tar:  # type: ignore[call-overload]
            for member in tar:
                tar.members = []  # tarfile keeps the headers of all members otherwise
                if member.isreg():
                    content = tar.extractfile(member)
                    assert content is not None
                    yield _Member(member.name, functools.partial(_read_tar_member, content, member))
                elif not member.isdir():
                    self.skip("not_a_file", member.name)
            watched.check_end(tar.offset)

    def _zip_members(self, stream: BinaryIO | io.BufferedIOBase) -> Iterator[_Member]:
        """Yield the regular files of a zip archive, in the order of its directory."""
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield _Member(info.filename, functools.partial(_read_zip_member, archive, info))


def _sample_and_ending(name: str) -> tuple[str | None, str | None]:
    """Divide a member's name into the key of its sample and its ending, as webdataset does; None for a name without.

    The ending keeps its dot, so that none is equal to an entry of webdataset's own, such as `__key__`.
    """
    from webdataset.tariterators import base_plus_ext  # its import takes long

    sample, ending = base_plus_ext(name)
    return sample, None if ending is None else f".{ending}"


def _read_tar_member(content: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """Return the content of a member; raise OSError above 256 MiB, which a sparse file in a small archive may have."""
    _check_size(member.name, member.size)
    return content.read()


def _check_size(name: str, size: int) -> None:
    if size > MOST_DOCUMENT_BYTES:
        raise OSError(f"member {name}: more than {MOST_DOCUMENT_BYTES >> 20} MiB")


def _read_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the content of a member, whose checksum `zipfile` verifies; raise OSError if it cannot be read."""
    _check_size(info.filename, info.file_size)
    try:
        return archive.read(info)
    except (RuntimeError, zlib.error) as error:  # RuntimeError: encrypted; NotImplementedError is one, too
        raise OSError(f"member {info.filename}: {error}") from None


class _WatchedStream:
    """Stream of a tar archive that keeps the bytes read last, so that `check_end` can examine the archive's end."""

    _KEPT_BYTES = 1 << 16  # more than tarfile reads ahead

    def __init__(self, stream: BinaryIO | io.BufferedIOBase) -> None:
        self._stream = stream
        self._position = 0
        self._newest = b""

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        self._newest = (self._newest + data)[-self._KEPT_BYTES :] if len(data) < self._KEPT_BYTES else data
        return data

    def check_end(self, offset: int) -> None:
        """Raise OSError or EOFError if anything but zeros, at least 512 of them, follows the archive's last member.

        The last member ends at byte `offset`. A tar ends with two blocks of 512 zeros. tarfile stops without an error
        at a damaged header, and at the end of a file that was cut off between two members.
        """
        num_bytes = self._position - offset
        rest = self._newest[len(self._newest) - num_bytes :]
        while rest:
            if rest.strip(b"\0"):
                raise OSError(f"a damaged header, or data behind the end of the archive, after {offset} bytes")
            rest = self.read(_READ_BYTES)
        if self._position - offset < tarfile.BLOCKSIZE:
            raise EOFError("the archive is cut off: it has no end-of-archive mark")

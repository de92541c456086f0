"""Take a bounded sample of the documents of a corpus, to train a vocabulary on.

Guarantee: the sample depends on the inputs, the seed and the limit alone. Every document has the same chance, whatever
its source and place. The sample holds at most `limit_bytes` of documents. If the documents exceed the limit, it holds
about half of the limit or more, unless its documents are few and large.

How: each document has a level: 0 with probability 1/2, 1 with probability 1/4, and so on, by a keyed hash. Its text is
appended to the file of its level. Whenever the files together exceed the limit, the file of the lowest level is
deleted, and documents of that level are left out from then on.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard
from pydantic import NonNegativeInt, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from electra_dist.corpus.stages.document_order import document_key
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import is_temporary, readable, replacing
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.regular_files import open_regular, read_regular

_KEY_BITS = 64
_DONE_FILE = "sample.json"  # written when the sample is complete
_LEVEL_NAME = re.compile(r"[0-9]{2}\.zst")


class _Record(TypedDict):
    """Content of sample.json, which is written when the sample is complete."""

    description: dict[str, str | int]  # the inputs and settings from which the sample was taken
    files: dict[str, NonNegativeInt]  # name of a file of the sample -> bytes of its texts, uncompressed


_RECORD = TypeAdapter(_Record)


class VocabularySample:
    """Random sample of a corpus's documents in a folder; used again for the same inputs, limit and seed."""

    def __init__(self, folder: Path, inputs_digest: str, limit_bytes: int, seed: int) -> None:
        """Leave the folder as it is. `inputs_digest` must change if the documents change or are read otherwise."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._seed = seed
        self._description = {"inputs": inputs_digest, "limit_bytes": limit_bytes, "seed": seed}

    def is_finished(self) -> bool:
        """Return whether the folder holds the complete sample of these inputs, with this limit and seed."""
        try:
            stored = self._record()
        except (OSError, DamagedJson):
            return False
        is_whole = all(_LEVEL_NAME.fullmatch(name) and (self._folder / name).exists() for name in stored["files"])
        return is_whole and stored["description"] == self._description

    def take(self, texts: Iterable[tuple[int, int, str]], progress: Callable[[int], None]) -> None:
        """Read all documents, and write a sample of them to the folder in place of an earlier one.

        `texts` gives (position of the file among the inputs, position of the document in the file, text). `progress`
        is called for each document with the position of its file.
        """
        self.delete()
        self._folder.mkdir(parents=True, exist_ok=True)
        levels: dict[int, _LevelFile] = {}
        lowest = 0
        for file, number, text in texts:
            progress(file)
            level = _KEY_BITS - document_key(self._seed, file, number).bit_length()
            if level < lowest:
                continue
            if level not in levels:
                levels[level] = _LevelFile(self._folder / f"{level:02d}.zst")
            levels[level].add(text)
            while sum(part.num_bytes for part in levels.values()) > self._limit_bytes:
                if lowest in levels:
                    levels.pop(lowest).delete()
                lowest += 1
        for part in levels.values():
            part.close()
        files = {part.path.name: part.num_bytes for _, part in sorted(levels.items())}
        with replacing(self._folder / _DONE_FILE) as out:
            out.write(json.dumps({"description": self._description, "files": files}).encode())

    def num_bytes(self) -> int:
        """Return the total size of the finished sample's texts, in bytes of UTF-8."""
        return sum(self._files().values())

    def texts(self) -> Iterator[str]:
        """Yield the texts of the finished sample, always in the same order; raise UserError if a file is damaged."""
        for name, num_bytes in self._files().items():
            path = self._folder / name
            num_read = 0
            try:
                with (
                    readable(path),
                    open_regular(path) as raw,
                    zstandard.ZstdDecompressor().stream_reader(raw) as stream,
                ):
                    while head := stream.read(4):
                        text = stream.read(min(int.from_bytes(head, "little"), num_bytes))
                        num_read += len(text)
                        yield text.decode()
            except (zstandard.ZstdError, UnicodeDecodeError) as error:
                raise self._damaged(path, str(error)) from None
            if num_read != num_bytes:
                raise self._damaged(path, f"it has {num_read} bytes of text, not {num_bytes}")

    def delete(self) -> None:
        """Delete the files of the sample, finished or not, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):  # there is no such folder, or it holds other files
            for file in list(self._folder.iterdir()):
                if _LEVEL_NAME.fullmatch(file.name) or file.name == _DONE_FILE or is_temporary(file.name):
                    file.unlink()
            self._folder.rmdir()

    def _files(self) -> dict[str, int]:
        return self._record()["files"]

    def _record(self) -> _Record:
        return validate_json(_RECORD, parse_json_object(read_regular(self._folder / _DONE_FILE)))

    def _damaged(self, path: Path, reason: str) -> UserError:
        return UserError(f"{path}: damaged, because {reason}; delete {self._folder} and run the command again")


class _LevelFile:
    """Writer of one compressed file of sampled texts: the length of each text (4 bytes), then its UTF-8."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # size of the texts, uncompressed
        self._raw = path.open("wb")
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._raw)

    def add(self, text: str) -> None:
        data = text.encode()
        self._stream.write(len(data).to_bytes(4, "little"))
        self._stream.write(data)
        self.num_bytes += len(data)

    def close(self) -> None:
        self._stream.close()  # closes the raw file, too

    def delete(self) -> None:
        self.close()
        self.path.unlink()

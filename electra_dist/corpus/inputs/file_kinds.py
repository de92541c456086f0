"""Recognize the format and the compression of an input file by the endings of its name.

The content is not looked at: `a.txt` and `a.txt.gz` are both text, and a file without a known ending is of no known
kind. Other parts of a name do not matter, so `c4-train.00000-of-01024.json.gz` is JSON in gzip.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".wet": "wet",
    ".md": "md",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tar": "tar",
    ".zip": "zip",
}
PAGES = {".warc": "warc", ".html": "html", ".htm": "html"}  # contain HTML, which only `corpus prepare` can read
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
NO_ENDING = "(none)"  # stands for the ending of a name that has none, in counts by ending
_COMPRESSED_WITHIN = (".parquet", ".arrow", ".zip")  # a compressed file of these kinds is of no known kind
_SHORT_ENDINGS = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_FOLDERS_WITHOUT_DATA = ("_temporary", "_delta_log")  # what Spark has not finished, and its log of a table
_USUAL_ENDING = re.compile(r"\.(?!\d+$)\w{1,10}", re.ASCII)  # not digits only: numbers differ from file to file


class FileKind(NamedTuple):
    """Format and compression of an input file."""

    format: str  # a value of FORMATS or PAGES
    compression: str  # one of COMPRESSIONS; "" if the file is not compressed


def kind_of(name: str, *, with_pages: bool = False) -> FileKind | None:
    """Return format and compression of a file by the endings of its name, in any letter case; None if unknown.

    `a.parquet.gz` is unknown, because parquet is compressed within the file. `with_pages` also accepts HTML and WARC
    files.
    """
    endings = _endings(name)
    compression = ""
    if endings and endings[-1] in COMPRESSIONS:
        compression = endings.pop()
    if not endings:
        return None
    known = FORMATS | PAGES if with_pages else FORMATS
    file_format = known.get(endings[-1])
    if file_format is None or (compression and endings[-1] in _COMPRESSED_WITHIN):
        return None
    return FileKind(file_format, compression)


def is_no_data(name: str) -> bool:
    """Return whether a file's name marks it as no data, so that a search of its folder leaves it out.

    As in Spark, pandas and pyarrow, a parquet table is left out if its name or a folder's name begins with an
    underscore, except for partitions (`_year=2024`). So are all files in Spark's folders `_temporary` and
    `_delta_log`. `_posts/a.md` is text.
    """
    parts = PurePosixPath(name).parts
    if any(part in _FOLDERS_WITHOUT_DATA for part in parts[:-1]):
        return True
    return name.lower().endswith(".parquet") and any(part.startswith("_") and "=" not in part for part in parts)


def ending_of(name: str) -> str:
    """Return the ending under which reports count a file: ".txt", ".json.gz", or `NO_ENDING` for a name without one.

    An ending counts only if it consists of one to ten letters, digits or `_`, and not of digits alone.
    """
    endings = _endings(name)
    num_parts = 2 if endings and endings[-1] in COMPRESSIONS else 1
    usual_endings = [ending for ending in endings[-num_parts:] if _USUAL_ENDING.fullmatch(ending)]
    return "".join(usual_endings) or NO_ENDING


def encodable(name: str) -> str:
    r"""Return a file's name with escapes such as `\udcff` for bytes that are not UTF-8, so that JSON can hold it."""
    return name.encode("utf-8", "backslashreplace").decode()


def known_endings(*, with_pages: bool = False) -> str:
    """Return the file endings that can be read, as text for error messages: ".txt, .jsonl, ..."."""
    known = FORMATS | PAGES if with_pages else FORMATS
    return f"{', '.join(known)}, each but {', '.join(_COMPRESSED_WITHIN)} also with {', '.join(COMPRESSIONS)}"


def _endings(name: str) -> list[str]:
    """Return the endings of a file's name in lower case: [".tar", ".gz"] for a.TAR.GZ and for a.tgz."""
    lower_case_name = PurePosixPath(name).name.lower()
    for short_ending, long_ending in _SHORT_ENDINGS.items():
        if lower_case_name.endswith(short_ending):
            lower_case_name = lower_case_name.removesuffix(short_ending) + long_ending
    return PurePosixPath(lower_case_name).suffixes

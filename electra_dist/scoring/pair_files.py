"""Read minimal pairs from files in the formats of BLiMP, MultiBLiMP and Zorro.

Every line of a file belongs to a pair; a line that does not is an error with its number, so no pair is left out
silently. The digest covers the bytes of all files. The suffix decides the format.
- `.jsonl` (BLiMP, https://github.com/alexwarstadt/blimp): one JSON object per line with the sentences `sentence_good`
  and `sentence_bad`. The kind of a pair is its `UID`, without one its `linguistics_term`, without both the name of the
  file.
- `.tsv` (MultiBLiMP, https://github.com/jumelet/multiblimp): a table with the columns `sen` and `wrong_sen`, quoted as
  pandas writes it. The kind of a pair is its `phenomenon`, without one the name of the file.
- `.txt` (Zorro, https://github.com/phueb/Zorro): pairs of lines, first the ungrammatical sentence, then the
  grammatical one. The kind of a pair is the name of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular
from electra_dist.tables import csv_table, parse_json_line, split_lines

_SUFFIXES = (".jsonl", ".tsv", ".txt")


class SentencePair(NamedTuple):
    """Grammatical and ungrammatical sentence that differ little, and the kind of grammar that the pair tests."""

    kind: str  # such as "adjunct_island"
    good: str
    bad: str


class PairFiles(NamedTuple):
    """Minimal pairs that were read from files, in the order of the files, and a digest of these files."""

    pairs: list[SentencePair]
    sha256: str  # of the names and the bytes of all files

    def sample(self, per_kind: int | None) -> PairFiles:
        """Return a fixed random sample of at most `per_kind` pairs (None: all) of each kind, in the files' order."""
        if per_kind is None:
            return self
        rows_of: dict[str, list[int]] = {}
        for row, pair in enumerate(self.pairs):
            rows_of.setdefault(pair.kind, []).append(row)
        kept_rows: list[int] = []
        for rows in rows_of.values():
            order = np.random.default_rng(seed=0).permutation(len(rows))
            kept_rows += [rows[index] for index in order[:per_kind]]
        return self._replace(pairs=[self.pairs[row] for row in sorted(kept_rows)])


def read_pair_files(paths: Sequence[Path]) -> PairFiles:
    """Read minimal pairs from files and folders; of a folder, all .jsonl, .tsv and .txt files are read, by name.

    If a line belongs to no pair, UserError names the file and the line.
    """
    digest = hashlib.sha256()
    pairs: list[SentencePair] = []
    for file in _files(paths):
        raw = read_regular(file, MOST_DATA_BYTES)
        digest.update(f"{file.name} {len(raw)}\n".encode())
        digest.update(raw)
        lines = split_lines(raw, file)
        while lines and not lines[-1].strip():
            lines.pop()
        if not lines:
            raise UserError(f"{file}: no sentences; add at least one pair, or remove the file")
        if file.suffix.lower() == ".jsonl":
            pairs += [_pair_of_object(file, number, line) for number, line in enumerate(lines, start=1)]
        elif file.suffix.lower() == ".tsv":
            pairs += _pairs_of_table(file, raw)
        else:
            pairs += _pairs_of_lines(file, lines)
    return PairFiles(pairs=pairs, sha256=digest.hexdigest())


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return `paths` with each folder replaced by its files of pairs, sorted by name; raise UserError for others."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files_of_folder = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
            if not files_of_folder:
                raise UserError(f"{path}: no .jsonl, .tsv or .txt file in this folder; name a folder of minimal pairs")
            files += files_of_folder
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder of minimal pairs; correct the path")
        elif path.suffix.lower() not in _SUFFIXES:
            raise UserError(
                f"{path}: not a file of minimal pairs; use a .jsonl file in BLiMP's format, a .tsv file in "
                f"MultiBLiMP's or a .txt file in Zorro's"
            )
        else:
            files.append(path)
    return files


def _pair_of_object(file: Path, number: int, line: str) -> SentencePair:
    """Parse line `number` of a .jsonl file as a pair; if it names no kind of pair, the file's name is the kind."""
    json_line = parse_json_line(file, number, line)
    record = json_line.record
    for key in ("sentence_good", "sentence_bad"):
        if record.get(key) is None or not json_line.text(key).strip():
            raise UserError(f"{file}:{number}: no sentence in `{key}`; add the key with its sentence")
    kind_keys = [key for key in ("UID", "linguistics_term") if record.get(key) not in (None, "")]
    kind = json_line.name(kind_keys[0]) if kind_keys else file.stem
    return SentencePair(kind=kind, good=record["sentence_good"], bad=record["sentence_bad"])


def _pairs_of_table(file: Path, raw: bytes) -> list[SentencePair]:
    """Parse a .tsv file's content; where a line names no `phenomenon`, the file's name is the kind of the pair."""
    table = csv_table(file, raw, "\t")
    for column in ("sen", "wrong_sen"):
        if column not in table.columns:
            raise UserError(
                f"{file}: no column `{column}`; minimal pairs have sen and wrong_sen, this table "
                f"has {', '.join(table.columns)}"
            )
    pairs = []
    for _, line in table.lines():
        good, bad = line.text("sen"), line.text("wrong_sen")
        if not good.strip() or not bad.strip():
            raise UserError(f"{line.place}: an empty sentence; write it, or remove the line")
        pairs.append(SentencePair(line.record.get("phenomenon") or file.stem, good, bad))
    return pairs


def _pairs_of_lines(file: Path, lines: Sequence[str]) -> list[SentencePair]:
    """Return the pairs of a .txt file, in which each ungrammatical sentence is followed by its grammatical one."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{file}:{number}: a blank line; remove it, because the lines are read in pairs")
    if len(lines) % 2 == 1:
        raise UserError(
            f"{file}:{len(lines)}: an odd number of lines; each ungrammatical sentence needs the grammatical one in "
            f"the line after it"
        )
    return [SentencePair(kind=file.stem, good=good, bad=bad) for bad, good in zip(lines[0::2], lines[1::2])]

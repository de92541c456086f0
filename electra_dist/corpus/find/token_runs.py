"""Find the rows of a shard that contain runs of tokens of many texts, in one pass for all texts.

Guarantee: exactly the rows with at least as many consecutive tokens of a text as asked for are found. Special tokens
in a row are passed over.

How: from each text the hashes of all runs of the least length are kept, by length; those of the rows are computed
with one multiplication and addition for each token and length, and looked up. A row with an equal hash is then
compared with the text token by token, so that the result does not depend on the hash.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; products and sums are modulo 2**64
_BLOCK_TOKENS = 1 << 20  # whose hashes are computed at once
_TABLE_BITS = np.uint64(20)  # of a hash that are looked up first, in a table


class _Form(NamedTuple):
    """One way in which a text is tokenized: its token ids, and how many of them a row must contain."""

    text: int  # index of the text
    tokens: list[int]
    least: int  # tokens of it that a row must have one after another


class FoundRun(NamedTuple):
    """Run of consecutive tokens of a text that a row holds, the longest one of this text and row."""

    text: int  # index of the text
    row: int  # number of the row
    num_tokens: int


class TokenRuns:
    """Searcher for runs of at least `least` consecutive tokens of texts; a shorter text must occur as a whole."""

    def __init__(self, texts: Sequence[Sequence[list[int]]], least: int, special_ids: Sequence[int]) -> None:
        """Index `texts`. Each is a list of forms, a form being one way to tokenize it: at least one token id.

        `special_ids` are the ids, such as that of [SEP], that are ignored in rows.
        """
        self._special_ids = special_ids
        self._forms: list[_Form] = []
        for text, forms in enumerate(texts):
            self._forms += [_Form(text, tokens, least=min(least, len(tokens))) for tokens in forms]
        # Length of a run -> hash of a run -> indices of the forms with such a run.
        self._forms_of_hash: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, form in enumerate(self._forms):
            length, hashes = list(_hashes(np.array(form.tokens), form.least))[-1]  # of the longest runs: `form.least`
            for one in set(hashes.tolist()):
                self._forms_of_hash[length][one].append(index)
        self._tables: dict[int, NDArray[np.bool_]] = {}
        for length, forms_of_hash in self._forms_of_hash.items():
            table = np.zeros(1 << int(_TABLE_BITS), np.bool_)
            table[_first_bits(np.fromiter(forms_of_hash, np.uint64))] = True
            self._tables[length] = table

    def find(self, rows_MS: NDArray[np.integer]) -> Iterator[FoundRun]:
        """Yield the longest run for each text and row that match; `rows_MS` holds M rows of S ids."""
        rows_of_a_block = max(1, _BLOCK_TOKENS // rows_MS.shape[1])
        for first in range(0, len(rows_MS), rows_of_a_block):
            block = rows_MS[first : first + rows_of_a_block]
            longest_runs: dict[tuple[int, int], int] = {}
            for row, index in sorted(self._candidates(block)):
                form = self._forms[index]
                kept = [token for token in block[row].tolist() if token not in self._special_ids]
                longest = _longest_common_run(kept, form.tokens)
                if longest >= form.least:
                    longest_runs[form.text, row] = max(longest, longest_runs.get((form.text, row), 0))
            for (text, row), longest in longest_runs.items():
                yield FoundRun(text, first + row, longest)

    def _candidates(self, rows_MS: NDArray[np.integer]) -> set[tuple[int, int]]:
        """Return pairs (row, index of a form) that may match, because a run of each has the same hash."""
        is_kept = ~np.isin(rows_MS, self._special_ids)
        row_of_token = np.nonzero(is_kept)[0]
        pairs: set[tuple[int, int]] = set()
        for length, hashes in _hashes(rows_MS[is_kept], max(self._tables)):
            if length not in self._tables:
                continue
            may_be = self._tables[length][_first_bits(hashes)]
            may_be &= row_of_token[: len(hashes)] == row_of_token[length - 1 :]  # the run ends in the row it begins in
            for place in np.flatnonzero(may_be).tolist():
                forms = self._forms_of_hash[length].get(int(hashes[place]), ())
                pairs.update((int(row_of_token[place]), index) for index in forms)
        return pairs


def _hashes(tokens_N: NDArray[np.integer], longest: int) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """For each length from 1 to `longest`, yield the length and a hash of the run of tokens from each token on."""
    values_N = (tokens_N.astype(np.uint64) + np.uint64(1)) * _FACTOR
    hashes = np.zeros_like(values_N)
    for length in range(1, min(longest, len(values_N)) + 1):
        hashes = hashes[: len(values_N) - length + 1] * _FACTOR + values_N[length - 1 :]
        yield length, hashes


def _first_bits(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return hashes >> (np.uint64(64) - _TABLE_BITS)


def _longest_common_run(row: list[int], tokens: list[int]) -> int:
    """Return the length of the longest run of consecutive tokens that is in both lists."""
    return difflib.SequenceMatcher(None, row, tokens, autojunk=False).find_longest_match().size

"""Find the rows of a corpus that contain a text, documents of a source, or one document.

Guarantee: the rows that are found are exactly those that contain what was searched for. For a text, these are the rows
with at least `least` consecutive tokens of it; special tokens in a row are passed over, so a text may go on in the
second segment. Sources and documents are those of the origin files (`corpus/origins.py`).

How: many texts are looked for in one pass. From each text the hashes of all runs of the least length are kept, by
length; those of the rows are computed with one multiplication and addition for each token and length, and looked up. A
row with an equal hash is then compared with the text token by token, so that the result does not depend on the hash.

Limits: a search for a text reads all shards once; one for a source or a document reads all origin files once. The
found rows take 16 bytes of memory each, or 24 for a text; `RowSearch.hits` makes Python objects for the rows that it
lists. A text that is divided between rows is found by its longer part only. Text within one word is not found.
"""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray

from electra_dist.corpus.inputs.file_kinds import encodable
from electra_dist.corpus.origins import (
    Mask,
    RowDocument,
    documents_of_rows,
    lines_of_document,
    lines_of_source,
    open_origins,
    rows_of_lines,
    sources_of_table,
)
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import MANIFEST_KEY, heldout_of, read_corpus_vocabulary, read_manifest
from electra_dist.data.shard_cache import rows_of_shards
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import new_tokenizer

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
                longest = difflib.SequenceMatcher(None, kept, form.tokens, autojunk=False).find_longest_match().size
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


Progress = Callable[[Iterable[int]], Iterable[int]]  # yields the shard indices that it is given, with a progress bar


class Query(NamedTuple):
    """Text, source or document that is searched for; exactly one of the three is set."""

    text: str | None = None
    source: str | None = None
    document: str | None = None

    @property
    def is_text(self) -> bool:
        """Return True if a text is searched for, False for a source or a document."""
        return self.text is not None


class FoundRows(NamedTuple):
    """All rows that a search has found, in the order of the corpus; the arrays have an element for each row."""

    shards: NDArray[np.int64]  # index of the shard of each row in the manifest
    rows: NDArray[np.int64]  # number of each row within its shard
    num_tokens: NDArray[np.int64] | None = None  # longest run of tokens of the text in each row; None without a text


class Hit(NamedTuple):
    """A found row: its place, its documents and, for a text, how many tokens of the text it has."""

    shard: int  # index of its shard in the manifest
    row: int  # number of the row within the shard
    num_tokens: int | None  # longest run of consecutive tokens of the text in the row; None without a text
    # Documents of the row: those that were searched for, or all if a text was. None if the corpus has no origin files.
    documents: list[RowDocument] | None


class RowSearch:
    """Search for a text, a source or a document in one corpus, or in all corpora of a run.

    The shards of several corpora are numbered one after another, in the order of the run's phases.
    """

    def __init__(self, query: Query, corpora: Corpora, progress: Progress = iter) -> None:
        """Prepare a search in `corpora`. `progress` wraps each loop over shard numbers, for example to show a bar."""
        self._query = query
        self._corpora = corpora
        self._origins = [open_origins(phase.store, phase.manifest) for phase in corpora.phases]
        self._origins_of_shard = [
            origins for phase, origins in zip(corpora.phases, self._origins) for _ in phase.manifest.shards
        ]
        self._progress = progress

    @property
    def has_origin_files(self) -> bool:
        """Return whether all corpora record the documents of each row, which searches for documents need."""
        return None not in self._origins

    def rows_with_texts(self, texts: Sequence[Sequence[list[int]]], least: int) -> list[FoundRows]:
        """Return, for each text, the rows with at least `least` consecutive tokens of it; the shards are read once.

        Each text is given by its forms, from `tokens_of_texts`. A row matches if it matches one form. A form with
        fewer than `least` tokens must occur in the row as a whole.
        """
        special_ids = [self._corpora.tokenizer.special[token] for token in ("[CLS]", "[SEP]", "[PAD]")]
        runs = TokenRuns(texts, least, special_ids)
        places: list[list[tuple[int, int, int]]] = [[] for _ in texts]  # (shard, row, longest run of tokens)
        for shard, rows in rows_of_shards(self._corpora, self._progress(range(len(self._corpora.shards)))):
            for text, row, longest in runs.find(rows):
                places[text].append((shard, row, longest))
        found = [np.array(sorted(of_text), np.int64).reshape(-1, 3) for of_text in places]
        return [FoundRows(shards=one[:, 0], rows=one[:, 1], num_tokens=one[:, 2]) for one in found]

    def rows_with_documents(self) -> FoundRows:
        """Return the rows of the query's document or source; raise UserError if a corpus has no origin files."""
        if not self.has_origin_files:
            without = self._corpora.phases[self._origins.index(None)]
            raise UserError(
                f"{without.store.url}: has no origin files (origins.json), by which --source and --document search; "
                "build the corpus again with corpus.origins=true into another folder, or search for a TEXT"
            )
        shards = [np.empty(0, np.int64)]
        rows = [np.empty(0, np.int64)]
        for shard in self._progress(range(len(self._corpora.shards))):
            table = self._table(shard)
            rows_of_shard = rows_of_lines(table, self._lines(table))
            shards.append(np.full(len(rows_of_shard), shard))
            rows.append(rows_of_shard)
        return FoundRows(shards=np.concatenate(shards), rows=np.concatenate(rows))

    def hits(self, found: FoundRows, num_listed: int) -> list[Hit]:
        """Return the first `num_listed` found rows, each with its documents if its corpus has origin files.

        A query for a text returns all documents of each row. A query for a source or a document returns only the
        documents that match it.
        """
        hits: list[Hit] = []
        shards = found.shards[:num_listed]
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard).tolist()
            rows = found.rows[places]
            documents: dict[int, list[RowDocument]] | None = None
            if self._origins_of_shard[shard] is not None:
                table = self._table(shard)
                documents = documents_of_rows(table, rows, None if self._query.is_text else self._lines(table))
            for place, row in zip(places, rows.tolist(), strict=True):
                num_tokens = None if found.num_tokens is None else int(found.num_tokens[place])
                hits.append(Hit(shard, row, num_tokens, None if documents is None else documents.get(row, [])))
        return hits

    def sources(self) -> list[str]:
        """Return the names of all sources of the corpora, sorted, from the origin files, which all must have."""
        names: set[str] = set()
        for shard in self._progress(range(len(self._corpora.shards))):
            names |= sources_of_table(self._table(shard))
        return sorted(names)

    def _lines(self, table: pyarrow.Table) -> Mask:
        if self._query.source is not None:
            return lines_of_source(table, self._query.source)
        assert self._query.document is not None
        return lines_of_document(table, self._query.document)

    def _table(self, shard: int) -> pyarrow.Table:
        """Return from which documents a shard's rows were made; shards are numbered from 0 over all corpora."""
        origins = self._origins_of_shard[shard]
        assert origins is not None
        return origins.table(self._corpora.shards[shard].entry.name)


def rows_held_out(query: Query, location: str, endpoint_url: str | None) -> int:
    """Return how many held-out rows contain the query's document, or any document of the query's source.

    `location` is the training corpus, whose subfolder `heldout` is searched. The result is 0 if there is no held-out
    corpus, or if it has no origin files.
    """
    store = open_store(heldout_of(location), endpoint_url)
    if not store.exists(MANIFEST_KEY):
        return 0
    search = RowSearch(query, Corpora.of(store, read_manifest(store)))
    return len(search.rows_with_documents().rows) if search.has_origin_files else 0


def tokens_of_texts(texts: Sequence[str], corpora: Corpora) -> list[list[list[int]]]:
    """Tokenize texts as the build of a corpus does, and return the forms of each: at most two lists of token ids.

    Byte-level tokens contain the space before a word, so a text has two forms: one at the beginning of a document, and
    one after other text. With WordPiece both forms are equal, and the result has one. A text without a token, for
    example of white space only, has none. Raises UserError if a text is not UTF-8.
    """
    vocabulary = read_corpus_vocabulary(corpora.phases[0].store, corpora.tokenizer)
    tokenizer = new_tokenizer(vocabulary, corpora.tokenizer.lowercase)
    all_forms = []
    for text in texts:
        if encodable(text) != text:
            raise UserError(f"TEXT: {text} has bytes that are not UTF-8; a corpus has none, so give the text in UTF-8")
        forms: list[list[int]] = []
        for beginning in ("", "\n"):  # with a line end before it, a text stands after other text
            ids_of_lines = tokenizer.encode(tokenizer.split_lines(beginning + text))
            tokens = list(itertools.chain.from_iterable(ids_of_lines))
            if tokens and tokens not in forms:
                forms.append(tokens)
        all_forms.append(forms)
    return all_forms

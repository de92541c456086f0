"""Turn a chunk of documents into rows of token ids; any process may process any chunk, in any order.

A chunk is a group of consecutive documents of the corpus's order. The documents become examples,
`[CLS] A [SEP] B [SEP]`, by the rules of the ELECTRA reference, and one or more examples fill a row of seq_len ids.

Guarantee: the rows depend on the chunk and the request alone. Every document of the chunk is counted once: as used,
held out or one kind of skipped. Every token of a used or held-out document is in exactly one row.

How: a chunk's seeds follow from its place in the corpus (`worker_stages.py`), so the number of workers cannot
change the rows. Examples of different chunks never share a row.

The rules are those of class ExampleBuilder in google-research/electra, build_pretraining_dataset.py, each with its
order of random draws:
- A line is a sentence. Sentences accumulate until the target length is reached or the document ends; they then make
  one example.
- With probability 0.1 all of them go to one segment. Otherwise segment A takes sentences up to (target - 3) // 2
  tokens; a sentence that crosses this limit goes to A with probability 0.5 if B is still empty; the rest goes to B.
- The next target length is seq_len, or with probability 0.05 uniform in [5, seq_len].

Two things differ, because the reference loses tokens (three or more of every full example):
- Tokens that do not fit an example are carried into the next example of the document, where the reference drops them.
- A line that could not fit even alone (more than seq_len - 2 tokens: a paragraph of prose when rows are short) is
  first cut into pieces of (seq_len - 3) // 2 tokens, one segment each, so that long lines make pairs, too.
The first example of a document is therefore the reference's, draw for draw; later ones begin with the carried tokens.

Randomness: one generator per chunk of documents. Only `random.Random.random()` is used, whose sequence Python promises
to keep.

Packing: an example has at most seq_len ids; a row, which is what the model gets as one sequence, has exactly seq_len.
Every example is whole in one row, once, with its ids unchanged; [PAD] occurs only at the end of a row. The examples'
lengths and order alone decide which examples share a row. The packing "rows" works by best fit decreasing: it takes
the longest example first, and puts each example into the row with the least free space that is still enough for it.
The packing "none" gives each example a row of its own, as in the paper. In both, the rows are in the order of their
first example.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.counts import SHAPE, Counts, measure, skipped_documents
from electra_dist.corpus.inputs.text_decoding import DocumentNames, RawDocument, SkippedDocument, decode_counted
from electra_dist.tokenizer import new_tokenizer

Ids = list[int]
MIN_TARGET = 5  # shortest target length of an example, in tokens
MIN_SEQ_LEN = 8  # shortest rows that a corpus may have
_NO_LIMIT = 1 << 60  # limit of segment A, in tokens, if it takes all sentences
_LINES_PER_CALL = 2048  # least number of lines in a call of the tokenizer, except in the last one of a chunk

Item = TypeVar("Item")


class ExampleBuilder:
    """Divider of consecutive documents into ELECTRA's training examples, `[CLS] A [SEP] B [SEP]` of token ids.

    All documents given to an instance share one random generator, so the examples of a document depend on the
    documents before it.
    """

    def __init__(
        self, seq_len: int, cls_id: int, sep_id: int, single_segment_prob: float, short_target_prob: float, seed: int
    ) -> None:
        """Begin with a target length of `seq_len`. In the ELECTRA reference the two probabilities are 0.1 and 0.05."""
        assert seq_len >= MIN_SEQ_LEN
        self._seq_len = seq_len
        self._cls = [cls_id]
        self._sep = [sep_id]
        self._single_segment_prob = single_segment_prob
        self._short_target_prob = short_target_prob
        self._random = random.Random(seed)
        self._target = seq_len  # tokens at which the accumulated sentences make an example
        self._sentences: list[Ids] = []  # accumulated for the next example
        self._length = 0  # tokens in _sentences

    def document(self, sentences: Iterable[Sequence[int]]) -> Iterator[Ids]:
        """Yield the examples of one document, each of 3 to seq_len ids; a sentence is the token ids of one line."""
        for sentence in sentences:
            for piece in self._pieces(list(sentence)):
                self._add(piece)
                # One piece may be enough for several examples, because the target length may be as short as 5.
                while self._length >= self._target:
                    yield self._make_example()
        while self._length > 0:  # the end of the document, which may be shorter than the target length
            yield self._make_example()

    def _pieces(self, sentence: Ids) -> list[Ids]:
        """Return [sentence] or, if it is too long for one example, the sentence cut into pieces of half an example."""
        longest_alone = self._seq_len - 2  # with [CLS] and one [SEP]
        if len(sentence) <= longest_alone:
            return [sentence]
        piece_length = (self._seq_len - 3) // 2  # half of an example without [CLS] and two [SEP]
        return [sentence[start : start + piece_length] for start in range(0, len(sentence), piece_length)]

    def _add(self, sentence: Ids) -> None:
        if sentence:
            self._sentences.append(sentence)
            self._length += len(sentence)

    def _make_example(self) -> Ids:
        """Make an example of the collected sentences, keep tokens that do not fit, and draw the next target length."""
        first, second = self._divide_into_segments()

        # Cut each segment at the room that it has in the example.
        room_first = self._seq_len - 2  # without [CLS] and one [SEP]
        used_first = min(len(first), room_first)
        room_second = max(0, self._seq_len - 3 - used_first)  # without [CLS], segment A and two [SEP]
        segment_a = first[:room_first]
        segment_b = second[:room_second]
        carried = first[room_first:] + second[room_second:]

        # Begin the next example.
        self._sentences = []
        self._length = 0
        self._add(carried)
        self._draw_target()

        example = self._cls + segment_a + self._sep
        if segment_b:
            example = example + segment_b + self._sep
        return example

    def _divide_into_segments(self) -> tuple[Ids, Ids]:
        """Divide the collected sentences into segments A and B at random, and return the token ids of each segment.

        For example, with a target of 13 tokens the limit of A is (13 - 3) // 2 = 5: of sentences of 4, 3 and 6 tokens,
        A takes the first; the second crosses the limit, so a random draw decides; B takes the third.
        """
        limit_of_a = (self._target - 3) // 2  # half of the tokens beside [CLS] and two [SEP]
        if self._random.random() < self._single_segment_prob:
            limit_of_a = _NO_LIMIT
        segment_a: Ids = []
        segment_b: Ids = []
        for sentence in self._sentences:
            if not segment_a or len(segment_a) + len(sentence) < limit_of_a:
                goes_to_a = True
            elif not segment_b and len(segment_a) < limit_of_a:
                goes_to_a = self._random.random() < 0.5  # the first sentence that crosses the limit of A
            else:
                goes_to_a = False
            if goes_to_a:
                segment_a += sentence
            else:
                segment_b += sentence
        return segment_a, segment_b

    def _draw_target(self) -> None:
        self._target = self._seq_len
        if self._random.random() < self._short_target_prob:
            num_targets = self._seq_len - MIN_TARGET + 1
            self._target = MIN_TARGET + int(self._random.random() * num_targets)


def row_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds all ids of a vocabulary: uint16 up to 65,536 entries, uint32 for more."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def make_rows(
    examples: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
    dtype: type[np.uint16] | type[np.uint32],
    packing: Literal["rows", "none"],
) -> tuple[np.ndarray, np.ndarray]:
    """Pack examples (lists of token ids) into rows; return the rows, [num_rows, seq_len], and the examples' places.

    `packing` "rows" puts as many examples into a row as fit, "none" only one. `dtype` must hold every id. The places
    are int64 [examples, 3]: row, position of the first token in the row, index of the example; they are ordered by
    row, and within a row from left to right.
    """
    if packing == "rows":
        groups = pack([len(example) for example in examples], seq_len)
    else:
        groups = [[index] for index in range(len(examples))]
    rows = np.full((len(groups), seq_len), pad_id, dtype)
    places = []
    for row, group in enumerate(groups):
        start = 0
        for index in group:
            end = start + len(examples[index])
            rows[row, start:end] = examples[index]
            places.append((row, start, index))
            start = end
    return rows, np.array(places, np.int64).reshape(-1, 3)


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Group examples so that each group fits a row, by best fit decreasing; return groups of indices into `lengths`.

    For example, lengths [6, 5, 4, 3] in rows of 10 give [[0, 2], [1, 3]]: 6 and 5 begin groups with 4 and 5 ids of
    free space, 4 fills the first group, and 3 goes to the second. The indices of a group ascend; the groups are in the
    order of their first index. Each example takes constant time, because a bit set of the free spaces finds the best
    group.
    """
    groups: list[list[int]] = []
    groups_with_space: list[list[int]] = [[] for _ in range(seq_len + 1)]  # free space -> numbers of groups
    space_bits = 0  # set of free spaces: bit s is 1 if groups_with_space[s] is not empty
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in longest_first:
        length = lengths[index]
        # Shifting out the bits below `length` leaves the spaces that hold the example; bit 0 now stands for `length`.
        fitting_bits = space_bits >> length
        if fitting_bits:
            # The lowest bit is the least sufficient space. Take a group with this space out of its list.
            lowest_bit = fitting_bits & -fitting_bits
            space = length + (lowest_bit.bit_length() - 1)
            group_number = groups_with_space[space].pop()
            if not groups_with_space[space]:
                space_bits ^= 1 << space
        else:
            # No group holds the example: begin one.
            space = seq_len
            group_number = len(groups)
            groups.append([])
        # Place the example, and file the group under the space that is left.
        groups[group_number].append(index)
        space_left = space - length
        groups_with_space[space_left].append(group_number)
        space_bits |= 1 << space_left

    # Restore the order of the text: within a group, and of the groups by their first example.
    for group in groups:
        group.sort()
    groups.sort(key=lambda group: group[0])
    return groups


class Rows(NamedTuple):
    """Rows that one chunk of documents gives to one of two corpora, the training or the held-out one."""

    block: np.ndarray  # [rows, seq_len], uint16 or uint32
    places: np.ndarray  # int64 [examples, 3]: row, position of the first token, index of the document in the chunk


class ChunkRows(NamedTuple):
    """Rows of token ids that one chunk (some MB of documents) gives to the training and to the held-out corpus."""

    train: Rows
    heldout: Rows
    counts: Counts
    # Index of a decoded document in the chunk -> the id and the source that its own record gives it.
    names: dict[int, DocumentNames]


class _Text(NamedTuple):
    index_in_chunk: int
    text: str
    document: RawDocument


class ChunkProcessor:
    """Converter of documents, a chunk of some MB at a time, to rows of token ids. It caches the ids of known words."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._tokenizer = new_tokenizer(request.vocabulary, request.corpus.lowercase)
        self._unk_id = request.vocabulary.special["[UNK]"]
        self._heldout_key = request.heldout_key.to_bytes(8, "little")

    def process(self, documents: Sequence[RawDocument], seed: int, heldout_seed: int) -> ChunkRows:
        """Return the rows of a chunk of documents, separately for training and held-out documents.

        `seed` and `heldout_seed` key the random draws for the examples of training and of held-out documents. The
        result does not depend on chunks that were processed before. An AssertionError means a bug: a document was not
        counted exactly once, or a token was lost.
        """
        counts = Counts()
        train = _RowCollector(self._request, seed)
        heldout = _RowCollector(self._request, heldout_seed)
        names: dict[int, DocumentNames] = {}
        texts = self._decoded(documents, counts, names)
        for text, sentences in self._tokenized(texts, counts):
            is_heldout = self._is_heldout(text.text)
            outcome = "heldout" if is_heldout else "used"
            counts.keep_document(self._source_of(text.document), outcome, sentences, self._unk_id)
            if is_heldout:
                heldout.add(text.index_in_chunk, text.text, sentences)
            else:
                train.add(text.index_in_chunk, text.text, sentences)
        outcomes = counts.all_sources()
        num_counted = outcomes["used"] + outcomes["heldout"] + skipped_documents(outcomes)
        assert outcomes["documents"] == len(documents), "a document was not read"
        assert outcomes["documents"] == num_counted, "a document was not counted once"
        train_rows, counts.rows["train"] = train.finish()
        heldout_rows, counts.rows["heldout"] = heldout.finish()
        return ChunkRows(train_rows, heldout_rows, counts, names)

    def _skip(self, document: RawDocument, kind: str, counts: Counts) -> None:
        file = self._request.inputs[document.file]
        counts.skip_document(file.source, file.given_path, kind, document.size)

    def _source_of(self, document: RawDocument) -> str:
        return self._request.inputs[document.file].source

    def _decoded(
        self, documents: Iterable[RawDocument], counts: Counts, names: dict[int, DocumentNames]
    ) -> Iterator[_Text]:
        """Yield the usable texts of a chunk's documents.

        Adds to `counts` whether each document is usable, and to `names` the id and source in the record of each usable
        one.
        """
        request = self._request
        for index, document in enumerate(documents):
            source = self._source_of(document)
            numbers = counts.of_source(source)
            numbers["documents"] += 1
            numbers["bytes"] += document.size
            try:
                decoded = decode_counted(document, request.text_field, request.corpus.undecodable)
            except SkippedDocument as skipped:
                self._skip(document, skipped.kind, counts)
                counts.other_fields.update(skipped.other_fields)
                counts.add_undecodable(source, skipped.undecodable_bytes)
                continue
            counts.add_undecodable(source, decoded.replaced_bytes)
            names[index] = decoded.names
            numbers.update({SHAPE + name: number for name, number in measure(decoded.text).items()})
            yield _Text(index, decoded.text, document)

    def _tokenized(self, texts: Iterable[_Text], counts: Counts) -> Iterator[tuple[_Text, list[list[int]]]]:
        """Yield each text with the token ids of its non-empty lines; count a text without tokens as "no_tokens".

        One call of the tokenizer encodes the lines of many texts, because that is faster than a call for each text.
        """
        for batch in in_groups(texts, lambda text: text.text.count("\n") + 1, _LINES_PER_CALL):
            lines_of_texts = [self._tokenizer.split_lines(text.text) for text in batch]
            all_lines = [line for lines in lines_of_texts for line in lines]
            ids_of_all_lines = self._tokenizer.encode(all_lines)
            start = 0  # index in `ids_of_all_lines` of the first line of the text
            for text, lines in zip(batch, lines_of_texts):
                end = start + len(lines)
                sentences = [ids for ids in ids_of_all_lines[start:end] if ids]
                start = end
                if sentences:
                    yield text, sentences
                else:
                    self._skip(text.document, "no_tokens", counts)

    def _is_heldout(self, text: str) -> bool:
        """Return whether a text is held out; a keyed hash of it decides, so that equal texts go to the same corpus."""
        heldout_fraction = self._request.corpus.heldout_fraction
        if heldout_fraction == 0:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self._heldout_key).digest()
        text_hash = int.from_bytes(digest, "little")
        return text_hash < heldout_fraction * 2**64


class _RowCollector:
    """Collector of a chunk's training or held-out examples: call `add` for each document, then `finish` once."""

    def __init__(self, request: BuildRequest, seed: int) -> None:
        self._request = request
        self._special = request.vocabulary.special
        self._builder = ExampleBuilder(
            seq_len=request.seq_len,
            cls_id=self._special["[CLS]"],
            sep_id=self._special["[SEP]"],
            single_segment_prob=request.corpus.single_segment_prob,
            short_target_prob=request.corpus.short_target_prob,
            seed=seed,
        )
        self._examples: list[list[int]] = []
        self._document_of_example: list[int] = []  # index of each example's document in the chunk
        self._counts: Counter[str] = Counter()

    def add(self, index: int, text: str, sentences: list[list[int]]) -> None:
        """Make examples of a document. `index` is its place in the chunk; a sentence is the token ids of one line."""
        self._counts["text_bytes"] += len(text.encode())
        self._counts["text_tokens"] += sum(map(len, sentences))
        self._examples.extend(self._builder.document(sentences))
        num_new_examples = len(self._examples) - len(self._document_of_example)
        self._document_of_example += [index] * num_new_examples

    def finish(self) -> tuple[Rows, Counter[str]]:
        """Pack the examples of all added documents into rows, and return the rows with their counts."""
        pad_id = self._special["[PAD]"]
        dtype = row_dtype(self._request.vocabulary.size)
        packing = self._request.corpus.packing
        block, places = make_rows(self._examples, self._request.seq_len, pad_id, dtype, packing)
        counts = self._counts
        counts["examples"] = len(self._examples)
        counts["rows"] = len(block)
        counts["tokens"] = int(np.count_nonzero(block != pad_id))
        # Every token is a token of text, the one [CLS] of its example, or a [SEP].
        num_cls = int(np.count_nonzero(block == self._special["[CLS]"]))
        num_sep = int(np.count_nonzero(block == self._special["[SEP]"]))
        assert counts["tokens"] == counts["text_tokens"] + counts["examples"] + num_sep, "a token was lost or added"
        assert num_cls == counts["examples"], "text was encoded as [CLS]"
        assert not (block == self._special["[MASK]"]).any(), "text was encoded as [MASK]"
        documents = np.array(self._document_of_example, np.int64)
        places[:, 2] = documents[places[:, 2]]  # replaces the index of each example by that of its document
        return Rows(block, places), counts


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yield consecutive items in groups whose sizes add up to `least` or more; only the last group may have less."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group = []
            size = 0
    if group:
        yield group

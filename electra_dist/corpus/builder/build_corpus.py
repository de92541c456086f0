"""Build a training corpus from text files: shards of token rows, vocab.txt and the manifest corpus.json.

Guarantee: the inputs (contents and names), the vocabulary, the parameters and the seed determine every byte of the
corpus. The number of workers, the number of parts and interruptions of the build change nothing. corpus.json is
written last: a folder without it holds no finished corpus. Every document that was read is counted: as used, held out
or skipped. A corpus that is already finished is not changed.

How: the build has three stages.
1. Workers read groups of input files and write their documents to spill files, sorted by a key (`worker_stages.py`).
2. Workers take buckets, which are ranges of keys: they collect the documents of a bucket from all spill files, turn
   them into rows and write shards (`worker_stages.py`). The documents of all sources are thereby shuffled.
3. One process joins the records: held-out corpus, build.json, corpus.json (`join_parts.py`). No shard is rewritten.
Part i of n does stages 1 and 2 for its share of the groups and buckets. After its own groups it also reads the groups
of other parts that are not read yet, so that it need not wait for them. Each step is recorded when it is finished
(`build_records.py`), and a build or part that is started again goes on after these steps.

Limits: a resumed build notices a change of an input by its name, size or time of modification; on S3, by name and
size only. The spill files take a third to a half of the text's bytes while the build goes on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.build_report import remarks_on_unknown_tokens
from electra_dist.corpus.builder.build_records import BuildOrder, BuildRecords, ReadGroup
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.examples import MIN_SEQ_LEN
from electra_dist.corpus.builder.join_parts import JoinedCorpus, join_parts, take_joined
from electra_dist.corpus.builder.shuffle import NUM_CELLS, open_spills, refuse_unknown_sources, source_epochs
from electra_dist.corpus.builder.worker_stages import (
    InputGroup,
    InputReader,
    ReadTask,
    RowMaker,
    group_inputs,
    sample_rows,
)
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.workers import WorkerPool
from electra_dist.errors import ManifestMismatch, StoreError, UserError
from electra_dist.store.open_store import open_store

_MANY_BUCKETS = 1024  # a corpus of more shards than this has several shards in a bucket
_LARGEST_BUCKET = 256_000_000  # bytes of documents, which a worker holds in memory


@dataclass(frozen=True)
class Part:
    """Part of a corpus build that one machine does: its share of the input files and of the shards."""

    number: int  # from 1
    count: int

    @property
    def label(self) -> str:
        """Return the part's name as a user writes it, such as "2/4"."""
        return f"{self.number}/{self.count}"

    def owns(self, number: int) -> bool:
        """Return whether a task is this part's: to read input group `number`, or to make shards of bucket `number`."""
        return number % self.count == self.number - 1


WHOLE = Part(1, 1)


def parse_part(text: str) -> Part:
    """Parse the name of a part, such as "2/4" for part 2 of 4; raise UserError for any other text."""
    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return Part(int(number), int(count))
    raise UserError(f"--part {text}: give the number of the part and the number of parts, such as 2/4")


def build_corpus(request: BuildRequest, console: BuildConsole | None = None) -> JoinedCorpus:
    """Build the corpus that `request` describes, or resume its build, or return it if it is finished.

    If the call is killed, a later call with an equal request resumes after the last finished step. Only one build, or
    the parts of one build, may write to `request.output` at a time. Raises ManifestMismatch if the output holds a
    corpus of other inputs or parameters, or if the inputs have changed since they were read.
    """
    resumed_shards = build_part(request, WHOLE, console)
    if resumed_shards is None:
        return take_joined(request.output, request.endpoint_url)
    return join_parts(request.output, request.endpoint_url, resumed_shards)


def build_part(request: BuildRequest, part: Part, console: BuildConsole | None = None) -> int | None:
    """Do one part of a build: read input files, and write this part's shards. `join_parts` then finishes the corpus.

    Returns how many of the part's shards earlier calls had finished; None if the whole corpus was finished, so that
    nothing was done. All parts need equal requests. Raises ManifestMismatch if the output holds another corpus, or if
    the inputs have changed.
    """
    if request.seq_len < MIN_SEQ_LEN:
        raise UserError(f"data.seq_len {request.seq_len}: too short for an example; set it to {MIN_SEQ_LEN} or more")
    build = _PartOfBuild(request, part, console or BuildConsole())
    if build.is_finished():
        return None
    return build.run()


class _PartOfBuild:
    """State of one call of `build_part`, which reads input files and writes the shards of one part of a corpus."""

    def __init__(self, request: BuildRequest, part: Part, console: BuildConsole) -> None:
        self._request = request
        self._part = part
        self._console = console
        self._store = open_store(request.output, request.endpoint_url)
        self._records = BuildRecords(self._store)
        self._parameters = {**request.parameters(), "tokenizer": request.vocabulary.sha256}
        self._groups: list[InputGroup] = []  # all groups of input files
        self._recorded: dict[int, ReadGroup] = {}  # records of the groups that were read, each of them read once

    def is_finished(self) -> bool:
        """Return whether the output holds this corpus, finished; then delete what a killed build left in progress/.

        Raises ManifestMismatch if the output holds another corpus.
        """
        return self._records.take_finished_corpus(self._parameters, self._request.inputs_identity()) is not None

    def run(self) -> int:
        """Read this part's inputs and write its shards; return how many of its shards earlier calls had finished.

        If a new build is refused or interrupted before it has read anything, its records are deleted, so that the
        corrected command may have other parameters. The records of a build in several parts stay, because other parts
        may be at work.
        """
        was_begun = self._records.is_begun()
        if was_begun:
            self._keep_sources(self._records.notes().input_sources)
        self._refuse_unknown_sources()
        self._groups = group_inputs(self._request.inputs, self._request.group_bytes)
        try:
            return self._read_and_make_rows()
        except StoreError:
            raise
        except (UserError, KeyboardInterrupt):
            is_new = self._part == WHOLE and not was_begun and self._records.is_begun()
            if is_new and not self._records.group_numbers():
                self._records.give_up()
            raise

    def _keep_sources(self, sources: list[str]) -> None:
        """Name the sources of the inputs as this build did when it began, before its inputs were moved.

        Its records and origin files have these names. Inputs with another number of sources are no moved ones.
        """
        if len(sources) != len(self._request.sources) or sources == self._request.sources:
            return
        self._console.say(
            f"{self._store.url}: this build was begun with its inputs at other paths, by which it goes on to name "
            f"their sources: {', '.join(sources)}"
        )
        self._request = self._request.with_sources(sources)

    def _refuse_unknown_sources(self) -> None:
        corpus = self._request.corpus
        sources = {file.source for file in self._request.inputs}
        refuse_unknown_sources("corpus.source_epochs", corpus.source_epochs, sources)
        refuse_unknown_sources("corpus.source_shares", corpus.source_shares, sources)
        refuse_unknown_sources("corpus.licences", corpus.licences, sources)

    def _read_and_make_rows(self) -> int:
        """Do what is not finished of this part; return the number of its shards that earlier calls had finished."""
        request = self._request
        self._keep_origins(self._records.begin(self._parameters, request.vocabulary.text, request.free_settings()))
        with self._console:
            order = self._records.order()
            if order is not None and order.inputs_sha256 != request.inputs_identity()["inputs_sha256"]:
                raise self._inputs_changed()
            self._recorded = self._records.groups()
            changed = self._changed_groups()
            if order is None:
                self._read_inputs(changed)
                order = self._find_order()
                self._records.record_order(order)
            elif changed:
                raise self._inputs_changed()
            resumed_shards = self._make_rows(order)
        self._records.record_part(self._part.label)
        return resumed_shards

    def _keep_origins(self, with_origins: bool) -> None:
        """Use the `corpus.origins` with which this build was begun; print a line if the request has another value."""
        if self._request.corpus.origins == with_origins:
            return
        self._console.say(
            f"{self._store.url}: this build was begun with corpus.origins {str(with_origins).lower()} and keeps "
            "this setting; to change it, delete this folder and build again"
        )
        corpus = self._request.corpus.model_copy(update={"origins": with_origins})
        self._request = dataclasses.replace(self._request, corpus=corpus)

    def _changed_groups(self) -> set[int]:
        """Return the numbers of the input groups whose documents have changed since an earlier call read them.

        Other names or sizes of files count as a change. If only times of modification differ, the group is read again
        and the digest of its documents decides.
        """
        changed: set[int] = set()
        touched: list[InputGroup] = []
        for group in self._groups:
            record = self._recorded.get(group.number)
            if record is None:
                continue
            if record.files_digest != group.digest:
                changed.add(group.number)
            elif record.modified != group.modified:
                touched.append(group)
        for found in self._read(touched, (ReadTask(group, is_check=True) for group in touched)):
            record = self._recorded[found.number]
            if found.documents_digest != record.documents_digest:
                changed.add(found.number)
            else:
                self._recorded[found.number] = record.model_copy(update={"modified": found.modified})
                self._records.record_group(self._recorded[found.number])
        return changed

    def _read_inputs(self, changed: set[int]) -> None:
        """Read the input groups that no part has read yet, and those in `changed`; this part's groups come first."""
        recorded = self._recorded
        missing = [group for group in self._groups if group.number in changed or group.number not in recorded]
        if recorded:
            self._console.say(f"{self._store.url}: resuming the build; {len(recorded)} groups of inputs are read")
        for record in self._read(missing, self._groups_to_read(missing, changed)):
            recorded[record.number] = record
        recorded |= self._records.groups(known=recorded)  # those that other parts have read

    def _read(self, groups: Sequence[InputGroup], tasks: Iterable[ReadTask]) -> Iterator[ReadGroup]:
        """Read input groups in worker processes; yield the record of each group, and show the progress.

        `groups` holds every group that a task may name. A task is taken from `tasks` only when a worker will soon be
        free.
        """
        if not groups:
            return
        total_bytes = sum(group.size for group in self._groups)
        sizes = {group.number: group.size for group in groups}
        self._console.begin("reading", total_bytes, total_bytes - sum(sizes.values()))
        num_workers = min(self._request.num_workers, len(groups))
        with WorkerPool(partial(InputReader, self._request), num_workers, preload=__name__) as pool:
            for record in pool.results(tasks):
                self._console.read(sizes[record.number], record.counts.all_sources()["read"])
                yield record

    def _groups_to_read(self, missing: Sequence[InputGroup], changed: set[int]) -> Iterator[ReadTask]:
        """Yield tasks for the `missing` input groups, this part's first, as long as no other part has read them."""
        num_parts = self._part.count
        for distance in range(num_parts):
            # The groups of this part, then those of the next one, and so on; part 1 follows the last part.
            owner = Part((self._part.number - 1 + distance) % num_parts + 1, num_parts)
            recorded = set(self._records.group_numbers())
            for group in missing:
                if not owner.owns(group.number):
                    continue
                is_unchanged = group.number not in changed
                if is_unchanged and (group.number in recorded or self._records.has_group(group.number)):
                    continue
                yield ReadTask(group, is_check=False)

    def _find_order(self) -> BuildOrder:
        """Decide into how many buckets the shuffled documents are divided, and how often each source is used.

        Every part makes the same decision, because it follows from the records of all input groups. Raises UserError
        if too many tokens of a sample are [UNK].
        """
        request = self._request
        records = self._group_records()
        read = Counts.total(record.counts for record in records)
        source_bytes = {source: numbers["read_bytes"] for source, numbers in read.sources.items() if numbers["read"]}
        epochs = source_epochs(source_bytes, request.corpus.source_epochs, request.corpus.source_shares)
        total_bytes = sum(source_bytes[source] * epochs[source] for source in source_bytes)
        spills = open_spills(self._store, [spill for record in records for spill in record.spills])
        sample = sample_rows(spills, request)
        # A build that would be refused at its end because of them should not do its work first.
        remarks_on_unknown_tokens(
            {"a sample of the text": sample.unknown},
            request.corpus.max_unk_rate,
            "corpus.max_unk_rate",
            self._store.url,
        )
        row_bytes = total_bytes * sample.row_bytes_per_document_byte
        num_buckets, shards_per_bucket = divide_into_buckets(total_bytes, row_bytes / request.shard_bytes)
        return BuildOrder(
            **request.inputs_identity(),
            num_groups=len(self._groups),
            num_buckets=num_buckets,
            shards_per_bucket=shards_per_bucket,
            epochs=dict(sorted(epochs.items())),
            search=request.skipped_inputs,
        )

    def _group_records(self) -> list[ReadGroup]:
        return [self._recorded[group.number] for group in self._groups]

    def _make_rows(self, order: BuildOrder) -> int:
        """Write this part's shards that do not exist yet; return how many of its shards earlier calls had finished."""
        request = self._request
        finished = self._records.buckets()
        own = [bucket for bucket in range(order.num_buckets) if self._part.owns(bucket)]
        missing = [bucket for bucket in own if bucket not in finished]
        records = self._group_records()
        resumed_shards = sum(len(finished[bucket].entries) for bucket in own if bucket in finished)
        if resumed_shards:
            self._console.say(f"{self._store.url}: resuming the build after {resumed_shards} finished shards")
        document_bytes = sum(record.counts.all_sources()["read_bytes"] for record in records)
        own_bytes = document_bytes * len(own) // order.num_buckets
        num_finished = len(own) - len(missing)
        finished_bytes = document_bytes * num_finished // order.num_buckets
        self._console.begin("rows", own_bytes, finished_bytes)
        spills = [spill for record in records for spill in record.spills]
        num_workers = min(request.num_workers, max(len(missing), 1))
        with WorkerPool(partial(RowMaker, request, order, spills), num_workers, preload=__name__) as pool:
            for bucket in pool.results(missing):
                documents = bucket.counts.all_sources()
                self._console.made_rows(documents["bytes"], documents["documents"], documents["tokens"])
        return resumed_shards

    def _inputs_changed(self) -> ManifestMismatch:
        return ManifestMismatch(
            f"{self._store.url}: holds a corpus half built from inputs that have changed since (other names, sizes "
            "or sources of files); give the same inputs as before, delete this folder, or choose another --output"
        )


def divide_into_buckets(total_bytes: float, num_shards: float) -> tuple[int, int]:
    """Return into how many buckets (ranges) the shuffled documents are divided, and the number of shards of each.

    `total_bytes` is the size of all documents; a document that the corpus uses twice counts twice. A corpus of up to
    1,024 shards has one shard in each bucket. A larger corpus has several shards in each, because every bucket reads a
    piece of every intermediate file, and more buckets would make these pieces smaller. A worker holds the documents of
    a bucket in memory: if they would exceed 256 MB, there are more buckets, up to 4,096, with fewer shards in each.
    """
    most_shards = math.ceil(num_shards / _MANY_BUCKETS) or 1
    for_memory = math.ceil(total_bytes / _LARGEST_BUCKET)
    num_buckets = min(max(math.ceil(num_shards / most_shards), for_memory, 1), NUM_CELLS)
    return num_buckets, math.ceil(num_shards / num_buckets) or 1

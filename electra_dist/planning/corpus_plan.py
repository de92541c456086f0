"""Compute what it takes to build a corpus of a given size: core-hours, bytes, spill space, shards, S3 requests, cost.

Guarantee: a plan is a function of its arguments; nothing is measured, read or written here. The numbers of groups,
spill files, buckets, shards and requests follow the rules of the build itself (`corpus/stages/`), and a test compares
the requests with those that a build sends.

How: the rates that `corpus_rates.py` measured on a sample are multiplied by the ratio of the sizes.

Limits: requests are those of parts that begin at once and are not interrupted, without the retries of requests that
fail. A GET of a whole object counts as one. The training of a vocabulary is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from electra_dist.corpus.build_corpus import divide_into_buckets
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.stages.document_order import NUM_CELLS
from electra_dist.corpus.stages.row_sample import SAMPLE_BYTES
from electra_dist.planning.corpus_rates import COLLECT, READ, SPILL, TOKENIZE, WRITE, CorpusRates

_KEYS_PER_LIST = 1000  # keys in one answer of ListObjectsV2
_DOCUMENT_BYTES = 64  # that the build adds to the size of every document (`read_group.py`)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Text of a planned corpus, and the machines that build it."""

    text_bytes: float  # of documents, undecoded, as the build reads them
    input_bytes: float  # of the files that hold them
    num_files: int
    num_documents: float
    raw_text_bytes: float  # of the documents before a preparation; used only if there is one
    num_machines: int = 1  # each builds one part
    cores_per_machine: int = 1


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in any currency; 0 leaves the cost out."""

    core_hour: float = 0.0
    thousand_requests: float = 0.0
    gigabyte: float = 0.0  # read from or written to storage

    @property
    def any(self) -> bool:
        """Return whether a price is given."""
        return bool(self.core_hour or self.thousand_requests or self.gigabyte)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests to S3 of one step."""

    get: int = 0
    put: int = 0
    list: int = 0
    delete: int = 0

    @property
    def total(self) -> int:
        """Return the number of all requests."""
        return self.get + self.put + self.list + self.delete


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One step of a planned build."""

    name: str
    core_hours: float
    bytes_in: float = 0.0  # read from storage
    bytes_out: float = 0.0  # written to storage
    requests: Requests = field(default_factory=Requests)

    def cost(self, prices: Prices) -> float:
        """Return the cost of the step."""
        gigabytes = (self.bytes_in + self.bytes_out) / 1e9
        return (
            self.core_hours * prices.core_hour
            + self.requests.total / 1000 * prices.thousand_requests
            + gigabytes * prices.gigabyte
        )


@dataclass(frozen=True, kw_only=True)
class CorpusPlan:
    """What a build of a corpus takes."""

    tokens: float
    prepare: list[PlannedStep]  # stages of a preparation; empty if there is none
    parallel: list[PlannedStep]  # steps of the build that all machines share
    merge: PlannedStep  # the last step, which one process does
    spill_bytes: float  # space that the spill files need until the corpus is finished
    num_groups: int  # groups of input files: so many workers can read at once
    num_spills: int
    num_buckets: int  # so many workers can make rows at once
    num_shards: int
    num_machines: int
    cores_per_machine: int

    @property
    def steps(self) -> list[PlannedStep]:
        """Return all steps in their order."""
        return [*self.prepare, *self.parallel, self.merge]

    @property
    def hours(self) -> float:
        """Return the time on all machines, in hours, without waiting for storage."""
        shared = sum(step.core_hours for step in [*self.prepare, *self.parallel])
        return shared / (self.num_machines * self.cores_per_machine) + self.merge.core_hours


def workload_of_tokens(
    rates: CorpusRates,
    tokens: float,
    *,
    file_bytes: float,
    kept: float = 1.0,
    num_machines: int = 1,
    cores_per_machine: int = 1,
) -> Workload:
    """Return as much text of the kind of the sample as gives the wanted tokens.

    Args:
        rates: the measurement, with the sizes of the sample.
        tokens: tokens of the corpus.
        file_bytes: size of an input file.
        kept: share of the text that a preparation keeps.
        num_machines: machines that build a part each.
        cores_per_machine: worker processes on each.
    """
    text_bytes = tokens * rates.text_bytes / rates.tokens
    input_bytes = text_bytes * rates.input_bytes / rates.text_bytes
    return Workload(
        text_bytes=text_bytes,
        input_bytes=input_bytes,
        num_files=max(1, round(input_bytes / file_bytes)),
        num_documents=rates.documents * text_bytes / rates.text_bytes,
        raw_text_bytes=text_bytes / kept,
        num_machines=num_machines,
        cores_per_machine=cores_per_machine,
    )


def machines_needed(plan: CorpusPlan, hours: float) -> int | None:
    """Return the number of machines that finish in a given time; None if the merge alone takes longer.

    Args:
        plan: any plan of the work, with the cores of a machine.
        hours: wanted time.
    """
    left = hours - plan.merge.core_hours
    if left <= 0:
        return None
    shared = sum(step.core_hours for step in [*plan.prepare, *plan.parallel])
    return max(1, math.ceil(shared / (left * plan.cores_per_machine)))


def plan_corpus(rates: CorpusRates, request: BuildRequest, work: Workload) -> CorpusPlan:
    """Return what a build takes.

    Args:
        rates: costs of the steps on one core.
        request: the build, of which the sizes of groups, spill files and shards are used; its inputs are not.
        work: the text, and the machines.
    """
    text = work.text_bytes
    scale = text / rates.text_bytes
    tokens = rates.tokens * scale
    row_bytes = rates.shard_bytes * scale
    spill_bytes = rates.spill_bytes * scale
    file_bytes = work.input_bytes / work.num_files
    num_groups = _num_groups(work.num_files, file_bytes, request.group_bytes)
    spill_size = (text + _DOCUMENT_BYTES * work.num_documents) / num_groups
    num_spills = num_groups * math.ceil(spill_size / request.spill_bytes)
    num_buckets, shards_per_bucket = divide_into_buckets(text, row_bytes / request.shard_bytes)
    num_shards = num_buckets * shards_per_bucket
    counts = _Counts(
        files=work.num_files,
        groups=num_groups,
        spills=num_spills,
        buckets=num_buckets,
        shards=num_shards,
        heldout_buckets=num_buckets if request.corpus.heldout_fraction else 0,
        heldout_shards=_heldout_shards(row_bytes, request),
        sample_pieces=_sample_pieces(work, num_spills),
        parts=work.num_machines,
        workers=work.cores_per_machine,
        side_files=request.corpus.origins,
    )
    core_hours = {step: seconds * scale / 3600 for step, seconds in rates.cpu_s.items()}
    record_bytes = 2000.0 * (num_groups + num_buckets)  # a record has about 2 kB
    parallel = [
        PlannedStep(
            name="read the inputs",
            core_hours=core_hours[READ],
            bytes_in=work.input_bytes,
            requests=counts.of_reading(),
        ),
        PlannedStep(
            name="shuffle: write spill files",
            core_hours=core_hours[SPILL],
            bytes_out=spill_bytes,
            requests=counts.of_spilling(),
        ),
        PlannedStep(
            name="shuffle: collect buckets",
            core_hours=core_hours[COLLECT],
            bytes_in=spill_bytes,
            requests=counts.of_collecting(),
        ),
        PlannedStep(name="tokenize, make rows", core_hours=core_hours[TOKENIZE]),
        PlannedStep(
            name="write shards",
            core_hours=core_hours[WRITE],
            bytes_out=row_bytes,
            requests=counts.of_writing(),
        ),
    ]
    merge_hours = rates.record_cpu_s * (num_buckets + num_groups) / 3600
    return CorpusPlan(
        tokens=tokens,
        prepare=_prepare_steps(rates, work),
        parallel=parallel,
        merge=PlannedStep(name="merge", core_hours=merge_hours, bytes_in=record_bytes, requests=counts.of_merging()),
        spill_bytes=spill_bytes,
        num_groups=num_groups,
        num_spills=num_spills,
        num_buckets=num_buckets,
        num_shards=num_shards,
        num_machines=work.num_machines,
        cores_per_machine=work.cores_per_machine,
    )


def _num_groups(num_files: int, file_bytes: float, group_bytes: int) -> int:
    """Return into how many groups `group_inputs` divides files of one size."""
    files_per_group = max(1, math.ceil(group_bytes / file_bytes))
    return math.ceil(num_files / files_per_group)


def _sample_pieces(work: Workload, num_spills: int) -> int:
    """Return how many pieces of spill files the first megabyte of the order of documents has.

    It is read cell by cell from all spill files (`row_sample.py`), and a cell without documents is no request.
    """
    num_cells = min(NUM_CELLS, math.ceil(SAMPLE_BYTES * NUM_CELLS / work.text_bytes))
    documents_per_piece = work.num_documents / (NUM_CELLS * num_spills)
    return round(num_cells * num_spills * -math.expm1(-documents_per_piece))


def _heldout_shards(row_bytes: float, request: BuildRequest) -> int:
    """Return the number of shards of the held-out corpus, whose rows are a share of all rows."""
    return math.ceil(row_bytes * request.corpus.heldout_fraction / request.shard_bytes)


def _prepare_steps(rates: CorpusRates, work: Workload) -> list[PlannedStep]:
    """Return the stages of a preparation; the first reads all text, the others what is left of it."""
    steps = []
    for number, stage in enumerate(rates.prepare):
        text = work.raw_text_bytes if number == 0 else work.text_bytes
        hours = stage.cpu_s / stage.text_bytes * text / 3600
        steps.append(PlannedStep(name=f"prepare: {stage.stage.partition('-')[2]}", core_hours=hours))
    return steps


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of files and processes of a build, from which the numbers of its requests follow."""

    files: int
    groups: int
    spills: int
    buckets: int
    shards: int
    heldout_buckets: int  # buckets that have held-out rows
    heldout_shards: int
    sample_pieces: int  # pieces of spill files that are read to estimate the number of shards
    parts: int
    workers: int  # worker processes of each part
    side_files: bool  # whether each shard has a side file (corpus.origins)

    def of_reading(self) -> Requests:
        """Return the requests that find and fetch the inputs: each part lists them and asks for their sizes."""
        return Requests(get=self.files * self.parts + self.files, list=_lists(self.files) * self.parts)

    def of_spilling(self) -> Requests:
        """Return the requests that begin the build, ask which groups were read, and write spill files and records."""
        existing = 3  # whether corpus.json, build.json and order.json exist
        begin = 3  # vocab.txt, notes.json and build.json are written
        return Requests(
            get=(existing + self.groups) * self.parts,
            put=begin + self.spills + self.groups,
            list=(1 + 2 * _lists(self.groups)) * self.parts,
        )

    def of_collecting(self) -> Requests:
        """Return the requests for the records of the groups, the tables of the spill files, and their pieces."""
        tables = 2 * self.spills  # the table, and the size of the file
        of_order = self.groups + tables + self.sample_pieces
        of_rows = self.groups + tables * self.workers
        return Requests(
            get=(of_order + of_rows) * self.parts + self.spills * self.buckets,
            put=self.parts,  # order.json, which each part writes
            list=(2 * _lists(self.groups) + _lists(self.buckets)) * self.parts,
        )

    def of_writing(self) -> Requests:
        """Return the requests that write shards and side files, held-out rows, the records of buckets and parts."""
        files = self.shards + self.heldout_buckets
        if self.side_files:
            files *= 2
        return Requests(put=files + self.buckets + self.parts)

    def of_merging(self) -> Requests:
        """Return the number of requests of `corpus merge`.

        It reads the records of all parts, writes the manifests, and deletes the records.
        """
        files_per_shard = 2 if self.side_files else 1
        heldout_files = files_per_shard * self.heldout_buckets
        kept = self.groups + self.spills + self.buckets + heldout_files + self.parts + 2  # and order.json, notes.json
        checks = 2 * files_per_shard * self.shards  # whether a shard or side file exists, and its size
        manifests = 2 if self.heldout_shards else 1
        # order.json and vocab.txt; notes.json; build.json for the merge and for each manifest
        others = 3 + 2 + 2 * (1 + manifests)
        side_manifests = manifests if self.side_files else 0  # origins.json
        written = files_per_shard * self.heldout_shards + 2 * bool(self.heldout_shards) + 2 + side_manifests
        return Requests(
            get=self.groups + self.buckets + checks + heldout_files + others,
            put=written,  # vocab.txt, corpus.json; build.json
            list=_lists(self.groups) + _lists((1 + files_per_shard) * self.buckets) + _lists(kept),
            delete=kept + 1,  # and build.json
        )


def _lists(num_keys: int) -> int:
    """Return the number of requests that list so many keys."""
    return max(1, math.ceil(num_keys / _KEYS_PER_LIST))


def total_requests(steps: Sequence[PlannedStep]) -> Requests:
    """Return the requests of several steps together."""
    return Requests(
        get=sum(step.requests.get for step in steps),
        put=sum(step.requests.put for step in steps),
        list=sum(step.requests.list for step in steps),
        delete=sum(step.requests.delete for step in steps),
    )

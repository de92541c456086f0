"""Compute what it takes to build a corpus of a given size: core-hours, bytes, spill space, shards, S3 requests, cost.

Guarantee: a plan is a function of its arguments; this module measures, reads and writes nothing. The numbers of input
groups, spill files (for documents during the shuffle), buckets (ranges of the shuffled documents), shards and requests
follow the rules of the build itself (`corpus/builder/`). A test compares the requests with those that a build sends.

How: the costs that `corpus_rates.py` measured on a sample are multiplied by the size of the text over that of the
sample.

Limits: the requests are those of a build whose parts (one for each machine) begin at the same time and are not
interrupted, without retries of failed requests. A GET of a whole object counts as one request. The training of a
vocabulary is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from electra_dist.corpus.builder.build_corpus import divide_into_buckets
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.shuffle import NUM_CELLS
from electra_dist.corpus.builder.worker_stages import SAMPLE_BYTES
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.text_decoding import DOCUMENT_BYTES
from electra_dist.corpus.plan.corpus_rates import COLLECT, READ, SPILL, TOKENIZE, WRITE, CorpusRates

_KEYS_PER_LIST = 1000  # keys in one answer of ListObjectsV2
_RECORD_BYTES = 2000.0  # approximate size of the record of an input group or a bucket in progress/


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the text of a planned corpus, and the machines that build it."""

    text_bytes: float  # bytes of the documents as the build reads them, before decoding
    input_bytes: float  # bytes of the input files on disk or S3
    num_files: int  # input files
    num_documents: float
    raw_text_bytes: float  # bytes of the documents before `corpus prepare`; used only if a preparation is planned
    num_machines: int = 1  # machines; each builds one part of the corpus
    cores_per_machine: int = 1  # cores of a machine, with one worker process each


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of compute time, requests and traffic, in any one currency."""

    core_hour: float = 0.0  # price of one core for one hour
    thousand_requests: float = 0.0  # price of 1,000 requests of any kind
    gigabyte: float = 0.0  # price of 1e9 bytes that are read from or written to storage

    @property
    def any(self) -> bool:
        """Return whether at least one price is not 0."""
        return bool(self.core_hour or self.thousand_requests or self.gigabyte)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Numbers of S3 requests that one step of a build sends, by HTTP method; `list` counts ListObjectsV2."""

    get: int = 0
    put: int = 0
    list: int = 0
    delete: int = 0

    @property
    def total(self) -> int:
        """Return the number of requests of all four kinds together."""
        return self.get + self.put + self.list + self.delete


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One step of a planned corpus build: its core-hours, traffic and S3 requests."""

    name: str  # for the table of `electra-dist corpus plan`
    core_hours: float
    bytes_in: float = 0.0  # bytes read from storage
    bytes_out: float = 0.0  # bytes written to storage
    requests: Requests = field(default_factory=Requests)

    def cost(self, prices: Prices) -> float:
        """Return what the step costs (cores, requests and traffic) in the currency of the prices."""
        gigabytes = (self.bytes_in + self.bytes_out) / 1e9
        return (
            self.core_hours * prices.core_hour
            + self.requests.total / 1000 * prices.thousand_requests
            + gigabytes * prices.gigabyte
        )


@dataclass(frozen=True, kw_only=True)
class CorpusPlan:
    """Plan of a corpus build: what each step costs, the numbers of files and tasks, and the machines."""

    tokens: float  # tokens of the corpus, without [PAD]
    prepare: list[PlannedStep]  # stages of `corpus prepare`; empty if no preparation is planned
    parallel: list[PlannedStep]  # steps of the build that the workers of all machines divide among themselves
    merge: PlannedStep  # last step of the build, which runs in one process
    spill_bytes: float  # space that the spill files need until the corpus is finished
    num_groups: int  # groups of input files; one worker reads a group, so at most so many workers read at once
    num_spills: int  # spill files
    num_buckets: int  # ranges of the shuffled documents; at most so many workers make rows at once
    num_shards: int
    num_machines: int
    cores_per_machine: int

    @property
    def steps(self) -> list[PlannedStep]:
        """Return all steps in the order of the build: preparation, parallel steps, merge."""
        return [*self.prepare, *self.parallel, self.merge]

    @property
    def whole(self) -> PlannedStep:
        """Return the sums of all steps as one step with the name "all"."""
        requests = [step.requests for step in self.steps]
        return PlannedStep(
            name="all",
            core_hours=sum(step.core_hours for step in self.steps),
            bytes_in=sum(step.bytes_in for step in self.steps),
            bytes_out=sum(step.bytes_out for step in self.steps),
            requests=Requests(
                get=sum(one.get for one in requests),
                put=sum(one.put for one in requests),
                list=sum(one.list for one in requests),
                delete=sum(one.delete for one in requests),
            ),
        )

    @property
    def hours(self) -> float:
        """Return the elapsed hours of the whole build, with all machines at work and no wait for storage."""
        shared = sum(step.core_hours for step in [*self.prepare, *self.parallel])
        return shared / (self.num_machines * self.cores_per_machine) + self.merge.core_hours


def workload_of_tokens(rates: CorpusRates, tokens: float, *, file_bytes: float, kept: float = 1.0) -> Workload:
    """Return the workload of a corpus of `tokens` tokens, whose text is like the sample measured in `rates`.

    `file_bytes` is the size of one input file. `kept`, in (0, 1], is the share of the raw text that `corpus prepare`
    keeps.
    """
    scale = tokens / rates.tokens
    text_bytes = rates.text_bytes * scale
    input_bytes = rates.input_bytes * scale
    return Workload(
        text_bytes=text_bytes,
        input_bytes=input_bytes,
        num_files=max(1, round(input_bytes / file_bytes)),
        num_documents=rates.documents * scale,
        raw_text_bytes=text_bytes / kept,
    )


def workload_of_files(rates: CorpusRates, files: Sequence[InputFile], *, kept: float = 1.0) -> Workload:
    """Return the workload of a corpus of these files, whose text is like the sample measured in `rates`.

    `kept`, in (0, 1], is the share of the raw text that `corpus prepare` keeps.
    """
    input_bytes = sum(file.size for file in files)
    raw_text_bytes = input_bytes * rates.text_bytes / rates.input_bytes
    return Workload(
        text_bytes=raw_text_bytes * kept,
        input_bytes=input_bytes * kept,
        num_files=len(files),
        num_documents=rates.documents * raw_text_bytes * kept / rates.text_bytes,
        raw_text_bytes=raw_text_bytes,
    )


def machines_needed(plan: CorpusPlan, hours: float) -> int | None:
    """Return the least number of machines, with `plan.cores_per_machine` cores each, that finish in `hours`.

    None if no number suffices, because the merge (the last step, which runs in one process) alone takes longer.
    """
    hours_before_merge = hours - plan.merge.core_hours
    if hours_before_merge <= 0:
        return None
    shared_core_hours = sum(step.core_hours for step in [*plan.prepare, *plan.parallel])
    return max(1, math.ceil(shared_core_hours / (hours_before_merge * plan.cores_per_machine)))


def plan_corpus(rates: CorpusRates, request: BuildRequest, work: Workload) -> CorpusPlan:
    """Plan a corpus build for the workload `work`; of `request` only the settings are used, not inputs and output."""
    scale = work.text_bytes / rates.text_bytes
    counts = _count_files(rates, request, work)
    num_records = counts.buckets + counts.groups
    merge = PlannedStep(
        name="merge",
        core_hours=rates.record_cpu_s * num_records / 3600,
        bytes_in=_RECORD_BYTES * num_records,
        requests=counts.of_merging(),
    )
    return CorpusPlan(
        tokens=rates.tokens * scale,
        prepare=_prepare_steps(rates, work),
        parallel=_parallel_steps(rates, work, counts),
        merge=merge,
        spill_bytes=rates.spill_bytes * scale,
        num_groups=counts.groups,
        num_spills=counts.spills,
        num_buckets=counts.buckets,
        num_shards=counts.shards,
        num_machines=work.num_machines,
        cores_per_machine=work.cores_per_machine,
    )


def _count_files(rates: CorpusRates, request: BuildRequest, work: Workload) -> _Counts:
    """Estimate how many files and tasks of each kind a build has, from the sizes measured on the sample."""
    row_bytes = rates.shard_bytes * (work.text_bytes / rates.text_bytes)
    file_bytes = work.input_bytes / work.num_files
    num_groups = _num_groups(work.num_files, file_bytes, request.group_bytes)
    group_bytes = (work.text_bytes + DOCUMENT_BYTES * work.num_documents) / num_groups
    num_spills = num_groups * math.ceil(group_bytes / request.spill_bytes)
    num_buckets, shards_per_bucket = divide_into_buckets(work.text_bytes, row_bytes / request.shard_bytes)
    return _Counts(
        files=work.num_files,
        groups=num_groups,
        spills=num_spills,
        buckets=num_buckets,
        shards=num_buckets * shards_per_bucket,
        heldout_buckets=num_buckets if request.corpus.heldout_fraction else 0,
        heldout_shards=math.ceil(row_bytes * request.corpus.heldout_fraction / request.shard_bytes),
        sample_pieces=_sample_pieces(work, num_spills),
        parts=work.num_machines,
        workers=work.cores_per_machine,
        origin_files=request.corpus.origins,
    )


def _parallel_steps(rates: CorpusRates, work: Workload, counts: _Counts) -> list[PlannedStep]:
    """Plan the steps that all machines do in parallel: their costs grow with the text, compared with the sample."""
    scale = work.text_bytes / rates.text_bytes
    spill_bytes = rates.spill_bytes * scale
    core_hours = {step: seconds * scale / 3600 for step, seconds in rates.cpu_s.items()}
    return [
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
            bytes_out=rates.shard_bytes * scale,
            requests=counts.of_writing(),
        ),
    ]


def _num_groups(num_files: int, file_bytes: float, group_bytes: int) -> int:
    """Return into how many groups a build divides its input files, of `file_bytes` each.

    A group, which one worker reads, is complete when its files have at least `group_bytes`.
    """
    files_per_group = max(1, math.ceil(group_bytes / file_bytes))
    return math.ceil(num_files / files_per_group)


def _sample_pieces(work: Workload, num_spills: int) -> int:
    """Return how many pieces of spill files a build reads to estimate its number of shards (`sample_rows`).

    The shuffled documents are divided into `NUM_CELLS` equal ranges. The build reads a piece of every spill file that
    has documents in the first range, then in the next two, and so on, until it has its sample. The number of documents
    in a piece is taken as Poisson-distributed.
    """
    num_cells = min(NUM_CELLS, math.ceil(SAMPLE_BYTES * NUM_CELLS / work.text_bytes))
    num_readings = math.ceil(math.log2(num_cells + 1))
    documents_per_cell = work.num_documents / (NUM_CELLS * num_spills)
    return round(sum(num_spills * -math.expm1(-documents_per_cell * 2**number) for number in range(num_readings)))


def _prepare_steps(rates: CorpusRates, work: Workload) -> list[PlannedStep]:
    """Plan the stages of `corpus prepare`: the first one reads the raw text, each later one the text that is kept."""
    steps = []
    for number, stage in enumerate(rates.prepare):
        text = work.raw_text_bytes if number == 0 else work.text_bytes
        hours = stage.cpu_s / stage.text_bytes * text / 3600
        steps.append(PlannedStep(name=f"prepare: {stage.stage.partition('-')[2]}", core_hours=hours))
    return steps


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of files and processes of a build, from which its S3 requests are counted."""

    files: int  # input files
    groups: int  # groups of input files
    spills: int  # spill files
    buckets: int  # ranges of the shuffled documents
    shards: int
    heldout_buckets: int  # buckets that have held-out rows
    heldout_shards: int
    sample_pieces: int  # pieces of spill files that are read to estimate the number of shards
    parts: int  # parts of the build, one for each machine
    workers: int  # worker processes of each part
    origin_files: bool  # whether each shard has an origin file (corpus.origins)

    def of_reading(self) -> Requests:
        """Count the S3 requests that read the inputs; each machine lists all inputs with their sizes."""
        return Requests(get=self.files, list=_lists(self.files) * self.parts)

    def of_spilling(self) -> Requests:
        """Count the S3 requests that begin the build, ask which groups are read, and write spill files and records."""
        begin_get = 3  # each part asks whether corpus.json, build.json and order.json exist
        begin_put = 3  # vocab.txt, notes.json and build.json are written
        return Requests(
            get=begin_get * self.parts + self.groups,
            put=begin_put + self.spills + self.groups,
            list=(2 + _lists(self.groups) * self.parts) * self.parts,
        )

    def of_collecting(self) -> Requests:
        """Count the S3 requests that read the records of input groups, and then the documents in the spill files."""
        records_of_others = self.groups * (self.parts - 1)
        openings = (1 + self.workers) * self.parts  # of each spill file, whose table is read
        return Requests(
            get=records_of_others + self.spills * (openings + self.buckets) + self.sample_pieces * self.parts,
            put=self.parts,  # order.json, which each part writes
            list=(_lists(self.groups) + _lists(self.buckets)) * self.parts + _lists(self.spills) * openings,
        )

    def of_writing(self) -> Requests:
        files = self.shards + self.heldout_buckets
        if self.origin_files:
            files *= 2
        return Requests(put=files + self.buckets + self.parts)

    def of_merging(self) -> Requests:
        """Count the S3 requests of the merge, the last step: it checks every shard and deletes the build's records."""
        files_per_shard = 2 if self.origin_files else 1
        heldout_files = files_per_shard * self.heldout_buckets
        num_manifests = 2 if self.heldout_shards else 1  # corpus.json of the training and of the held-out corpus
        # In progress/ are the files of groups, spills, buckets, held-out rows and parts, order.json and notes.json.
        progress_files = self.groups + self.spills + self.buckets + heldout_files + self.parts + 2
        listed_shards = _lists(self.shards) + _lists(self.shards if self.origin_files else 0)  # with their sizes
        # order.json and vocab.txt take 3 requests, notes.json 2; build.json 2 for the merge and for each manifest.
        other_reads = 3 + 2 + 2 * (1 + num_manifests)
        written = 2  # corpus.json, and the report build.json
        if self.heldout_shards:
            written += files_per_shard * self.heldout_shards + 2  # its shards, vocab.txt and corpus.json
        if self.origin_files:
            written += num_manifests  # origins.json beside each corpus.json
        return Requests(
            get=self.groups + self.buckets + heldout_files + other_reads,
            put=written,
            list=_lists(self.groups)
            + _lists((1 + files_per_shard) * self.buckets)
            + _lists(progress_files)
            + listed_shards,
            delete=_lists(progress_files) + 2,  # build.json and notes.json after the others
        )


def _lists(num_keys: int) -> int:
    """Return how many ListObjectsV2 requests list `num_keys` keys; an empty folder takes one request, too."""
    return max(1, math.ceil(num_keys / _KEYS_PER_LIST))

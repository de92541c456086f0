"""Requests that a build sends to S3: few for each input group and shard, most of them in parallel."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.counting_store import CountingStore, Service

from electra_dist.corpus.builder.build_corpus import WHOLE, build_corpus, build_part
from electra_dist.corpus.builder.build_records import BuildOrder, BuildRecords
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.corpus.builder.worker_stages import group_inputs
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.store.interface import REQUEST_THREADS

NUM_GROUPS = 16_000  # of a corpus of 1 TB


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Callable[[], CountingStore]:
    """A function that returns a new store, which all modules of the build then open; all see the same objects."""
    service = Service()

    def new_store() -> CountingStore:
        store = CountingStore(service, REQUEST_THREADS)
        for name, module in list(sys.modules.items()):
            if name.startswith("electra_dist.corpus.") and hasattr(module, "open_store"):
                monkeypatch.setattr(module, "open_store", lambda url, endpoint_url=None: store)
        return store

    return new_store


def many_groups(request: BuildRequest, store: CountingStore) -> BuildRequest:
    """Return a request of 16,000 groups, all of which are recorded as read; only the first has documents."""
    file = InputFile("0", "s3://inputs/0", "jsonl", request.group_bytes, "texts")
    inputs = [file._replace(name=f"{number:06d}") for number in range(NUM_GROUPS)]
    request = dataclasses.replace(request, inputs=inputs)
    records = BuildRecords(store)
    [read] = records.groups().values()
    for group in group_inputs(inputs, request.group_bytes):
        update = {"number": group.number, "files_digest": group.digest, "modified": group.modified}
        without_documents = {} if group.number == 0 else {"spills": [], "counts": Counts()}
        records.record_group(read.model_copy(update={**update, **without_documents}))
    return request


def test_a_resumed_build_reads_the_record_of_each_group_once(
    build_request: Callable[..., BuildRequest],
    inputs: list[Path],
    stores: Callable[[], CountingStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part, and then the merge, of a build of 16,000 groups whose inputs are read."""
    store = stores()
    request = build_request(inputs[:1], "s3://counted", shard_size_mb=1.0)
    request = dataclasses.replace(request, inputs=[request.inputs[0]._replace(source="texts")])
    with monkeypatch.context() as patch:
        patch.setattr(BuildRecords, "record_order", stop)
        with pytest.raises(KeyboardInterrupt):
            build_part(request, WHOLE)
    request = many_groups(request, store)

    store = stores()
    build_part(request, WHOLE)
    few = 20
    pages = NUM_GROUPS / 1000
    assert store.requests["GET"] <= NUM_GROUPS + few
    assert store.requests["LIST"] <= 4 * pages + few
    assert store.num_serial <= NUM_GROUPS / REQUEST_THREADS + 4 * pages + 2 * few

    store = stores()
    join_parts(request.output, None)
    assert store.requests["GET"] <= NUM_GROUPS + few
    assert store.requests["DELETE"] <= pages + few
    assert store.num_serial <= NUM_GROUPS / REQUEST_THREADS + 4 * pages + 2 * few


def stop(records: BuildRecords, order: BuildOrder) -> None:
    raise KeyboardInterrupt


def test_a_further_group_or_shard_of_a_new_build_costs_few_requests(
    build_request: Callable[..., BuildRequest],
    prose: Callable[[int, int], list[str]],
    jsonl_file: Callable[..., Path],
    stores: Callable[[], CountingStore],
) -> None:
    texts = prose(600, 1)
    one_file = [jsonl_file(texts, "all.jsonl")]
    files = [jsonl_file(texts[number * 50 : number * 50 + 50], f"{number}.jsonl") for number in range(12)]

    def requests_of(paths: list[Path], shard_size_mb: float) -> tuple[int, int, int]:
        """Build the corpus, and return the numbers of its groups, its shards and the requests."""
        store = stores()
        request = build_request(paths, "s3://counted", shard_size_mb=shard_size_mb)
        shards = len(build_corpus(request).manifest.shards)
        num_requests = store.num_requests
        store.delete_all(store.list())
        return len(group_inputs(request.inputs, request.group_bytes)), shards, num_requests

    groups, shards, requests = requests_of(one_file, 1.0)
    assert (groups, shards) == (1, 1)
    assert requests <= 70
    groups, more_shards, requests_for_shards = requests_of(one_file, 0.04)
    assert groups == 1
    assert more_shards > 10
    assert requests_for_shards - requests <= 7 * (more_shards - 1)
    more_groups, _, requests_for_groups = requests_of(files, 0.04)
    assert more_groups > 2
    # Each worker reads a part of each spill file for each shard.
    assert requests_for_groups - requests_for_shards <= (more_shards + 3) * (more_groups - 1)

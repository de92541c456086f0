"""What a proxy sends in place of a file of a build or a corpus is read again, not taken for damage."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.counting_store import CountingStore, Service
from support.wrong_answers import ERROR_DOCUMENT

from electra_dist.corpus.build_report import find_preparations
from electra_dist.corpus.builder.build_corpus import WHOLE, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.corpus.builder.shuffle import NUM_CELLS, open_spills
from electra_dist.corpus.origins import open_origins
from electra_dist.data.manifest import read_manifest
from electra_dist.errors import ManifestMismatch
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore

NUM_WRONG = 2  # wrong bodies before the right one


class WrongAtFirst(CountingStore):
    """Store in memory that answers the first readings of each object, or of each range, with an error document."""

    def __init__(self, objects: Service, num_wrong: int = NUM_WRONG) -> None:
        super().__init__(objects)
        self._num_wrong = num_wrong
        self._readings: Counter[tuple[object, ...]] = Counter()

    def _is_wrong(self, *place: object) -> bool:
        self._readings[place] += 1
        return self._readings[place] <= self._num_wrong

    def read(self, key: str) -> bytes:
        data = super().read(key)
        return ERROR_DOCUMENT if self._is_wrong(key) else data

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        data = super().read_range(key, start, length)
        return memoryview(bytearray(ERROR_DOCUMENT[:length])) if self._is_wrong(key, start, length) else data


def objects_of(folder: str | Path) -> Service:
    """Return a service with the files of a folder as objects."""
    service = Service()
    store = LocalStore(Path(folder))
    service.objects = {key: store.read(key) for key in store.list()}
    return service


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture
def wrong_at_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Service]]:
    """A function after whose call all modules of the build open stores of the class `WrongAtFirst`.

    It returns the services of the stores by URL; a service begins with the files of the folder of this name.
    """
    services: dict[str, Service] = {}

    def open_wrong(url: str, endpoint_url: str | None = None) -> WrongAtFirst:
        if url not in services:
            services[url] = objects_of(url)
        return WrongAtFirst(services[url])

    def patch() -> dict[str, Service]:
        for name, module in list(sys.modules.items()):
            if name.startswith("electra_dist.corpus.") and hasattr(module, "open_store"):
                monkeypatch.setattr(module, "open_store", open_wrong)
        return services

    return patch


def test_a_merge_reads_the_records_of_the_build_again(
    build_request: Callable[..., BuildRequest], inputs: list[Path], wrong_at_first: Callable[[], dict[str, Service]]
) -> None:
    whole = build_request(inputs, "whole", heldout_fraction=0.1, origins=True)
    build_corpus(whole)
    request = build_request(inputs, "parts", heldout_fraction=0.1, origins=True)
    build_part(request, WHOLE)

    services = wrong_at_first()
    join_parts(request.output, None)

    built = {**services[request.output].objects}
    heldout = services[f"{request.output}/heldout"].objects
    assert heldout
    built |= {f"heldout/{key}": data for key, data in heldout.items()}
    assert built == objects_of(whole.output).objects


def documents_of(store: Store, names: list[str]) -> list[object]:
    return [list(spill.documents(range(NUM_CELLS))) for spill in open_spills(store, names)]


def test_spill_files_are_read_again(build_request: Callable[..., BuildRequest], inputs: list[Path]) -> None:
    request = build_request(inputs)
    build_part(request, WHOLE)
    store = LocalStore(Path(request.output))
    names = store.list("progress/spills/")
    assert names

    expected = documents_of(store, names)

    service = objects_of(request.output)
    assert documents_of(WrongAtFirst(service), names) == expected
    with pytest.raises(ManifestMismatch, match="damaged"):
        documents_of(WrongAtFirst(service, num_wrong=5), names)


def test_origin_files_are_read_again(build_request: Callable[..., BuildRequest], inputs: list[Path]) -> None:
    request = build_request(inputs, origins=True)
    build_corpus(request)
    folder = Path(request.output)
    manifest = read_manifest(LocalStore(folder))
    expected = open_origins(LocalStore(folder), manifest)
    found = open_origins(WrongAtFirst(objects_of(folder)), manifest)
    assert expected is not None
    assert found is not None

    for file in expected.files:
        assert found.table(file.shard) == expected.table(file.shard)


def test_the_report_of_a_preparation_is_read_again(tmp_path: Path, wrong_at_first: Callable[[], object]) -> None:
    source = {"license": "CC0", "documents_in": 2, "documents_dropped": 1, "documents_out": 1}
    (tmp_path / "documents").mkdir()
    (tmp_path / "prepare.json").write_text(json.dumps({"sources": {"web": source}, "dropped": {}}))

    wrong_at_first()
    [prepared] = find_preparations([str(tmp_path / "documents")], None).values()

    assert prepared.sources["web"].license == "CC0"

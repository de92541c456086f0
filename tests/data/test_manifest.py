"""corpus.json: its validation, its fingerprint, and the error messages for a bad one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import tiny_tree, write_corpus

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest, read_manifest, write_manifest
from electra_dist.errors import ManifestMismatch, StoreError, StoreMissing, UserError
from electra_dist.store.open_store import open_store
from electra_dist.train.check_inputs import check_inputs


@pytest.fixture
def tree(corpus: Any) -> dict[str, Any]:
    """The manifest of the test corpus as JSON values."""
    return corpus.manifest.model_dump(mode="json")


def test_manifest_is_read_back_as_written_with_the_right_totals(corpus: Any) -> None:
    assert read_manifest(corpus.store) == corpus.manifest
    assert read_manifest(corpus.store).fingerprint == corpus.manifest.fingerprint
    assert corpus.manifest.num_rows == len(corpus.rows)
    assert corpus.manifest.num_tokens == corpus.rows.size


def test_the_rows_at_the_borders_of_every_shard_are_named_after_their_own_shard(corpus: Any) -> None:
    first_id = 0
    for shard in corpus.manifest.shards:  # one of them has a single row
        last_id = first_id + shard.rows - 1
        assert corpus.manifest.row_name(first_id) == f"{shard.name} row 0"
        assert corpus.manifest.row_name(last_id) == f"{shard.name} row {shard.rows - 1}"
        first_id = last_id + 1


def test_fingerprint_depends_on_every_value_and_the_order_of_shards_but_not_of_keys(tree: dict[str, Any]) -> None:
    original = CorpusManifest.model_validate(tree).fingerprint
    assert CorpusManifest.model_validate(dict(reversed(tree.items()))).fingerprint == original
    fingerprints = {original}
    changes: list[dict[str, Any]] = [
        {**tree, "seq_len": 99},
        {**tree, "dtype": "uint32"},
        {**tree, "builder": {"x": 1}},
        {**tree, "tokenizer": {**tree["tokenizer"], "sha256": "1" * 64}},
        {**tree, "shards": tree["shards"][::-1]},
        {**tree, "shards": tree["shards"][:-1]},
    ]
    for field, value in {"name": "other", "rows": 77, "tokens": 3, "bytes": 54_321, "sha256": "2" * 64}.items():
        changes.append({**tree, "shards": [{**tree["shards"][0], field: value}, *tree["shards"][1:]]})
    for change in changes:
        fingerprints.add(CorpusManifest.model_validate(change).fingerprint)
    assert len(fingerprints) == len(changes) + 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shards": []}, UserError, "no shards"),
        ({"format": 2}, ManifestMismatch, "`format`"),
        ({"typo": 1}, ManifestMismatch, "`typo`"),
        ({"dtype": "int8"}, ManifestMismatch, "`dtype`"),
    ],
)
def test_bad_manifest_gives_one_line_that_names_the_corpus_and_the_field(
    tree: dict[str, Any], tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "corpus.json").write_text(json.dumps({**tree, **change}))
    with pytest.raises(error, match=message) as caught:
        read_manifest(open_store(str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_bad_shard_or_tokenizer_entries_are_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def read(new: dict[str, Any]) -> None:
        (tmp_path / "corpus.json").write_text(json.dumps(new))
        read_manifest(store)

    first = tree["shards"][0]
    with pytest.raises(ManifestMismatch, match="listed twice"):
        read({**tree, "shards": [first, first]})
    with pytest.raises(StoreError, match="not a relative path"):
        read({**tree, "shards": [{**first, "name": "../../etc/passwd"}]})
    with pytest.raises(ManifestMismatch, match=r"`shards.0.rows`"):
        read({**tree, "shards": [{**first, "rows": 0}]})
    special = dict(tree["tokenizer"]["special"])
    special.pop("[MASK]")
    with pytest.raises(ManifestMismatch, match=r"special lacks \[MASK\]"):
        read({**tree, "tokenizer": {**tree["tokenizer"], "special": special}})
    with pytest.raises(ManifestMismatch, match="outside the vocabulary"):
        read({**tree, "tokenizer": {**tree["tokenizer"], "vocab_size": 3}})


def test_numbers_that_contradict_one_another_are_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    first, *others = tree["shards"]
    tokenizer = {**tree["tokenizer"], "lowercase": True}
    changes: dict[str, dict[str, Any]] = {
        "tokens": {"shards": [{**first, "tokens": first["rows"] * tree["seq_len"] + 1}, *others]},
        "builder.lowercase": {"tokenizer": tokenizer, "builder": {"lowercase": False}},
        "builder.seq_len": {"builder": {"seq_len": tree["seq_len"] * 2}},
    }
    for word, change in changes.items():
        (tmp_path / "corpus.json").write_text(json.dumps({**tree, **change}))
        with pytest.raises(ManifestMismatch, match=word):
            read_manifest(open_store(str(tmp_path)))


def test_a_casing_that_the_build_did_not_have_is_refused_before_a_run(tmp_path: Path) -> None:
    write_corpus(str(tmp_path / "corpus"), [20])
    file = tmp_path / "corpus" / "corpus.json"
    config = Config.model_validate(tiny_tree(tmp_path / "run", str(tmp_path / "corpus"), **{"data.heldout": None}))
    for built_with, claimed in ((True, False), (False, True)):
        tree = json.loads(file.read_text())
        tree["builder"], tree["tokenizer"]["lowercase"] = {"lowercase": built_with}, claimed
        file.write_text(json.dumps(tree))
        with pytest.raises(ManifestMismatch, match=r"lowercase is .* but builder.lowercase is") as caught:
            check_inputs(config, world_size=1)
        assert "\n" not in str(caught.value)


def test_a_lost_heldout_corpus_and_rows_that_the_run_trains_on_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(str(corpus), [20, 10])
    tree = json.loads((corpus / "corpus.json").read_text())
    (corpus / "corpus.json").write_text(json.dumps({**tree, "totals": {"documents_heldout": 3}}))
    config = Config.model_validate(tiny_tree(tmp_path / "run", str(corpus)))
    with pytest.raises(
        StoreMissing, match=r"no held-out corpus; restore .*, or delete the corpus .*/corpus and build"
    ):
        check_inputs(config, world_size=1)

    write_corpus(str(corpus / "heldout"), [20])  # what a build of the same text into that folder gives
    with pytest.raises(ManifestMismatch, match=r"rows that the run trains on: shard-000000\.tar of .*/corpus; name"):
        check_inputs(config, world_size=1)
    write_corpus(str(corpus / "heldout"), [20], seed=9)
    check_inputs(config, world_size=1)
    phases = {"data.phases": [{"corpus": f"{corpus}/heldout", "from_step": 5}]}
    phased = Config.model_validate(tiny_tree(tmp_path / "run", str(corpus), **phases))
    with pytest.raises(ManifestMismatch, match=r"rows that the run trains on: shard-000000\.tar of .*/heldout"):
        check_inputs(phased, world_size=1)

    (corpus / "shard-000001.tar").unlink()
    with pytest.raises(ManifestMismatch, match=r"1 of the 2 shards .* missing, such as shard-000001\.tar; restore"):
        check_inputs(config, world_size=1)


def test_missing_manifest_and_one_that_is_not_json_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(StoreMissing, match=r"no finished corpus.*electra-dist corpus build"):
        read_manifest(store)
    place = re.escape(f"correct data.corpus (relative to the current folder, {os.getcwd()})")
    with pytest.raises(StoreMissing, match=place):
        read_manifest(open_store("no/corpus"))
    for garbage in (b"{", b"\xff\xfe", b""):
        store.write("corpus.json", garbage)
        with pytest.raises(ManifestMismatch, match="not JSON"):
            read_manifest(store)


def test_write_manifest_writes_only_corpus_json(corpus: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    write_manifest(store, corpus.manifest)
    assert store.list() == ["corpus.json"]
    assert json.loads(store.read("corpus.json"))["shards"][0]["rows"] == 21

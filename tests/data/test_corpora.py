"""The corpora of a run with `data.phases`: shards, rows and fingerprint, and corpora that are refused."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.real_runs import synthetic_rows, tiny_tree, write_corpus
from support.remote_store import Remote

from electra_dist.config import Config, DataConfig
from electra_dist.config.sections.training import PhaseConfig
from electra_dist.data import node_cache
from electra_dist.data.corpora import Corpora, open_corpora
from electra_dist.data.shard_cache import ShardCache
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.train import open_cache


def data_of(folder: Path, *phases: tuple[str, int]) -> DataConfig:
    """Return the section `data` of a run on the corpus `a` of a folder, with later phases (name, first step)."""
    later = tuple(PhaseConfig(corpus=str(folder / name), from_step=step) for name, step in phases)
    return DataConfig(corpus=str(folder / "a"), phases=later)


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Return a folder with the corpora a, b and c, whose rows differ."""
    for seed, name in enumerate("abc"):
        write_corpus(str(tmp_path / name), [9, 4], seed)
    return tmp_path


def change_manifest(corpus: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change fields in the corpus.json of a corpus."""
    file = corpus / "corpus.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def test_a_run_without_phases_has_its_corpus_itself(corpora: Path) -> None:
    opened = open_corpora(data_of(corpora))
    assert opened.fingerprint == opened.phases[0].manifest.fingerprint
    assert opened.url == opened.phases[0].store.url
    assert opened.phase_fingerprints == ()
    assert opened.sizes().keys() == {"rows", "tokens", "seq_len"}
    assert opened.row_order(1, 2, 8).phases[0].end_position is None


def test_every_step_border_and_corpus_changes_the_fingerprint(corpora: Path) -> None:
    runs = [(("b", 5),), (("b", 6),), (("c", 5),), (("b", 5), ("c", 6)), (("c", 5), ("b", 6)), ()]
    fingerprints = {open_corpora(data_of(corpora, *phases)).fingerprint for phases in runs}
    assert len(fingerprints) == len(runs)
    change_manifest(corpora / "b", lambda tree: tree["shards"].reverse())
    assert open_corpora(data_of(corpora, ("b", 5))).fingerprint not in fingerprints


def test_rows_of_all_corpora_are_read_through_one_cache_by_their_names(corpora: Path) -> None:
    opened = open_corpora(data_of(corpora, ("b", 5), ("c", 7)))
    assert [opened.row_name(row_id) for row_id in (0, 9, 13, 30)] == [
        "shard-000000.tar row 0",
        "shard-000001.tar row 0",
        "phase-1/shard-000000.tar row 0",
        "phase-2/shard-000000.tar row 4",
    ]
    assert opened.row_location(30) == f"{corpora}/c/shard-000000.tar row 4"
    assert [opened.shard_name(shard) for shard in (1, 2, 5)] == [
        "shard-000001.tar",
        "phase-1/shard-000000.tar",
        "phase-2/shard-000001.tar",
    ]
    cache = ShardCache(opened, Path("unused"), fetch_threads=1)
    rows = cache.read_rows(np.array([0, 3, 4]), np.array([8, 2, 0]))
    cache.close()
    assert (rows[0] == synthetic_rows(9, 0)[8]).all()
    assert (rows[1] == synthetic_rows(4, 1001)[2]).all()
    assert (rows[2] == synthetic_rows(9, 2000)[0]).all()


def test_shards_of_a_corpus_that_is_not_local_are_fetched_into_the_cache_of_the_node(
    corpora: Path, tmp_path: Path
) -> None:
    opened = open_corpora(data_of(corpora, ("b", 5)))
    far = dataclasses.replace(opened.phases[1], store=Remote(corpora / "b"))
    opened = Corpora(phases=(opened.phases[0], far))
    cache = ShardCache(opened, tmp_path / "cache", fetch_threads=1)
    rows = cache.read_rows(np.array([1, 2]), np.array([3, 0]))
    cache.close()
    assert (rows[0] == synthetic_rows(4, 1)[3]).all()
    assert (rows[1] == synthetic_rows(9, 1000)[0]).all()
    fetched = [file.stem for file in (tmp_path / "cache").glob("*.tar")]
    assert fetched == [opened.phases[1].manifest.shards[0].sha256]


@pytest.mark.parametrize("far_phase", [0, 1, None])
def test_a_node_caches_what_is_fetched_of_any_phase_and_makes_room_for_that_alone(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far_phase: int | None
) -> None:
    """A run on several nodes never caches in its folder, which they share, whichever of its corpora is on S3."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    monkeypatch.setattr(open_cache, "gather", lambda value: [value])
    monkeypatch.setattr(node_cache, "_mounts", list)
    opened = open_corpora(data_of(corpora, ("b", 5)))
    phases = list(opened.phases)
    if far_phase is not None:
        phases[far_phase] = dataclasses.replace(phases[far_phase], store=Remote(corpora / "ab"[far_phase]))
    opened = Corpora(phases=tuple(phases))
    config = Config.model_validate(tiny_tree(tmp_path / "run", str(corpora / "a")))
    inputs = SimpleNamespace(corpora=opened, heldout=None)

    folder = open_cache.shard_folder(config, opened)
    lines = open_cache.describe_caches(config, inputs)  # type: ignore[arg-type]

    if far_phase is None:
        assert (folder, lines) == (config.cache_folder, [])
        return
    assert folder == tmp_path / f"electra-dist-cache-{os.getuid()}"
    fetched_bytes = sum(entry.bytes for entry in phases[far_phase].manifest.shards)
    assert sum(shard.entry.bytes for shard in opened.fetched_shards) == fetched_bytes
    assert f"the corpus has {fetched_bytes / 1e9:,.1f} GB" in lines[0]
    assert lines[0].startswith(f"shard cache: {folder} ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["tokenizer"].update(sha256="0" * 64), "b has another tokenizer .* than data.corpus .*/a"),
        (lambda tree: tree["tokenizer"].update(lowercase=False), "b has another tokenizer .*cased"),
        (lambda tree: tree.update(seq_len=64), "b has another row length .64. than data.corpus .*/a .32."),
        (lambda tree: tree.update(dtype="uint32"), "b has another type of token ids .uint32. than data.corpus"),
    ],
)
def test_corpora_that_do_not_fit_are_refused(corpora: Path, change: Any, message: str) -> None:
    change_manifest(corpora / "b", change)
    with pytest.raises(ManifestMismatch, match=message):
        open_corpora(data_of(corpora, ("b", 5)))


def test_a_corpus_that_is_used_twice_or_is_missing_is_refused(corpora: Path) -> None:
    (corpora / "copy").symlink_to(corpora / "a")
    with pytest.raises(ManifestMismatch, match=r"a and .*copy are the same corpus"):
        open_corpora(data_of(corpora, ("copy", 5)))
    with pytest.raises(StoreMissing, match=r"no finished corpus; build it .*correct data\.phases\[0\]\.corpus"):
        open_corpora(data_of(corpora, ("nothing", 5)))


def test_a_missing_shard_of_any_phase_is_missed_at_the_start(corpora: Path) -> None:
    opened = open_corpora(data_of(corpora, ("b", 5)))
    opened.check_shards()
    (corpora / "b" / "shard-000001.tar").unlink()
    with pytest.raises(
        ManifestMismatch, match=r"b: 1 of the 2 .* from step 5 on are missing, such as shard-000001.tar"
    ):
        opened.check_shards()
    (corpora / "a" / "shard-000000.tar").unlink()
    with pytest.raises(ManifestMismatch, match=r"a: 1 of the . shards that the run reads are missing.*build it again"):
        opened.check_shards()

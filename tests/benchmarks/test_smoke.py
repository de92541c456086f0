"""Every CPU benchmark at toy size: that it runs, that both sides do the same work, what it records. Never times."""

import json
from pathlib import Path
from typing import Any

import corpus_builder
import loader
import pytest
import restart
import run

from electra_dist.corpus.builder.build_corpus import build_corpus


def _run(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark and return the record that it saved."""
    assert run.main([name, "--smoke", "--save", "--results", str(folder), *arguments]) == 0
    (file,) = folder.glob(f"{name}-2*.json")
    saved = json.loads(file.read_text())
    assert saved["smoke"]
    assert saved["command"].startswith(f"python benchmarks/run.py {name} --smoke")
    assert saved["lines"]
    return saved


@pytest.mark.sample
def test_both_sides_of_the_step_have_equal_losses(tmp_path: Path) -> None:
    ways = _run("step", tmp_path)
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 3e-2)):
        ours, *rivals = ways[precision].values()
        assert len(rivals) == 2
        for kind in ("mlm", "rtd"):
            exact = ours["losses_without_dropout"][kind]
            assert exact > 0
            assert all(
                rival["losses_without_dropout"][kind] == pytest.approx(exact, rel=tolerance) for rival in rivals
            )


@pytest.mark.sample
def test_readers_read_the_same_rows(tmp_path: Path) -> None:
    record = _run("loader", tmp_path)
    ways = record["ways"]
    assert {"ours", "webdataset", "webdataset, blocks"} <= ways.keys()
    assert {(way["rows"], way["digest"]) for way in ways.values()} == {(2048, ways["ours"]["digest"])}
    assert set(record["packages"]) == {"electra-dist", "webdataset", "mosaicml-streaming", "litdata"}
    assert [first["epochs"] for first in record["first_batches"]] == [0.0, 0.1, 0.5, 0.99, 1000.5]
    assert all(first["seconds"] > 0 and 256 * 512 < first["memory_bytes"] < 100e6 for first in record["first_batches"])


def test_another_order_has_the_same_digest_and_another_row_has_not() -> None:
    rows = loader.np.arange(60, dtype=loader.np.uint16).reshape(6, 10)
    exact = loader.digest(iter([rows]))
    assert loader.digest(iter([rows[3:], rows[:3]])) == exact
    assert loader.digest(iter([rows[:, ::-1]])) != exact
    assert loader.digest(iter([rows[[0, 0, 2, 3, 4, 5]]])) != exact


@pytest.mark.sample
def test_builders_find_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_only: list[int] = []
    monkeypatch.setattr(corpus_builder, "WORKERS", (1,))  # a second worker is a second start of Python
    monkeypatch.setattr(corpus_builder, "build_corpus", lambda *given: one_only.append(1) or build_corpus(*given))
    peak_memory = corpus_builder.peak_memory  # each starts a Python: one of them is enough
    monkeypatch.setattr(corpus_builder, "peak_memory", lambda name, *rest: name == "ours" and peak_memory(name, *rest))
    record = _run("corpus_builder", tmp_path)
    assert record["text_tokens"] > 10_000
    assert {"ours", "tokenizers", "datatrove"} <= record["workers"]["1"].keys()
    assert record["workers"]["1"]["ours"]["memory_bytes"] > 20e6
    assert len(one_only) == 2  # the count and one timed round


def test_different_work_ends_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corpus_builder.WAYS, "ours", lambda *given: 7)
    with pytest.raises(SystemExit, match="not the same work"):
        run.main(["corpus_builder", "--smoke"])


@pytest.mark.sample
def test_a_save_by_every_way_is_timed(tmp_path: Path) -> None:
    record = _run("checkpoint", tmp_path)
    assert list(record["ways"]) == ["ours", "memcpy", "DeepSpeed", "torch.save"]
    assert all(way["median_s"] > 0 for way in record["ways"].values())
    assert record["write_behind_s"] > 0


@pytest.mark.sample
def test_the_head_takes_a_third_of_eagers_memory_and_has_the_same_loss(tmp_path: Path) -> None:
    record = _run("head", tmp_path)  # the exit code says so
    assert 0 < record["memory_ratio"] < 1 / 3


@pytest.mark.sample
def test_a_small_cache_fetches_less_again_than_one_that_deletes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    record = _run("shard_cache", tmp_path)
    assert [size["cache"] for size in record["eviction"]] == [0.5, 0.75, 0.9]
    for size in record["eviction"]:
        # Beside the part that stays there must be room for two windows of one shard, and one that straddles them.
        assert all(1 - size["cache"] - 0.05 <= share <= 1 - size["cache"] + 0.12 for share in size["ours"])
        assert min(size["least_recently_used"]) > max(size["ours"])


@pytest.mark.multiproc
@pytest.mark.drill  # eight starts of DeepSpeed
def test_restarts_are_fresh_then_resumed(tmp_path: Path) -> None:
    starts = _run("restart", tmp_path)["starts"]
    for kind, by in starts.items():
        for begun in (start for who in ("ours", "DeepSpeed") for start in by[who]):
            assert begun["resumed"] == (kind == "resume")
            assert begun["total_s"] == pytest.approx(sum(begun["seconds"].values()), abs=0.5)
            assert begun["seconds"].keys() == set(restart.PARTS)
            assert min(begun["seconds"].values()) >= 0

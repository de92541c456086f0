"""Every CPU benchmark at toy size: that it runs, that both sides do the same work, what it records. Never times."""

import json
import subprocess
from pathlib import Path
from typing import Any

import context_auc
import corpus_builder
import loader
import long_runs
import many_ranks
import pytest
import restart
import shard_cache
import step
import step_modern
from builder_parts import ways

from electra_dist.config_file import load_config
from electra_dist.corpus.build_corpus import build_corpus
from electra_dist.errors import UserError
from electra_dist.planning.corpus.corpus_rates import STEPS
from electra_dist.run.metrics import iter_evaluations
from electra_dist.train.skip_list_file import SkipList
from electra_dist.train.stopped_steps import skip_for_rollback
from launcher.cli.corpus_plan import read_rates


def _run(benchmark: Any, folder: Path, *arguments: str) -> dict[str, Any]:
    """Its record, which must be the one that it saved."""
    record = benchmark.main(["--smoke", "--save", str(folder), *arguments])
    (file,) = folder.glob(f"{record['benchmark']}-2*.json")
    saved = json.loads(file.read_text())
    assert saved == json.loads(json.dumps(record))
    assert saved["smoke"]
    assert saved["command"].startswith(f"python benchmarks/{benchmark.__name__}.py --smoke")
    assert {"hardware", "versions", "date"} <= saved.keys()
    assert saved["lines"]
    return saved


@pytest.mark.sample
def test_the_steps_of_both_architectures_and_of_modernbert_are_compared(tmp_path: Path) -> None:
    sides = _run(step_modern, tmp_path, "--rounds", "1")["lengths"]["160"]
    assert list(sides) == ["ours", "our bert", "Hugging Face", "Hugging Face, gathered"]
    exact = sides["ours"]["losses_without_dropout"]
    for name in ("Hugging Face", "Hugging Face, gathered"):
        assert sides[name]["losses_without_dropout"] == pytest.approx(exact, rel=1e-4)
    assert sides["ours"]["extra_peak_bytes"] > 0
    assert sides["our bert"]["parameters"] == pytest.approx(sides["ours"]["parameters"], rel=0.2)


@pytest.mark.drill  # the default tests run these commands on long runs, too
def test_commands_on_a_long_run_and_a_parse_of_its_records_are_measured(tmp_path: Path) -> None:
    needs = _run(long_runs, tmp_path)["needs"]["1000"]
    assert {"parse of all records", "status", "report", "resume"} <= needs.keys()
    assert all(need["cpu_s"] > 0 for need in needs.values())


@pytest.mark.sample
def test_both_sides_of_the_step_have_equal_losses(tmp_path: Path) -> None:
    record = _run(step, tmp_path, "--rounds", "1", "--profile")
    ways = record["ways"]
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 3e-2)):
        products = ways[precision].pop(step.PRODUCTS)
        assert products["share_of_ceiling"]["median"] > 0
        assert products["products"] > 0
        ours, *rivals = ways[precision].values()
        assert len(rivals) == 2
        for kind in ("mlm", "rtd"):
            exact = ours["losses_without_dropout"][kind]
            assert exact > 0
            assert all(
                rival["losses_without_dropout"][kind] == pytest.approx(exact, rel=tolerance) for rival in rivals
            )
    assert {"matrix products", "optimizer", "GELU"} <= record["profile_ms"]["fp32"].keys()


def test_packed_rows_hold_more_real_tokens(tmp_path: Path) -> None:
    ways = _run(step, tmp_path, "--packed", "--rounds", "1")["ways"]
    assert ways["packed"]["real_share"] > 0.95 > ways["padded"]["real_share"] > 0.5


@pytest.mark.sample
def test_readers_read_the_same_rows(tmp_path: Path) -> None:
    record = _run(loader, tmp_path, "--rounds", "1")
    ways = record["ways"]
    assert {"ours", "webdataset", "webdataset, blocks"} <= ways.keys()
    assert {(way["rows"], way["digest"]) for way in ways.values()} == {(2048, ways["ours"]["digest"])}
    assert set(record["packages"]) == {"electra-dist", "webdataset", "mosaicml-streaming", "litdata"}
    assert [row["epochs"] for row in record["positions"]] == [0.0, 0.1, 0.5, 0.99, 1000.5]
    assert all(0 < row["order_peak_bytes"] < 10e6 for row in record["positions"])
    assert record["gets_per_million_rows"] == pytest.approx(1e6 / 1024)


@pytest.mark.sample
def test_a_small_cache_fetches_less_again_and_nodes_that_share_fetch_once(tmp_path: Path) -> None:
    record = _run(shard_cache, tmp_path)
    assert [size["cache"] for size in record["eviction"]] == [0.5, 0.75, 0.9]
    for size in record["eviction"]:
        # Beside the part that stays there must be room for two windows of one shard, and one that straddles them.
        assert all(1 - size["cache"] - 0.05 <= share <= 1 - size["cache"] + 0.12 for share in size["ours"])
        assert min(size["least_recently_used"]) > max(size["ours"])
    store_shares = {run["name"]: run["store_share_by_epoch"][0] for run in record["nodes"]}
    assert len(store_shares) == 5
    alone = [share for name, share in store_shares.items() if "alone" in name]
    sharing = [share for name, share in store_shares.items() if "sharing" in name]
    assert alone == pytest.approx([3], abs=0.01)  # three nodes
    # A busy machine makes peers look away; tests/data/test_sharing.py counts the fetches exactly.
    assert all(1 <= share < 3 for share in sharing)


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
    monkeypatch.setattr(ways, "build_corpus", lambda *given: one_only.append(1) or build_corpus(*given))
    peak_memory = ways.peak_memory  # each starts a Python: one of them is enough
    monkeypatch.setattr(ways, "peak_memory", lambda name, *given: name == "ours" and peak_memory(name, *given))
    record = _run(corpus_builder, tmp_path)
    assert record["text_tokens"] > 10_000
    assert {"ours", "tokenizers", "datatrove"} <= record["workers"]["1"].keys()
    assert record["workers"]["1"]["ours"]["memory_bytes"] > 20e6
    assert len(one_only) == 2  # the count and one timed round
    rates = read_rates(next(tmp_path.glob("corpus_builder-*.json")))
    assert rates.tokens >= record["text_tokens"] and rates.cpu_s.keys() == set(STEPS)
    assert [stage.stage for stage in rates.prepare][:2] == ["01-filter", "02-exact-signatures"]


def test_different_work_ends_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ways.WAYS, "ours", lambda *given: 7)
    with pytest.raises(SystemExit, match="not the same work"):
        corpus_builder.main(["--smoke"])


@pytest.mark.multiproc
@pytest.mark.drill  # eight starts of DeepSpeed
def test_restarts_are_fresh_then_resumed(tmp_path: Path) -> None:
    starts = _run(restart, tmp_path, "--rounds", "1")["starts"]
    for kind, by in starts.items():
        for begun in (start for who in ("ours", "DeepSpeed") for start in by[who]):
            assert begun["resumed"] == (kind == "resume")
            assert begun["total_s"] == pytest.approx(sum(begun["seconds"].values()), abs=0.5)
            assert begun["seconds"].keys() == set(restart.PARTS)
            assert min(begun["seconds"].values()) >= 0


@pytest.mark.sample
def test_the_context_auc_of_two_settings_is_read_from_their_runs(tmp_path: Path, demo_corpus: Path) -> None:
    arguments = ["--corpus", str(demo_corpus), "--output", str(tmp_path / "runs"), "--seeds", "1", "--steps", "4"]
    picture = tmp_path / "curves.png"
    record = _run(context_auc, tmp_path, *arguments, "--picture", str(picture))
    assert record["settings"].keys() == record["curves"].keys() == {"curriculum", "t1"}
    for name, by_seed in record["curves"].items():
        evaluations = [line for line in iter_evaluations(tmp_path / "runs" / f"{name}-1") if line.step in (1, 4)]
        curve = by_seed["1"]
        assert len(curve["tokens"]) == 4
        assert [curve["context_auc"][0], curve["context_auc"][-1]] == [line.context_auc for line in evaluations]
        assert curve["tokens"][-1] == 4 * 32 * 64
        assert curve["flops"][-1] == pytest.approx(4 * curve["flops"][0])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("exit_code", [0, 78])
def test_a_run_that_the_guard_ended_is_known_by_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    config = load_config(context_auc.CONFIG, [f"run_dir={tmp_path / 'run'}", "guard.max_rollbacks=0"])
    skips = SkipList(tmp_path, [])
    skips.streak = [7]
    with pytest.raises(UserError) as guard:
        skip_for_rollback(config, skips)
    log = tmp_path / "run.log"
    log.write_text(f"error: {guard.value}\n")
    ended = subprocess.CompletedProcess([], exit_code)
    monkeypatch.setattr(context_auc.subprocess, "run", lambda *arguments, **keywords: ended)
    assert context_auc.train([], log) == (exit_code == 0)
    log.write_text("error: another error\n")
    if exit_code:
        with pytest.raises(SystemExit, match="exit code 78; read"):
            context_auc.train([], log)


def test_the_table_leaves_a_diverged_seed_out_of_the_means() -> None:
    flops = [1e15, 2e15, 3e15]
    finished = {"flops": flops, "context_auc": [0.5, 0.56, 0.7], "mlm_loss": [7.0, 6.0, 5.0], "diverged": False}
    diverged = {"flops": flops[:1], "context_auc": [0.5], "mlm_loss": [9.0], "diverged": True}
    row = context_auc.table_row("base", [finished, diverged])
    assert row == ["base", "0.700", "0.700 diverged", "5.000", "3.000", "2.000"]
    assert context_auc.table_row("lr2", [diverged]) == ["lr2", "-", "diverged", "-", "-", "-"]


def test_rank_0_waits_for_few_requests_in_a_commit(tmp_path: Path) -> None:
    cases = _run(many_ranks, tmp_path)["cases"]
    assert [case["stage"] for case in cases] == [1, 3]
    assert all(0 < case["save"]["serial"] < 50 and case["save"]["cpu_s"] > 0 for case in cases)

"""Disk space that a run needs, compared with numbers calculated by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from electra_launcher.preflight.storage_checks import LOG_BYTES, Need, check_disks, classify_disk, needs

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry

REPOSITORY = Path(__file__).resolve().parents[3]
LARGE = 335_136_769 + 19_511_098  # parameters of both towers: see tests/model


def large(*overrides: str) -> Config:
    """Return the config of ELECTRA-Large with overrides."""
    return load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml", overrides)


def corpus(*sizes: int) -> CorpusManifest:
    """Return the manifest of a corpus whose shards have these sizes in bytes."""
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    shards = [ShardEntry(name=f"{i}.tar", rows=1, tokens=1, bytes=b, sha256="0" * 64) for i, b in enumerate(sizes)]
    tokenizer = TokenizerEntry(sha256="0" * 64, vocab_size=5, lowercase=True, special=special)
    return CorpusManifest(seq_len=1, dtype="uint16", tokenizer=tokenizer, shards=tuple(shards))


def test_checkpoints_need_twelve_bytes_per_parameter_for_each_one_kept_and_the_one_being_written():
    _, checkpoints = needs(large(), {})
    assert checkpoints.now_bytes == pytest.approx(12 * LARGE * 4, rel=1e-3)
    assert checkpoints.whole_bytes == checkpoints.now_bytes
    assert checkpoints.folder == Path("runs/large_25pct_mask/checkpoints")
    more = needs(large("checkpoint.keep_best=2", "checkpoint.keep_every_steps=100000"), {})[1]
    assert more.now_bytes == pytest.approx(12 * LARGE * 6, rel=1e-3)
    assert more.whole_bytes == pytest.approx(12 * LARGE * 10, rel=1e-3)  # four more are always kept


def test_a_local_target_needs_space_for_all_checkpoints_and_one_on_s3_none(tmp_path: Path):
    _, local = needs(large(f"checkpoint.targets=[{tmp_path}/a, 's3://b/c']"), {})
    assert local.folder == tmp_path / "a"


def test_a_cache_needs_two_windows_at_first_and_the_corpus_or_its_limit_in_the_end():
    config = large("data.shuffle_window_shards=2")
    corpora = {config.data.corpus: corpus(10, 20, 30, 40, 50), "/local": corpus(1000)}
    cache = needs(config, corpora)[-1]
    assert (cache.what, cache.now_bytes, cache.whole_bytes, cache.files) == ("cached shards", 140, 150, 5)
    limited = needs(large("data.shuffle_window_shards=2", "data.cache_limit_gb=1.0e-7"), corpora)[-1]
    assert (limited.now_bytes, limited.whole_bytes) == (100, 100)
    assert len(needs(config, {"/local": corpus(1000)})) == 2


def need(now: int, whole: int, files: int = 10) -> Need:
    """Return a need of a folder on the disk of /data."""
    return Need(folder=Path("/data"), what="things", now_bytes=now, whole_bytes=whole, files=files, next_step="pay")


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "severity", "what"),
    [
        (12_000_000_000, 20, "ok", "disk of /data: 12.0 GB free, 12.0 GB needed"),
        (11_999_999_999, None, "warning", "enough to go on, but 12.0 GB needed by the end"),
        (4_999_999_999, 20, "user error", "but 5.0 GB needed (2.0 GB for things, 3.0 GB for things)"),
        (12_000_000_000, 19, "user error", "19 inodes free, but 20 needed"),
    ],
)
def test_the_needs_of_one_disk_are_added(free_bytes: int, free_files: int | None, severity: str, what: str):
    both = [need(2_000_000_000, 4_000_000_000), need(3_000_000_000, 8_000_000_000)]
    finding = classify_disk(both, free_bytes, free_files, "n1")
    assert finding.severity == severity
    assert what in finding.what
    assert (finding.next_step == "") == (severity == "ok")


def test_space_of_existing_checkpoints_is_subtracted_from_the_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    block_bytes, num_blocks = 4096, 10**9
    one_disk = os.statvfs_result((block_bytes, block_bytes, *3 * [num_blocks], *3 * [10**9], 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: one_disk)  # the needs of a disk that is full read otherwise
    config = large(f"run_dir={tmp_path}")
    folder = tmp_path / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    (before,) = check_disks(config, {}, "n1")
    with (folder / "rank-00000.safetensors").open("wb") as file:
        file.truncate(12 * 10**9)  # a sparse file, which takes no disk space
    (after,) = check_disks(config, {}, "n1")
    assert before.what.endswith("17.1 GB needed")  # 12 bytes x 354.6 M x 4, and LOG_BYTES
    assert after.what.endswith("5.1 GB needed")
    assert LOG_BYTES == 100_000_000

"""Whether the disks of a node have room for what a run will write.

Guarantees: space is judged against what this config will write (`needs`, pure), less what already lies there, so a
resume is not refused for its own checkpoints; folders on one disk are added up.

Cost: one directory walk of the local checkpoints and the cache. Imports no torch.

Where it stops: quotas that `statvfs` does not show, and what other jobs will write. The parameters' own arithmetic
(12 bytes each) leaves out the few kilobytes of manifests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.model.parameters import parameter_counts
from electra_dist.run.folder import STAGING_DIR, TENSORBOARD_DIR
from launcher.preflight.findings import Finding

BYTES_PER_PARAMETER = 12  # fp32 master weights and both moments
LOG_BYTES, LOG_FILES = 100_000_000, 2_000  # metrics, logs, TensorBoard; the files of checkpoints


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes and files that a run will put below a local folder."""

    folder: Path
    what: str
    now_bytes: int  # without which it cannot go on
    whole_bytes: int  # by its end
    files: int
    next_step: str


def check_disks(config: Config, corpora: Mapping[str, CorpusManifest], node: str) -> list[Finding]:
    """One finding for each disk that a folder of the run lies on."""
    disks: dict[int, list[Need]] = {}
    for need in needs(config, corpora):
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(_remaining(need))
    return [_check_disk(disk_needs, node) for disk_needs in disks.values()]


def needs(config: Config, corpora: Mapping[str, CorpusManifest]) -> list[Need]:
    """What a run will write to local disks, from its beginning. Pure."""
    run_dir = Path(config.run_dir)
    one = BYTES_PER_PARAMETER * parameter_counts(config.model, config.objective).total
    keep = config.checkpoint
    num_kept = keep.keep_last + 1 + keep.keep_best  # + 1: the one that is being written
    num_for_ever = config.train.num_steps // keep.keep_every_steps if keep.keep_every_steps else 0
    num_for_ever += len(keep.keep_steps)
    found = [
        Need(
            folder=run_dir / TENSORBOARD_DIR,
            what="logs and metrics",
            now_bytes=LOG_BYTES,
            whole_bytes=LOG_BYTES,
            files=LOG_FILES,
            next_step="choose a run_dir on a larger disk",
        )
    ]
    for url in config.checkpoint_urls:
        remote = url.startswith("s3://")
        found.append(
            Need(
                folder=run_dir / STAGING_DIR if remote else Path(url.removeprefix("file://")).expanduser(),
                what="a checkpoint on its way" if remote else f"{num_kept} checkpoints",
                now_bytes=one if remote else num_kept * one,
                whole_bytes=one if remote else (num_kept + num_for_ever) * one,
                files=0,
                next_step="keep fewer (checkpoint.keep_last, keep_best, keep_every_steps), or use a larger disk",
            )
        )
    return found + _cache_needs(config, corpora)


def _cache_needs(config: Config, corpora: Mapping[str, CorpusManifest]) -> list[Need]:
    remote = [corpus for url, corpus in corpora.items() if url.startswith("s3://")]
    shards = sorted((shard.bytes for corpus in remote for shard in corpus.shards), reverse=True)
    if not shards:
        return []
    limit = sum(shards) if config.data.cache_limit_gb is None else int(config.data.cache_limit_gb * 1e9)
    two_windows = sum(shards[: 2 * config.data.shuffle_window_shards])  # one trains while the next is fetched
    return [
        Need(
            folder=config.cache_folder,
            what="cached shards",
            now_bytes=min(two_windows, limit),
            whole_bytes=min(sum(shards), limit),
            files=len(shards),
            next_step="set data.cache_dir to a larger disk (with less, every epoch fetches shards again)",
        )
    ]


def classify_disk(disk_needs: Sequence[Need], free_bytes: int, free_files: int | None, node: str) -> Finding:
    """One disk against all that will be put on it. Pure.

    Args:
        disk_needs: what is still to be written there.
        free_files: free inodes; None where the file system does not count them.
    """
    largest = max(disk_needs, key=lambda need: need.whole_bytes)
    folder, files = largest.folder, sum(need.files for need in disk_needs)
    now, whole = sum(need.now_bytes for need in disk_needs), sum(need.whole_bytes for need in disk_needs)
    free = f"disk of {folder}: {_size(free_bytes)} free"
    parts = ", ".join(f"{_size(need.now_bytes)} for {need.what}" for need in disk_needs)
    if now > free_bytes:
        what, step = f"{free}, {_size(now)} needed ({parts})", f"free space, or {largest.next_step}"
        return Finding(severity="user error", node=node, what=what, next_step=step)
    if free_files is not None and files > free_files:
        what, step = f"disk of {folder}: {free_files:,} inodes free, {files:,} needed", "delete files there"
        return Finding(severity="user error", node=node, what=what, next_step=step)
    if whole > free_bytes:
        what = f"{free}, enough to go on, but {_size(whole)} needed by the end of the run"
        return Finding(severity="warning", node=node, what=what, next_step=largest.next_step)
    return Finding(severity="ok", node=node, what=f"{free}, {_size(whole)} needed")


def _remaining(need: Need) -> Need:
    """What is still to be written, given what already lies in the folder."""
    there = _used_bytes(need.folder)
    return dataclasses.replace(
        need, now_bytes=max(0, need.now_bytes - there), whole_bytes=max(0, need.whole_bytes - there)
    )


def _check_disk(disk_needs: Sequence[Need], node: str) -> Finding:
    disk = os.statvfs(_existing(disk_needs[0].folder))
    free_files = disk.f_favail if disk.f_files else None
    return classify_disk(disk_needs, disk.f_bavail * disk.f_frsize, free_files, node)


def _used_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process may be tidying up
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"

"""Check that the disks of a node have room for what a run will write.

Guarantees: free space is compared with what this config will write (`needs`, a pure function) minus the bytes that
already lie in the run's folders, so that a resumed run is not refused because of its own checkpoints. What the folders
on one disk need is added up.

Cost: one directory walk of the local checkpoints and the cache. Imports no torch.

Limits: quotas that `statvfs` does not show, and files that other jobs will write, are not taken into account. The size
of a checkpoint is estimated as 12 bytes per parameter, without a few kilobytes of manifests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.config import Config
from electra_dist.data.cache_folder import SHARDS_DIR
from electra_dist.data.manifest import CorpusManifest
from electra_dist.model.parameter_counts import parameter_counts
from electra_dist.run.folder import TENSORBOARD_DIR
from electra_dist.store.open_store import without_tilde
from launcher.preflight.findings import Finding

BYTES_PER_PARAMETER = 12  # of a checkpoint: fp32 master weights and both Adam moments
LOG_BYTES = 100_000_000  # metrics, logs and TensorBoard of a run
LOG_FILES = 2_000  # files of a run other than shards


@dataclass(frozen=True, kw_only=True)
class Need:
    """Disk space that a run needs below one local folder: soon, and by the end of the run."""

    folder: Path
    what: str  # what is written, for the message
    now_bytes: int  # bytes without which the run fails soon
    whole_bytes: int  # bytes that are needed by the end of the run
    files: int  # number of files, each of which needs an inode
    next_step: str  # what the user can do if the space is short


def check_disks(config: Config, corpora: Mapping[str, CorpusManifest], node: str) -> list[Finding]:
    """Return one finding for each local disk that the run writes to: "ok", "warning" or "user error".

    `corpora` maps the URL of each corpus to its manifest. The shards of a corpus on S3 need space in the local cache.
    """
    needs_by_disk: dict[int, list[Need]] = {}
    for need in needs(config, corpora):
        device_number = _existing(need.folder).stat().st_dev  # Folders on the same disk have the same number.
        needs_by_disk.setdefault(device_number, []).append(_remaining(need))
    return [_check_disk(disk_needs, node) for disk_needs in needs_by_disk.values()]


def needs(config: Config, corpora: Mapping[str, CorpusManifest]) -> list[Need]:
    """Return how much a run will write to each local folder: logs, checkpoints and cached shards. Pure.

    Existing files are not subtracted. Checkpoints that go to S3 need no local space. Shards are cached in
    `config.cache_folder`.
    """
    log_need = Need(
        folder=Path(config.run_dir) / TENSORBOARD_DIR,
        what="logs and metrics",
        now_bytes=LOG_BYTES,
        whole_bytes=LOG_BYTES,
        files=LOG_FILES,
        next_step="choose a run_dir on a larger disk",
    )
    checkpoint_needs = [_checkpoint_need(config, url) for url in config.checkpoint_urls if not url.startswith("s3://")]
    return [log_need, *checkpoint_needs, *_cache_needs(config, corpora)]


def _checkpoint_need(config: Config, url: str) -> Need:
    """Return how much local space the checkpoints that are saved to the folder `url` need."""
    checkpoint_bytes = BYTES_PER_PARAMETER * parameter_counts(config.model, config.objective).total
    keep = config.checkpoint
    # A local target soon holds these checkpoints at once: the newest, the best, one that is old enough for a rollback,
    # and the one being written. Those that are kept for good are added by the end of the run.
    num_being_written = 1
    most_skipped = config.guard.most_skipped
    spacing = most_skipped if keep.every_steps == "auto" else keep.every_steps
    # One more is kept for a rollback, unless the oldest of the last `keep_last` is old enough for it.
    num_for_rollback = int((keep.keep_last - 1) * spacing < most_skipped)
    num_kept = keep.keep_last + keep.keep_best + num_for_rollback + num_being_written
    num_permanent = len(keep.keep_steps)
    if keep.keep_every_steps:
        num_permanent += config.train.num_steps // keep.keep_every_steps
    return Need(
        folder=without_tilde(url.removeprefix("file://")),
        what=f"{num_kept} checkpoints",
        now_bytes=num_kept * checkpoint_bytes,
        whole_bytes=(num_kept + num_permanent) * checkpoint_bytes,
        files=0,
        next_step="keep fewer checkpoints (lower checkpoint.keep_last, keep_best, or raise keep_every_steps), or use "
        "a larger disk",
    )


def _cache_needs(config: Config, corpora: Mapping[str, CorpusManifest]) -> list[Need]:
    """Return a list with the space that the local cache of shards needs; empty if no corpus is on S3."""
    remote_corpora = [corpus for url, corpus in corpora.items() if url.startswith("s3://")]
    shard_bytes = [shard.bytes for corpus in remote_corpora for shard in corpus.shards]
    if not shard_bytes:
        return []
    shard_bytes.sort(reverse=True)  # the largest shards first
    # The run fails soon without room for two shuffle windows: one that is trained on, and one that is fetched
    # meanwhile.
    shards_of_two_windows = 2 * config.data.shuffle_window_shards
    two_windows_bytes = sum(shard_bytes[:shards_of_two_windows])
    all_bytes = sum(shard_bytes)
    limit_bytes = all_bytes  # The cache holds all shards unless the config limits it.
    if config.data.cache_limit_gb is not None:
        limit_bytes = int(config.data.cache_limit_gb * 1e9)
    return [
        Need(
            folder=config.cache_folder / SHARDS_DIR,
            what="cached shards",
            now_bytes=min(two_windows_bytes, limit_bytes),
            whole_bytes=min(all_bytes, limit_bytes),
            files=len(shard_bytes),
            next_step="set data.cache_dir to a folder on a larger disk (otherwise every epoch fetches shards again)",
        )
    ]


def classify_disk(disk_needs: Sequence[Need], free_bytes: int, free_files: int | None, node: str) -> Finding:
    """Compare the free space of one disk with what a run still has to write to folders on this disk. Pure.

    The severity is "user error" if the run would fail soon for lack of bytes or inodes, "warning" if it would fail
    before its end, otherwise "ok". `free_files` are free inodes; None if the file system does not count them.
    """
    now_bytes = sum(need.now_bytes for need in disk_needs)
    whole_bytes = sum(need.whole_bytes for need in disk_needs)
    files = sum(need.files for need in disk_needs)
    # The messages name the folder that needs the most, and the advice is about it.
    largest = max(disk_needs, key=lambda need: need.whole_bytes)
    disk = f"disk of {largest.folder}"
    disk_and_free = f"{disk}: {_size(free_bytes)} free"
    if now_bytes > free_bytes:
        parts = ", ".join(f"{_size(need.now_bytes)} for {need.what}" for need in disk_needs)
        shortage = f"{disk_and_free}, but {_size(now_bytes)} needed ({parts})"
        next_step = f"free space, or {largest.next_step}"
        return Finding(severity="user error", node=node, what=shortage, next_step=next_step)
    if free_files is not None and files > free_files:
        shortage = f"{disk}: {free_files:,} inodes free, but {files:,} needed"
        return Finding(severity="user error", node=node, what=shortage, next_step="delete files on this disk")
    if whole_bytes > free_bytes:
        shortage = f"{disk_and_free}, enough to go on, but {_size(whole_bytes)} needed by the end of the run"
        return Finding(severity="warning", node=node, what=shortage, next_step=largest.next_step)
    return Finding(severity="ok", node=node, what=f"{disk_and_free}, {_size(whole_bytes)} needed")


def _remaining(need: Need) -> Need:
    """Return the need minus the bytes that its folder holds already. The number of files stays as it is."""
    used_bytes = _used_bytes(need.folder)
    return dataclasses.replace(
        need,
        now_bytes=max(0, need.now_bytes - used_bytes),
        whole_bytes=max(0, need.whole_bytes - used_bytes),
    )


def _check_disk(disk_needs: Sequence[Need], node: str) -> Finding:
    disk = os.statvfs(_existing(disk_needs[0].folder))
    # "avail" is what an ordinary user may use; a file system that does not count inodes reports 0 of them in total.
    free_bytes = disk.f_bavail * disk.f_frsize
    free_files = disk.f_favail if disk.f_files else None
    return classify_disk(disk_needs, free_bytes, free_files, node)


def _used_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # Another process may delete files meanwhile.
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _existing(folder: Path) -> Path:
    """Return the folder or, if it is missing, its nearest existing parent, on whose disk it will be created."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _size(num_bytes: int) -> str:
    """Return a size as text, for example "12.0 GB" or "340 MB" (1 GB = 1e9 bytes)."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"

"""Check that a node reaches the storage of a run, that its disks have room, and that its clock agrees with theirs.

Guarantees: storage is tried with the calls that a run makes. The manifest of each corpus is read; at each checkpoint
target an object is created (only if new), read, compared and deleted. Free space is compared with what this config
will write (`needs`, a pure function) minus the bytes that already lie in the run's folders, so that a resumed run is
not refused because of its own checkpoints. What the folders on one disk need is added up.

Cost: a few requests, and one directory walk of the local checkpoints and the cache. Imports no torch. A service that
does not answer counts as down after half a minute; if the run has not begun, after as long as the caller allows.

Limits: access rights are checked for only one object, although rights may differ by the object's name. The clock of an
HTTP service is known to whole seconds. Quotas that `statvfs` does not show, and files that other jobs will write, are
not taken into account. A checkpoint is estimated as 12 bytes per parameter, without a few kilobytes of manifests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from electra_dist.checkpoint.commit import check_exclusive
from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.data.node_cache import SHARDS_DIR
from electra_dist.errors import UserError
from electra_dist.model.counts import parameter_counts
from electra_dist.run.folder import TENSORBOARD_DIR, is_run_folder
from electra_dist.store.atomic_files import nearest_folder, readable
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store
from electra_dist.store.open_store import REMOTE_SCHEMES, open_store, without_tilde
from electra_dist.store.patience import Pace, Patience
from electra_launcher.preflight.findings import Finding, Severity, from_error

SKEW_WARNING_S = 2.0
SKEW_UNHEALTHY_S = 60.0
_AWS = "https://s3.amazonaws.com"
_DOWN_AFTER_S = 30.0  # without an answer, for a run that has begun, which waits for its storage itself
BYTES_PER_PARAMETER = 12  # of a checkpoint: fp32 master weights and both Adam moments
LOG_BYTES = 100_000_000  # metrics, logs and TensorBoard of a run
LOG_FILES = 2_000  # files of a run other than shards


def check_storage(config: Config, node: str, patience: Patience | None = None) -> list[Finding]:
    """Check that this node reaches the corpora and checkpoint targets of a run, and check its disks and its clock.

    Storage that cannot be used gives a "user error". If storage is full or does not respond, the checks of a run that
    has begun wait half a minute and give only a "warning", because the run itself waits. Those of a new run wait as
    long as `patience` says; None: half a minute, too.
    """
    has_begun = is_run_folder(Path(config.run_dir))
    patience = _patience_of_checks(patience, has_begun)
    findings: list[Finding] = []
    corpora: dict[str, CorpusManifest] = {}  # URL -> manifest, of the corpora that can be read
    urls = [corpus.url for corpus in config.data.training_corpora()]
    if config.data.heldout:
        urls.append(config.data.heldout)
    for url in urls:
        with _recorded(findings, f"corpus {url}: corpus.json read", node, has_begun):
            corpora[url] = read_manifest(open_store(url, config.data.endpoint_url, patience))
    for url in config.checkpoint_urls:
        with _recorded(findings, f"checkpoint target {url}: written, read, deleted", node, has_begun):
            _try_target(open_store(url, config.checkpoint.endpoint_url, patience))
    for finding in check_disks(config, corpora, node):
        findings.append(_as_warning(finding) if has_begun and finding.severity == "user error" else finding)
    findings += _check_clocks(config, node, patience)
    return findings


def _patience_of_checks(given: Patience | None, has_begun: bool) -> Patience:
    """Return how long the checks wait for storage: as `given` says, but half a minute at most if the run has begun."""
    if given is not None and not has_begun:
        return given
    limit_s = _DOWN_AFTER_S if given is None else min(_DOWN_AFTER_S, given.limit_s)
    return Patience(limit_s, pace=Pace(connect_timeout_s=5.0, read_timeout_s=10.0), key="")


@contextlib.contextmanager
def _recorded(findings: list[Finding], what: str, node: str, has_begun: bool) -> Iterator[None]:
    """Append the "ok" finding `what` after the `with` block or, if a UserError ends the block, a finding for that."""
    try:
        yield
    except UserError as error:
        findings.append(_from_storage_error(error, node, has_begun))
    else:
        findings.append(Finding(severity="ok", node=node, what=what))


def _from_storage_error(error: UserError, node: str, has_begun: bool) -> Finding:
    """Convert a storage error to a finding: a warning if the run has begun and will wait itself, else a user error."""
    finding = from_error(error, node)
    return _as_warning(finding) if has_begun and is_worth_waiting_for(error) else finding


def _as_warning(finding: Finding) -> Finding:
    """Turn a finding about unusable storage into a warning, because a run that has begun waits for its storage."""
    next_step = f"{finding.next_step} (the run waits for it, up to cluster.storage_patience_s)"
    return dataclasses.replace(finding, severity="warning", next_step=next_step)


def classify_skew(skew_s: float, against: str, node: str) -> Finding:
    """Judge the difference of two clocks: this node's clock is `skew_s` seconds ahead of the clock of `against`.

    A difference in either direction is "ok" below 2 s, a "warning" below 60 s, otherwise "unhealthy".
    """
    size_s = abs(skew_s)
    if size_s < SKEW_WARNING_S:
        return Finding(severity="ok", node=node, what=f"clock agrees with {against}")
    severity: Severity = "unhealthy" if size_s >= SKEW_UNHEALTHY_S else "warning"
    direction = "ahead of" if skew_s > 0 else "behind"
    return Finding(
        severity=severity,
        node=node,
        what=f"clock is {size_s:.0f} s {direction} {against}",
        next_step="start the time service of this node (chronyd, ntpd)",
    )


def _try_target(store: Store) -> None:
    """Test that checkpoints can be saved to a store: create, read, compare and delete one object there."""
    token = secrets.token_hex(8)  # makes the key unique among nodes that run preflight at once
    key = f"preflight-{token}"
    content = token.encode()
    store.write_new(key, content)
    try:
        check_exclusive(store, key, content)
        if store.read(key) != content:
            raise UserError(f"{store.url}: {key} reads back other bytes than were written; check the storage service")
    finally:
        store.delete(key)


def _check_clocks(config: Config, node: str, patience: Patience) -> Iterator[Finding]:
    """Compare this node's clock with the clock of the run folder's file system and of each S3 service of the run."""
    run_dir = Path(config.run_dir)
    try:
        skew_of_folder_s = _file_skew_s(run_dir, patience)
        yield classify_skew(skew_of_folder_s, f"the file system of {config.run_dir}", node)
    except UserError as error:
        yield _from_storage_error(error, node, is_run_folder(run_dir))
    service_urls = set()
    if any(corpus.url.startswith("s3://") for corpus in config.data.training_corpora()):
        service_urls.add(config.data.endpoint_url or _AWS)
    if any(url.startswith("s3://") for url in config.checkpoint_urls):
        service_urls.add(config.checkpoint.endpoint_url or _AWS)
    for service_url in sorted(service_urls):
        # A service that does not answer is reported by the check of its objects.
        skew_s = _http_skew_s(service_url)
        if skew_s is not None:
            yield classify_skew(skew_s, service_url, node)


def _file_skew_s(run_dir: Path, patience: Patience) -> float:
    """Return by how many seconds this node's clock is ahead of the clock of the run folder's file system."""
    store = open_store(str(run_dir), patience=patience)
    key = f"preflight-{secrets.token_hex(8)}"
    before = time.time()
    # On a shared file system the modification time of the file comes from the file server.
    store.write(key, b"")
    time_of_write = (before + time.time()) / 2  # by this node's clock, halfway through the write
    path = run_dir / key
    try:
        with readable(path):
            return time_of_write - path.stat().st_mtime
    finally:
        store.delete(key)


def _http_skew_s(url: str) -> float | None:
    """Return by how many seconds this node's clock is ahead of an HTTP service's clock; None if no time came back."""
    request = urllib.request.Request(url, method="HEAD")
    before = time.time()
    try:
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # A refusal for lack of credentials has the header, too.
        date = error.headers["Date"]
    except OSError:  # Unreachable, which the check of the objects reports.
        return None
    if not date:
        return None
    time_of_answer = (before + time.time()) / 2  # by this node's clock, halfway through the request
    # The header has whole seconds, rounded down: half a second is the mean error.
    return time_of_answer - parsedate_to_datetime(date).timestamp() - 0.5


# Room on the disks
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
        device_number = nearest_folder(need.folder).stat().st_dev  # Folders on the same disk have the same number.
        needs_by_disk.setdefault(device_number, []).append(_remaining(need))
    return [_check_disk(disk_needs, node) for disk_needs in needs_by_disk.values()]


def needs(config: Config, corpora: Mapping[str, CorpusManifest]) -> list[Need]:
    """Return how much a run will write to each local folder: logs, checkpoints and cached shards.

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
    checkpoint_needs = [
        _checkpoint_need(config, url) for url in config.checkpoint_urls if not url.startswith(REMOTE_SCHEMES)
    ]
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
    remote_corpora = [corpus for url, corpus in corpora.items() if url.startswith(REMOTE_SCHEMES)]
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
    """Compare the free space of one disk with what a run still has to write to folders on this disk.

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
    """Return a need less the bytes that its folder holds already; its number of files stays the same."""
    used_bytes = _used_bytes(need.folder)
    return dataclasses.replace(
        need,
        now_bytes=max(0, need.now_bytes - used_bytes),
        whole_bytes=max(0, need.whole_bytes - used_bytes),
    )


def _check_disk(disk_needs: Sequence[Need], node: str) -> Finding:
    disk = os.statvfs(nearest_folder(disk_needs[0].folder))
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


def _size(num_bytes: int) -> str:
    """Return a size as text, for example "12.0 GB" or "340 MB" (1 GB = 1e9 bytes)."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"

"""Check that a node reaches the storage that a run needs, and that its clock agrees with the storage's clock.

Guarantees: storage is tried with the calls that a run makes. The manifest of each corpus is read; at each checkpoint
target an object is created (only if new), read, compared and deleted.

Cost: a few requests. Imports no torch. A service that does not answer counts as down after half a minute; if the run
has not begun, after as long as the caller allows.

Limits: access rights are checked for only one object, although rights may differ by the object's name. The clock of an
HTTP service is known to whole seconds.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from electra_dist.checkpoint.commit import check_exclusive
from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.errors import UserError
from electra_dist.run.folder import is_run_folder
from electra_dist.store.atomic_files import readable
from electra_dist.store.failure_kinds import is_worth_waiting_for
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience
from launcher.preflight.disk_space_checks import check_disks
from launcher.preflight.findings import Finding, Severity, from_error

SKEW_WARNING_S = 2.0
SKEW_UNHEALTHY_S = 60.0
_AWS = "https://s3.amazonaws.com"
_DOWN_AFTER_S = 30.0  # without an answer, for a run that has begun, which waits for its storage itself


def check_storage(config: Config, node: str, patience: Patience | None = None) -> list[Finding]:
    """Check that this node reaches the corpora and checkpoint targets of a run, and check its disks and its clock.

    Storage that cannot be used gives a "user error". For a run that has begun, storage that is full or away gives only
    a "warning", because the run itself waits for it, and the checks wait at most half a minute. For a new run, they
    wait until the storage is back or `patience` is over; None: half a minute, too.
    """
    has_begun = is_run_folder(Path(config.run_dir))
    if has_begun or patience is None:
        limit_s = _DOWN_AFTER_S if patience is None else min(_DOWN_AFTER_S, patience.limit_s)
        patience = Patience(limit_s, pace=Pace(connect_timeout_s=5.0, read_timeout_s=10.0), key="")
    findings: list[Finding] = []
    corpora: dict[str, CorpusManifest] = {}  # URL -> manifest, of the corpora that can be read
    training_urls = [corpus.url for corpus in config.data.training_corpora()]
    for url in (*training_urls, config.data.heldout):
        if not url:  # A run may have no held-out corpus.
            continue
        try:
            corpora[url] = read_manifest(open_store(url, config.data.endpoint_url, patience))
            findings.append(Finding(severity="ok", node=node, what=f"corpus {url}: corpus.json read"))
        except UserError as error:
            findings.append(_from_storage_error(error, node, has_begun))
    for url in config.checkpoint_urls:
        try:
            _try_target(open_store(url, config.checkpoint.endpoint_url, patience))
            findings.append(Finding(severity="ok", node=node, what=f"checkpoint target {url}: written, read, deleted"))
        except UserError as error:
            findings.append(_from_storage_error(error, node, has_begun))
    for finding in check_disks(config, corpora, node):
        findings.append(_as_warning(finding) if has_begun and finding.severity == "user error" else finding)
    findings += _check_clocks(config, node, patience)
    return findings


def _from_storage_error(error: UserError, node: str, has_begun: bool) -> Finding:
    """Convert a storage error to a finding: a warning if a run that has begun would wait, otherwise a user error."""
    finding = from_error(error, node)
    return _as_warning(finding) if has_begun and is_worth_waiting_for(error) else finding


def _as_warning(finding: Finding) -> Finding:
    """Turn a finding about storage that is full or away into a warning, because a run that has begun waits for it."""
    next_step = f"{finding.next_step} (the run waits for it, up to cluster.storage_patience_s)"
    return dataclasses.replace(finding, severity="warning", next_step=next_step)


def classify_skew(skew_s: float, against: str, node: str) -> Finding:
    """Judge the difference of two clocks: this node's clock is `skew_s` seconds ahead of the clock of `against`. Pure.

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

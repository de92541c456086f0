"""Check that a node reaches the storage that a run needs, and that its clock agrees with the storage's clock.

Guarantees: storage is tried with the calls that a run makes. The manifest of each corpus is read; in each checkpoint
target an object is created (only if new), read, compared and deleted.

Cost: a few requests. Imports no torch. A service that does not answer counts as down after half a minute.

Limits: access rights are checked for one key only. The clock of an HTTP service is known to whole seconds.
"""

from __future__ import annotations

import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from electra_dist.config import Config
from electra_dist.data.corpus_manifest import CorpusManifest, read_manifest
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import readable
from electra_dist.store.open_store import open_store
from electra_dist.store.retry import RetryPolicy
from launcher.preflight.disk_space_checks import check_disks
from launcher.preflight.findings import Finding, Severity, from_error

SKEW_WARNING_S = 2.0
SKEW_UNHEALTHY_S = 60.0
_AWS = "https://s3.amazonaws.com"
_PATIENCE = RetryPolicy(tries=6, deadline_s=30.0, connect_timeout_s=5.0, read_timeout_s=10.0)


def check_storage(config: Config, node: str) -> list[Finding]:
    """Check the corpora, checkpoint targets, disks and clock as seen from this node, and return the findings.

    A storage fault is returned as a finding with severity "user error" and raises nothing.
    """
    findings: list[Finding] = []
    corpora: dict[str, CorpusManifest] = {}
    for url in filter(None, (config.data.corpus, config.data.heldout)):
        try:
            corpora[url] = read_manifest(open_store(url, config.data.endpoint_url, retry=_PATIENCE))
            findings.append(Finding(severity="ok", node=node, what=f"corpus {url}: corpus.json read"))
        except UserError as error:
            findings.append(from_error(error, node))
    for url in config.checkpoint_urls:
        try:
            _try_target(url, config.checkpoint.endpoint_url)
            findings.append(Finding(severity="ok", node=node, what=f"checkpoint target {url}: written, read, deleted"))
        except UserError as error:
            findings.append(from_error(error, node))
    return [*findings, *check_disks(config, corpora, node), *_check_clocks(config, node)]


def classify_skew(skew_s: float, against: str, node: str) -> Finding:
    """Classify the difference between this node's clock and another one. Pure.

    Args:
        skew_s: seconds by which this node's clock is ahead; negative if it is behind.
        against: name of the other clock, for the message.
        node: name of this node.

    Returns:
        "ok" below 2 s, "warning" below 60 s, otherwise "unhealthy".
    """
    if abs(skew_s) < SKEW_WARNING_S:
        return Finding(severity="ok", node=node, what=f"clock agrees with {against}")
    what = f"clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {against}"
    severity: Severity = "unhealthy" if abs(skew_s) >= SKEW_UNHEALTHY_S else "warning"
    return Finding(
        severity=severity, node=node, what=what, next_step="start the time service of this node (chronyd, ntpd)"
    )


def _try_target(url: str, endpoint_url: str | None) -> None:
    """Create, read, compare and delete one object in a checkpoint target.

    Raises:
        UserError: one of these fails, or other bytes are read than were written.
    """
    store = open_store(url, endpoint_url, retry=_PATIENCE)
    token = secrets.token_hex(8)
    key = f"preflight-{token}"
    store.write_new(key, token.encode())
    try:
        if store.read(key, must_exist=True) != token.encode():
            raise UserError(f"{store.url}: {key} reads back other bytes than were written; check the storage service")
    finally:
        store.delete(key)


def _check_clocks(config: Config, node: str) -> Iterator[Finding]:
    """Compare this node's clock with the file system of the run folder and with every S3 service of the run.

    A service that does not answer yields no finding: the check of its objects reports that.
    """
    try:
        yield classify_skew(_file_skew_s(Path(config.run_dir)), f"the file system of {config.run_dir}", node)
    except UserError as error:
        yield from_error(error, node)
    locations = [(config.data.corpus, config.data.endpoint_url)]
    locations += [(url, config.checkpoint.endpoint_url) for url in config.checkpoint_urls]
    services = {endpoint_url or _AWS for url, endpoint_url in locations if url.startswith("s3://")}
    for service_url in sorted(services):
        skew_s = _http_skew_s(service_url)
        if skew_s is not None:
            yield classify_skew(skew_s, service_url, node)


def _file_skew_s(run_dir: Path) -> float:
    """Return this node's time minus the modification time of a file written now, in seconds.

    On a shared file system the modification time comes from the file server. The file is deleted again.

    Raises:
        UserError: the run folder cannot be written or read.
    """
    store = open_store(str(run_dir))
    key = f"preflight-{secrets.token_hex(8)}"
    before = time.time()
    store.write(key, b"")
    between = (before + time.time()) / 2
    path = run_dir / key
    try:
        with readable(path):
            return between - path.stat().st_mtime
    finally:
        store.delete(key)


def _http_skew_s(url: str) -> float | None:
    """Return this node's time minus the service's Date header in seconds; None without an answer or a header.

    The header has whole seconds, rounded down, so half a second, the mean error, is added to it.
    """
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
    between = (before + time.time()) / 2
    return between - parsedate_to_datetime(date).timestamp() - 0.5

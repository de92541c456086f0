"""Whether a node reaches the storage that a run needs, and whether its clock agrees with it.

Guarantees: storage is tried with the calls that a run makes: each corpus's manifest is read; in each checkpoint target
an object is created only-if-new, read, compared and deleted.

Cost: a few requests. Imports no torch. A service that is down is believed down after half a minute.

Where it stops: rights on other keys than the tried one; a clock is compared with whole seconds of a service's answers.
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
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.errors import UserError
from electra_dist.store.files import readable
from electra_dist.store.open import open_store
from electra_dist.store.retry import RetryPolicy
from launcher.preflight.disk_checks import check_disks
from launcher.preflight.findings import Finding, Severity, from_error

SKEW_WARNING_S, SKEW_UNHEALTHY_S = 2.0, 60.0
_AWS = "https://s3.amazonaws.com"
_PATIENCE = RetryPolicy(tries=6, deadline_s=30.0, connect_timeout_s=5.0, read_timeout_s=10.0)


def check_storage(config: Config, node: str) -> list[Finding]:
    """Corpora, checkpoint targets, disks and clock of this node."""
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
    """This node's clock against another one; positive when it is ahead. Pure."""
    if abs(skew_s) < SKEW_WARNING_S:
        return Finding(severity="ok", node=node, what=f"clock agrees with {against}")
    what = f"clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} {against}"
    severity: Severity = "unhealthy" if abs(skew_s) >= SKEW_UNHEALTHY_S else "warning"
    return Finding(severity=severity, node=node, what=what, next_step="start its time service (chronyd, ntpd)")


def _try_target(url: str, endpoint_url: str | None) -> None:
    store = open_store(url, endpoint_url, retry=_PATIENCE)
    token = secrets.token_hex(8)
    key = f"preflight-{token}"
    store.write_new(key, token.encode())
    try:
        if store.read(key, must_exist=True) != token.encode():
            raise UserError(f"{store.url}: reads back other bytes than were written; check the storage service")
    finally:
        store.delete(key)


def _check_clocks(config: Config, node: str) -> Iterator[Finding]:
    try:
        yield classify_skew(_file_skew_s(Path(config.run_dir)), f"the file system of {config.run_dir}", node)
    except UserError as error:
        yield from_error(error, node)
    places = [(config.data.corpus, config.data.endpoint_url)]
    places += [(url, config.checkpoint.endpoint_url) for url in config.checkpoint_urls]
    for endpoint_url in sorted({endpoint or _AWS for url, endpoint in places if url.startswith("s3://")}):
        if (skew_s := _http_skew_s(endpoint_url)) is not None:
            yield classify_skew(skew_s, endpoint_url, node)


def _file_skew_s(run_dir: Path) -> float:
    """Our time less the time that the file system (on a shared one: its server) gives a file written now."""
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
    """Our time less that of the service's Date header (whole seconds); None when it cannot be had."""
    request = urllib.request.Request(url, method="HEAD")
    before = time.time()
    try:
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # refused without credentials, but dated
        date = error.headers["Date"]
    except OSError:  # not reachable: the store's own check says so
        return None
    return (before + time.time()) / 2 - parsedate_to_datetime(date).timestamp() - 0.5 if date else None

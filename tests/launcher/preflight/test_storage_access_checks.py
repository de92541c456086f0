"""The node's clock is compared with that of the storage: a small difference is a warning, a minute is unhealthy."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

import pytest
from electra_launcher.preflight import storage_checks
from electra_launcher.preflight.findings import Finding
from electra_launcher.preflight.storage_checks import check_storage, classify_skew
from support.real_runs import REPOSITORY

from electra_dist.config.load import load_config
from electra_dist.errors import StoreAway
from electra_dist.store.atomic_files import replacing
from electra_dist.store.patience import Patience

FULL = Finding(severity="user error", node="n1", what="disk of /data: full", next_step="free space")


@pytest.mark.parametrize(
    ("skew_s", "severity", "what"),
    [
        (1.9, "ok", "clock agrees with X"),
        (-2.4, "warning", "clock is 2 s behind X"),
        (59.0, "warning", "clock is 59 s ahead of X"),
        (-61.0, "unhealthy", "clock is 61 s behind X"),
        (-3600.0, "unhealthy", "clock is 3600 s behind X"),
    ],
)
def test_a_clock_two_seconds_off_is_a_warning_and_a_minute_is_unhealthy(skew_s: float, severity: str, what: str):
    finding = classify_skew(skew_s, "X", "n1")
    assert (finding.severity, finding.what) == (severity, what)


def test_storage_that_is_away_is_a_warning_once_the_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A chain of jobs would end at a user error, although the run waits for its storage."""

    def away(path: Path, *, only_new: bool = False) -> contextlib.AbstractContextManager[IO[bytes]]:
        if only_new:
            raise StoreAway(f"{path.parent}: read-only file system; mount it for writing")
        return replacing(path)

    overrides = [f"run_dir={tmp_path / 'run'}", f"data.corpus={tmp_path / 'none'}"]
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml", overrides)
    monkeypatch.setattr("electra_dist.store.open_store.replacing", away)
    patience = Patience(0.2, note=lambda line: None)
    monkeypatch.setattr(storage_checks, "check_disks", lambda config, corpora, node: [FULL])
    severities = {finding.what: finding.severity for finding in check_storage(config, "n1", patience)}
    target = f"{tmp_path / 'run' / 'checkpoints'}: read-only file system"
    assert (severities[target], severities["disk of /data: full"]) == ("user error", "user error")
    (tmp_path / "run" / "config.yaml").touch()
    findings = {finding.what: finding for finding in check_storage(config, "n1", patience)}
    assert (findings[target].severity, findings["disk of /data: full"].severity) == ("warning", "warning")
    assert "the run waits for it" in findings[target].next_step
    missing_corpus = next(finding for what, finding in findings.items() if "corpus.json" in what)
    assert missing_corpus.severity == "user error"  # no wait brings it back


def test_a_new_run_waits_for_storage_that_is_away_and_is_refused_when_its_patience_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise S3 that refuses connections for a minute would make the first job of a chain cancel all others."""
    num_failures = 2

    def away_twice(path: Path, *, only_new: bool = False) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Raise StoreAway as often as `num_failures` is set to, and create the object after that."""
        nonlocal num_failures
        num_failures -= only_new
        if only_new and num_failures >= 0:
            raise StoreAway(f"{path.parent}: the service cannot be reached; check the endpoint URL")
        return replacing(path, only_new=only_new)

    overrides = [f"run_dir={tmp_path / 'run'}", f"data.corpus={tmp_path / 'none'}"]
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml", overrides)
    monkeypatch.setattr("electra_dist.store.open_store.replacing", away_twice)
    monkeypatch.setattr(storage_checks, "check_disks", lambda config, corpora, node: [])
    lines: list[str] = []
    findings = check_storage(config, "n1", Patience(60.0, note=lines.append))
    target = next(finding for finding in findings if "checkpoint target" in finding.what)
    assert target.severity == "ok"
    assert "waiting up to 60 s for storage" in lines[0]
    assert "cannot be reached" in lines[0]
    missing_corpus = next(finding for finding in findings if "corpus.json" in finding.what)
    assert missing_corpus.severity == "user error"  # at once: no wait brings it back

    num_failures = 1000
    findings = check_storage(config, "n1", Patience(0.7, note=lines.append))
    target = next(finding for finding in findings if "cannot be reached" in finding.what)
    assert target.severity == "user error"

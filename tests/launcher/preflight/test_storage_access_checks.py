"""The node's clock is compared with that of the storage: a small difference is a warning, a minute is unhealthy."""

from __future__ import annotations

import pytest

from launcher.preflight.storage_access_checks import classify_skew


@pytest.mark.parametrize(
    ("skew_s", "severity", "what"),
    [
        (1.9, "ok", "clock agrees with X"),
        (-2.4, "warning", "clock is 2 s behind X"),
        (59.0, "warning", "clock is 59 s ahead of X"),
        (-3600.0, "unhealthy", "clock is 3600 s behind X"),
    ],
)
def test_a_clock_two_seconds_off_is_a_warning_and_a_minute_is_unhealthy(skew_s: float, severity: str, what: str):
    finding = classify_skew(skew_s, "X", "n1")
    assert (finding.severity, finding.what) == (severity, what)

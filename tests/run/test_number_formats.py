"""Durations and counts as people read them."""

from __future__ import annotations

import pytest

from electra_dist.run.number_formats import format_count, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (11_100, "3h05m"),
        (86_399, "1d00h"),
        (187_200, "2d04h"),
    ]
    + [(8_640_000, "100d"), (None, "-"), (float("inf"), "-"), (-3, "0s")],
)
def test_durations(seconds: float | None, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (812.4, "812"),
        (999.9, "1.00k"),
        (9351, "9.35k"),
        (9996, "10.0k"),
        (99_960, "100k"),
        (999_600, "1.00M"),
    ]
    + [(1.2345e6, "1.23M"), (33e9, "33.0B"), (419_430_400_000, "419B"), (1.835e12, "1.83T"), (float("nan"), "-")],
)
def test_counts(number: float, text: str):
    assert format_count(number) == text

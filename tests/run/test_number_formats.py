"""Durations and counts in the short form in which logs and reports show them."""

from __future__ import annotations

import pytest

from electra_dist.run.number_formats import format_count, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),  # rounded up to the next unit
        (3599.7, "1h00m"),
        (11_100, "3h05m"),
        (86_399, "1d00h"),
        (187_200, "2d04h"),
        (8_640_000, "100d"),
        (None, "-"),  # not known
        (float("inf"), "-"),
        (-3, "0s"),
    ],
)
def test_a_duration_is_written_with_at_most_two_units(seconds: float | None, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (812.4, "812"),
        (999.9, "1.00k"),  # rounded up to the next unit
        (9351, "9.35k"),
        (9996, "10.0k"),
        (99_960, "100k"),
        (999_600, "1.00M"),
        (1.2345e6, "1.23M"),
        (33e9, "33.0B"),
        (419_430_400_000, "419B"),
        (1.835e12, "1.83T"),
        (float("nan"), "-"),
    ],
)
def test_a_count_is_written_with_at_most_three_digits_and_the_letter_of_its_power_of_1000(number: float, text: str):
    assert format_count(number) == text

"""Format durations and counts as short text, for consoles, logs and reports."""

from __future__ import annotations

import math


def format_duration(seconds: float | None) -> str:
    """Return a duration in at most six characters: 12s, 4m07s, 3h05m, 2d04h, 120d; "-" for None, NaN and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    # The duration is rounded to the smaller of the two units that are shown, before a unit is chosen: thus 59.7 s is
    # shown as 1m00s and never as 60s.
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    minutes = round(total / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(total / 3600)
    if hours < 100 * 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours // 24}d"


def format_count(number: float) -> str:
    """Return a count in at most six characters: 812, 9.35k, 1.24M, 33.0B (1e9), 1.84T; "-" for NaN and infinity."""
    if not math.isfinite(number):
        return "-"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # A number just below a unit, such as 999,700, is shown in that unit, as 1.00M, because it is rounded up to it.
        if abs(number) >= 0.9995 * size:
            return f"{_three_figures(number / size)}{unit}"
    return f"{number:.0f}"


def _three_figures(number: float) -> str:
    """Return a number with three significant figures as text, for example "1.24", "12.4" or "124"."""
    # The number of decimals changes at 9.995 and 99.95 and not at 10 and 100, because rounding adds a digit from there
    # on: 9.995 would become 10.00. From 999.5 on, the text has more than three figures.
    if abs(number) < 9.995:
        return f"{number:.2f}"
    if abs(number) < 99.95:
        return f"{number:.1f}"
    return f"{number:.0f}"

"""Durations and counts as people read them."""

from __future__ import annotations

import math


def format_duration(seconds: float | None) -> str:
    """At most six characters: 12s, 4m07s, 3h05m, 2d04h, 120d; a dash where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    minutes = round(total / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(total / 3600)
    return f"{hours // 24}d{hours % 24:02d}h" if hours < 100 * 24 else f"{hours // 24}d"


def format_count(number: float) -> str:
    """Three significant figures and a unit, at most six characters: 812, 9.35k, 1.24M, 33.0B, 419B, 1.84T."""
    if not math.isfinite(number):
        return "-"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            scaled = number / size
            decimals = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{decimals}f}{unit}"
    return f"{number:.0f}"

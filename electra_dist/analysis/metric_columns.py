"""Hold the numbers of many metrics records as columns of float64: 8 bytes a number, where a parsed record takes 6 KB.

Guarantee: a column has the numbers of the records bit for bit, in their order. What is missing, null or no number is
NaN there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class MetricColumns:
    """Columns of numbers for "step" and each given field, to which records are appended one by one."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(dict.fromkeys(["step", *fields]))
        self._numbers = array("d")  # record by record

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one record; a missing field becomes NaN."""
        self._numbers.extend([_number(record.get(field)) for field in self._fields])

    def __len__(self) -> int:
        return len(self._numbers) // len(self._fields)

    def column(self, field: str) -> np.ndarray:
        """Return a copy of a field's numbers, float64 [n]; all are NaN for an unknown field."""
        if field not in self._fields:
            return np.full(len(self), math.nan)
        rows = np.frombuffer(self._numbers, dtype=np.float64).reshape(len(self), len(self._fields))
        return rows[:, self._fields.index(field)].copy()

    def points(self, field: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and the values of the records in which a field is finite, float64 [k] each."""
        values = self.column(field)
        is_finite = np.isfinite(values)
        return self.column("step")[is_finite], values[is_finite]


def _number(value: object) -> float:
    # NaN stands for anything else, and for an integer that no float can hold.
    if type(value) is float:
        return value
    if not isinstance(value, int):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan

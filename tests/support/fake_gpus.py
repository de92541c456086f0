"""GPU probes on the fake driver of support/fake_nvml. Each fake GPU is a dict of differences from a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.nvml import GpuProbe

UNSUPPORTED = {key: "unsupported" for key in fake.HEALTHY if not key.endswith("_error")}  # a GPU that answers no query


def fake_probes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """Install the fake driver and return a function that opens a probe of the GPUs passed to it."""
    monkeypatch.setattr(nvml, "pynvml", fake)

    def probe(*devices: dict[str, Any]) -> GpuProbe:
        fake.configure(list(devices))
        opened = GpuProbe.open()
        assert opened is not None
        return opened

    return probe

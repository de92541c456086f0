"""GPU probes on the fake driver of support/fake_nvml, each fake GPU a dict of differences from a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fake_nvml import pynvml as fake

from electra_dist import nvml
from electra_dist.nvml import GpuProbe

UNSUPPORTED = {key: "unsupported" for key in fake.HEALTHY if not key.endswith("_error")}  # a GPU that tells nothing


def fake_probes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuProbe]:
    """Put the fake driver in place; the returned function opens a probe of the GPUs that it is given."""
    monkeypatch.setattr(nvml, "pynvml", fake)

    def probe(*devices: dict[str, Any]) -> GpuProbe:
        fake.configure(list(devices))
        opened = GpuProbe.open()
        assert opened is not None
        return opened

    return probe

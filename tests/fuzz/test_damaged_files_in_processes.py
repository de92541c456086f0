"""24 damaged files, each read by a process of its own: what a user sees of `electra-dist` is judged as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.campaign import Campaign, of_commands
from fuzz.judge import run_as_process
from fuzz.readers import TARGETS, Reader

NUM_CASES = 24
pytestmark = pytest.mark.multiproc


def is_quick(reader: Reader) -> bool:
    """Return whether a command imports neither torch nor transformers; the others are run by `make fuzz`."""
    return reader.name.split()[0] in ("status", "resolve", "plan", "submit", "report")


def test_a_damaged_file_ends_no_command_with_a_traceback(specimen: Path) -> None:
    campaign = Campaign(specimen, run_as_process)
    targets = of_commands(TARGETS, is_quick)
    for target in targets:
        campaign.fuzz(target, NUM_CASES // len(targets) + 1, first_seed=0)
    assert campaign.results.num_cases >= NUM_CASES
    assert not campaign.results.faults, "\n".join(str(fault) for fault in campaign.results.faults[:3])

"""600 damaged files, read in this process: every reader ends with an exit code of the table and at most one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.campaign import Campaign
from fuzz.judge import run_here
from fuzz.readers import TARGETS, Target

NUM_CASES = 600
pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def campaign(specimen: Path) -> Iterator[Campaign]:
    """The cases of this file; at its end, every reader must end on the good files as before."""
    cases = Campaign(specimen, run_here)
    yield cases
    cases.check_good()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.file)
def test_a_damaged_file_ends_no_reader_with_a_traceback(target: Target, campaign: Campaign) -> None:
    num_before = campaign.results.num_cases
    campaign.fuzz(target, NUM_CASES // len(TARGETS) + 1, first_seed=0)
    assert campaign.results.num_cases - num_before > 10
    faults = [fault for fault in campaign.results.faults if fault.file == target.file]
    assert not faults, "\n".join(str(fault) for fault in faults[:3])

"""Strikes (records of faults of nodes): several nodes may append them at once, and they expire after a day."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from electra_dist.errors import StoreError, UserError
from electra_dist.run.failures import Strike, add_strike, excluded_nodes, read_strikes
from electra_dist.run.folder import STRIKES_FILE

DAY_S = 24 * 3600.0


def strike(node: str, time: float, reason: str = "ECC") -> Strike:
    """Return a strike against a node at a time in Unix seconds."""
    return Strike(time=time, node=node, device="GPU 3", reason=reason, by="preflight")


def test_added_strikes_are_read_back_in_order_and_a_missing_file_has_none(tmp_path: Path):
    run_dir = tmp_path / "run"
    assert read_strikes(run_dir) == []
    first_strike = strike("n1", 1.25)
    second_strike = strike("n2", 2.5, 'said "no"')

    add_strike(run_dir, first_strike)
    add_strike(run_dir, second_strike)

    assert read_strikes(run_dir) == [first_strike, second_strike]
    first_line = (run_dir / STRIKES_FILE).read_text().splitlines()[0]
    assert json.loads(first_line)["node"] == "n1"


@pytest.mark.real_start
def test_no_strike_is_lost_or_torn_if_eight_processes_add_them_at_once(tmp_path: Path):
    """Each process adds 25 strikes of its own node, whose times are 0 to 24. None of them needs to import torch."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from electra_dist.run.failures import Strike, add_strike\n"
        "for number in range(25):\n"
        "    strike = Strike(time=float(number), node=sys.argv[2], device='', reason='x' * 280, by='test')\n"
        "    add_strike(Path(sys.argv[1]), strike)\n"
        "assert 'torch' not in sys.modules\n"
    )
    nodes = [f"n{number}" for number in range(8)]

    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), node]) for node in nodes]
    exit_codes = [writer.wait(60) for writer in writers]

    assert exit_codes == [0] * 8
    strikes = read_strikes(tmp_path)
    for node in nodes:
        times = sorted(strike.time for strike in strikes if strike.node == node)
        assert times == [float(number) for number in range(25)]
    assert len(strikes) == 8 * 25


def test_a_torn_line_of_a_killed_writer_is_dropped_and_the_next_strike_is_whole(tmp_path: Path):
    add_strike(tmp_path, strike("n1", 1.0))
    with (tmp_path / STRIKES_FILE).open("a") as file:
        file.write('{"time": 2.0, "node": "n')
    assert [strike.node for strike in read_strikes(tmp_path)] == ["n1"]

    add_strike(tmp_path, strike("n3", 3.0))

    assert [strike.node for strike in read_strikes(tmp_path)] == ["n1", "n3"]


def test_long_texts_with_control_characters_become_one_line_that_fits_an_atomic_write(tmp_path: Path):
    """An append of at most PIPE_BUF bytes, 4096, is not interrupted by other writers."""
    long_strike = Strike(time=1.0, node="\x01" * 999, device="\0" * 999, reason="a\nb" * 999, by="\x7f" * 999)

    add_strike(tmp_path, long_strike)

    data = (tmp_path / STRIKES_FILE).read_bytes()
    assert data.count(b"\n") == 1
    assert len(data) <= 4096
    [strike_read] = read_strikes(tmp_path)
    assert strike_read.reason.startswith("a ba ba b")


def test_a_line_that_is_not_a_strike_is_an_error_that_names_the_line(tmp_path: Path):
    (tmp_path / STRIKES_FILE).write_text('{"node": "n1"}\n')

    with pytest.raises(UserError, match=r"strikes\.jsonl:1: the value of `time` is wrong"):
        read_strikes(tmp_path)


def test_a_run_folder_that_cannot_be_written_is_a_store_error_that_names_it(tmp_path: Path):
    (tmp_path / "run").write_text("a file")

    with pytest.raises(StoreError, match="run"):
        add_strike(tmp_path / "run", strike("n1", 1.0))


def test_only_strikes_that_have_not_expired_count_towards_the_exclusion_of_a_node():
    """A strike expires a day after its time. A time after `now`, from a node whose clock is ahead, still counts."""
    strikes = [strike("n1", 0.0), strike("n1", DAY_S - 1), strike("n2", 10.0), strike("n10", DAY_S - 5)]

    # The first strike of n1 has expired, then that of n2.
    assert excluded_nodes(strikes, DAY_S + 5) == ["n1", "n10", "n2"]
    assert excluded_nodes(strikes, DAY_S + 10) == ["n1", "n10"]

    # At 20 s the strike of n2 at 10 s still counts with an expiry of 10.5 s; those near the end of the day are ahead.
    assert excluded_nodes(strikes, 20.0, expires_s=10.5) == ["n1", "n10", "n2"]

    # A clock was a year ahead when the strike was recorded; on a node whose clock was set back by a day it counts.
    assert excluded_nodes([strike("n1", 366 * DAY_S), strike("n2", 2 * DAY_S)], DAY_S) == ["n2"]

    assert excluded_nodes([], 0.0) == []


def test_a_strike_is_synced_to_the_disk_when_it_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []  # the content of the file at each fsync of it

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == tmp_path / STRIKES_FILE:
            synced.append(path.read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    for number in (1, 2):
        add_strike(tmp_path, strike(f"n{number}", 1.0))
        assert len(synced) == number
        assert synced[-1] == (tmp_path / STRIKES_FILE).read_text()

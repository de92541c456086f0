"""Strikes: durable, appended by several nodes at once, expiring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from electra_dist.errors import StoreError, UserError
from electra_dist.run.folder import STRIKES_FILE
from electra_dist.run.node_strikes import Strike, add_strike, excluded_nodes, node_name, read_strikes

DAY_S = 24 * 3600.0


def strike(node: str, time: float, reason: str = "ECC") -> Strike:
    return Strike(time=time, node=node, device="GPU 3", reason=reason, by="preflight")


def test_what_was_added_is_read_back_in_order_and_nothing_where_there_is_no_file(tmp_path: Path):
    assert read_strikes(tmp_path / "run") == []
    added = [strike("n1", 1.25), strike("n2", 2.5, 'said "no"')]
    for one in added:
        add_strike(tmp_path / "run", one)
    assert read_strikes(tmp_path / "run") == added
    assert json.loads((tmp_path / "run" / STRIKES_FILE).read_text().splitlines()[0])["node"] == "n1"


def test_eight_processes_that_add_at_once_lose_and_tear_nothing(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from electra_dist.run.node_strikes import *\n"
        "for i in range(25):\n"
        "    s = Strike(time=float(i), node=sys.argv[2], device='', reason='x' * 280, by='test')\n"
        "    add_strike(Path(sys.argv[1]), s)\n"
        "assert 'torch' not in sys.modules\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"n{i}"]) for i in range(8)]
    assert [writer.wait(60) for writer in writers] == [0] * 8
    found = [(s.node, s.time) for s in read_strikes(tmp_path)]
    assert sorted(found) == [(f"n{i}", float(t)) for i in range(8) for t in range(25)]


def test_a_line_that_a_killed_writer_left_torn_is_dropped_and_does_not_spoil_the_next(tmp_path: Path):
    add_strike(tmp_path, strike("n1", 1.0))
    with (tmp_path / STRIKES_FILE).open("a") as file:
        file.write('{"time": 2.0, "node": "n')
    assert [s.node for s in read_strikes(tmp_path)] == ["n1"]
    add_strike(tmp_path, strike("n3", 3.0))
    assert [s.node for s in read_strikes(tmp_path)] == ["n1", "n3"]


def test_the_longest_and_oddest_texts_become_one_line_that_fits_an_atomic_write(tmp_path: Path):
    add_strike(tmp_path, Strike(time=1.0, node="\x01" * 999, device="\0" * 999, reason="a\nb" * 999, by="\x7f" * 999))
    text = (tmp_path / STRIKES_FILE).read_bytes()
    assert text.count(b"\n") == 1
    assert len(text) <= 4096
    assert read_strikes(tmp_path)[0].reason.startswith("a ba ba b")


def test_a_line_that_is_no_strike_is_named(tmp_path: Path):
    (tmp_path / STRIKES_FILE).write_text('{"node": "n1"}\n')
    with pytest.raises(UserError, match=r"strikes\.jsonl:1: not a strike"):
        read_strikes(tmp_path)


def test_a_run_folder_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StoreError, match="run"):
        add_strike(tmp_path / "run", strike("n1", 1.0))


def test_strikes_expire_and_a_threshold_counts_only_those_that_have_not():
    strikes = [strike("n1", 0.0), strike("n1", DAY_S - 1), strike("n2", 10.0), strike("n10", DAY_S - 5)]
    assert excluded_nodes(strikes, DAY_S + 5) == ["n1", "n10", "n2"]
    assert excluded_nodes(strikes, DAY_S + 10) == ["n1", "n10"]
    assert excluded_nodes(strikes, DAY_S - 0.5, threshold=2) == ["n1"]
    assert excluded_nodes(strikes, DAY_S + 5, threshold=2) == []
    assert excluded_nodes(strikes, 20.0, expires_s=10.5) == ["n1", "n10", "n2"]  # n1's and n10's are still to come
    assert excluded_nodes([], 0.0) == []


def test_under_slurm_a_node_has_slurms_name():
    assert node_name({"SLURMD_NODENAME": "gpu-017"}) == "gpu-017"
    assert node_name({}) == node_name({"SLURMD_NODENAME": ""}) != ""

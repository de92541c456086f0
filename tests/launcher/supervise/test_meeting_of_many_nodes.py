"""Check how 128 nodes agree on starts of the ranks: how many files they open, and what they do without node 0."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launcher.supervise.meeting import summary as summary_module
from launcher.supervise.meeting.summary import SUMMARY_NAME
from launcher.supervise.rendezvous import Rendezvous

NODES = 128
OPENED: Counter[str] | None = None  # file name -> how often it was opened; None: nothing is counted


def count_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Count a file that is opened, if a test counts; called by Python as an audit hook.

    An audit hook cannot be removed, so it goes on to be called in other tests and does nothing there.
    """
    if event == "open" and OPENED is not None:
        OPENED[Path(str(arguments[0])).name] += 1


sys.addaudithook(count_open)


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `os.fsync` by nothing, because a test writes hundreds of files and depends on none after a crash."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Name of a file -> how often files of this name were opened during the test."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(sys.modules[__name__], "OPENED", counts)
    return counts


def never() -> bool:
    """Return False: no stop is requested while a supervisor waits."""
    return False


def look(node: Rendezvous) -> str:
    """Return the result of `Rendezvous.news` of a node, as if a second had passed since the last call."""
    node._next_look = 0.0
    return node.news()


def restarted_nodes(run_dir: Path) -> list[Rendezvous]:
    """Return the 128 nodes of a run whose ranks have crashed twice on every node and were started a third time."""
    nodes = [Rendezvous(run_dir, number, 7000, "7-0") for number in range(NODES)]
    for _ in range(2):
        ports = {node.start(never, 5) for node in nodes}
        assert len(ports) == 1
        for node in nodes:
            node.end(1, final=False)
    ports = {node.start(never, 5) for node in nodes}
    assert len(ports) == 1
    assert None not in ports
    return nodes


def test_a_second_of_128_nodes_opens_two_files_a_node_and_none_of_earlier_starts(
    tmp_path: Path, opened: Counter[str]
) -> None:
    nodes = restarted_nodes(tmp_path)
    assert not any(look(node) for node in nodes)
    opened.clear()
    assert not any(look(node) for node in nodes)
    assert opened == {"sessions": NODES, SUMMARY_NAME: NODES - 1}


def test_the_nodes_of_a_start_with_a_crash_open_its_report_once(tmp_path: Path, opened: Counter[str]) -> None:
    nodes = restarted_nodes(tmp_path)
    for node in nodes:
        look(node)
    nodes[77].end(1, final=False)
    opened.clear()
    for _ in range(3):
        news = [look(node) for node in nodes]
    assert set(news[:77] + news[78:]) == {"the ranks of node 77 have ended with exit code 1"}
    reports = {name: count for name, count in opened.items() if name.startswith("end-")}
    assert list(reports.values()) == [1]  # by node 0


def test_nodes_whose_node_0_is_dead_read_the_reports_of_others_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, two = (Rendezvous(tmp_path, number, 7000, "7-0") for number in range(3))
    for node in (zero, one, two):
        node.start(never, 5)
    two.end(1, final=False)
    assert look(one) == ""  # node 0 has not looked since
    monkeypatch.setattr(summary_module, "STALE_S", 0.0)
    assert look(one) == "the ranks of node 2 have ended with exit code 1"


@pytest.mark.parametrize("content", [b"", b"{", b'{"start": 9, "port": 7}', None])
def test_without_a_readable_summary_the_other_files_are_read(tmp_path: Path, content: bytes | None) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    port = zero.start(never, 1)
    (summary,) = tmp_path.rglob(SUMMARY_NAME)
    if content is None:
        summary.unlink()
    else:
        summary.write_bytes(content)
    assert one.start(never, 1) == port
    zero.end(0, final=True)
    summary.unlink()
    assert "node 0 have ended with exit code 0" not in look(one)  # no fault of this start
    assert one.left_by() == (0, 75)

"""Check how many files 128 nodes open to agree on starts of the ranks."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.supervise.rendezvous import Rendezvous

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
            node.end(1, final=False, ends_others=True)
    ports = {node.start(never, 5) for node in nodes}
    assert len(ports) == 1
    assert None not in ports
    return nodes


def test_a_second_of_128_nodes_opens_two_files_a_node_and_each_file_once_by_node_0(
    tmp_path: Path, opened: Counter[str]
) -> None:
    nodes = restarted_nodes(tmp_path)
    assert not any(look(node) for node in nodes)
    opened.clear()
    assert not any(look(node) for node in nodes)
    assert opened.pop("sessions") == NODES
    assert opened.pop("node-0.json") == NODES - 1
    assert opened == {f"node-{number}.json": 1 for number in range(1, NODES)}
    assert len(list((tmp_path / "meeting" / "7-0").iterdir())) == NODES


def test_a_crash_on_one_node_is_news_of_all_others_once_node_0_has_read_it(
    tmp_path: Path, opened: Counter[str]
) -> None:
    nodes = restarted_nodes(tmp_path)
    for node in nodes:
        look(node)
    nodes[77].end(1, final=False, ends_others=True)
    opened.clear()
    for _ in range(3):
        news = [look(node) for node in nodes]
    assert set(news[:77] + news[78:]) == {"the ranks of node 77 have ended with exit code 1"}
    assert opened["node-77.json"] == 1  # by node 0, which has told the others

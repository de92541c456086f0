"""The pure parts of supervising: what an end means, where ranks go, how nodes meet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from electra_dist.errors import UserError
from launcher.supervise import placement
from launcher.supervise.outcome import StartEnd, awaits_ledger, outcome
from launcher.supervise.placement import Placement
from launcher.supervise.rendezvous import Meeting


def end(*events: str, **fields: Any) -> StartEnd:
    ledger = [{"event": event, "step": 7, "why": "SIGUSR1"} for event in events]
    return StartEnd(events=ledger, **{"codes": {}, "num_ranks": 2, **fields})


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (end("resume", "checkpoint", "done", codes={0: 0, 1: 0}), 0),
        (end("resume", "done"), 0),  # killed after the last checkpoint was committed
        (end("start", codes={0: 0, 1: 0}), 1),  # exit codes alone are not believed
        (end("start", "stop", codes={0: 75, 1: 75}), 75),
        (end("start", "stop", codes={0: 75}), 75),
        (end("start", "crash", codes={0: 1}), 1),
        (end("start"), 1),
        (end(), 1),
        (end(codes={0: 78, 1: 78}), 78),
        (end("start", codes={1: 78}), 78),  # one rank's disk is full, the other was killed
        (end("start", "unhealthy", codes={0: 69, 1: 69}), 69),
        (end("start", "unhealthy", codes={0: 69, 1: 69}, at_fault=False), 75),
        (end("start", codes={0: -9, 1: 247}), 1),
    ],
)
def test_what_an_end_means(ended: StartEnd, code: int) -> None:
    assert outcome(ended).code == code


def test_only_ranks_that_all_ended_well_are_worth_waiting_for_the_ledger() -> None:
    assert awaits_ledger(end("start", codes={0: 0, 1: 0}))
    assert awaits_ledger(end(codes={0: 75, 1: 75}))
    assert not awaits_ledger(end("start", codes={0: 0}))
    assert not awaits_ledger(end("start", codes={0: 0, 1: 1}))
    assert not awaits_ledger(end("start", "done", codes={0: 0, 1: 0}))


def place(**options: Any) -> Placement:
    asked = {"nodes": None, "node": 0, "ranks_per_node": None, "address": None, "port": None, "hostfile": None}
    return Placement.from_options(**{**asked, **options})


def test_one_machine_needs_no_host_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = place(ranks_per_node=2).command(tmp_path, 4711, ["--config", "c.yaml"])
    assert command[:5] == [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", "4711"]
    assert command[5:7] == ["--num_gpus", "2"] and "--hostfile" not in command
    assert command[-2:] == ["--config", "c.yaml"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert len(place().ranks) == 2
    assert "--num_gpus" not in place().command(tmp_path, 1, [])  # deepspeed would then take GPUs 0 and 1


def test_each_node_of_several_starts_its_own_ranks_without_ssh(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# the second one is smaller\n gpu-a slots=8\n\ngpu-b  slots=4\ngpu-c slots=8 # new\n")
    third = place(hostfile=hostfile, node=2, address="gpu-a")
    assert third.ranks == range(12, 20) and third.port == 29500
    command = third.command(tmp_path, 29507, [])
    given = dict(zip(command[3::2], command[4::2]))
    assert given["--master_port"] == "29507"
    assert (tmp_path / "hostfile").read_text() == "node-0 slots=8\nnode-1 slots=4\nnode-2 slots=8\n"
    assert command[command.index("--no_ssh") + 1 :][:4] == ["--node_rank", "2", "--master_addr", "gpu-a"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 2, "ranks_per_node": 1}, "--master-addr"),
        ({"nodes": 2, "node": 2, "ranks_per_node": 1, "address": "a"}, "--node-rank 2 of 2"),
        ({"hostfile": "no such file"}, "no such file"),
        ({"hostfile": "a slots=2\nb"}, "'b' is not"),
        ({"hostfile": "# nobody\n"}, "names no host"),
        ({"hostfile": "a slots=2\nb slots=2\n", "nodes": 3, "address": "a"}, "names 2"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(tmp_path: Path, options: dict, words: str) -> None:
    if text := options.get("hostfile"):
        file = tmp_path / str(text).splitlines()[0].replace("/", "_")
        if "slots" in text or "#" in text:
            file.write_text(text)
        options = {**options, "hostfile": file}
    with pytest.raises(UserError, match=words):
        place(**options)


def test_gpus_are_counted_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(placement, "Path", lambda _: tmp_path)
    assert placement.local_devices() == 2


def never() -> bool:
    return False


def test_a_node_joins_each_start_once_and_learns_who_failed(tmp_path: Path) -> None:
    zero, one = Meeting(tmp_path, 0, 7000), Meeting(tmp_path, 1, 7000)
    assert one.start(never, 0.1) is None  # nobody has called
    port = zero.start(never, 1)
    assert one.start(never, 1) == port
    assert zero.news() == one.news() == ""
    one.end(1, final=False)
    zero._next_look = 0.0
    assert "node 1 have ended with 1" in zero.news()
    assert one.start(never, 0.3) is None  # not the same one again
    zero.end(1, final=False)
    again = zero.start(never, 1)
    assert again != port and one.start(never, 1) == again
    one._next_look = zero._next_look = 0.0
    assert zero.news() == one.news() == ""


def test_who_ends_for_good_takes_the_others_along(tmp_path: Path) -> None:
    zero, one = Meeting(tmp_path, 0, 7000), Meeting(tmp_path, 1, 7000)
    zero.start(never, 1), one.start(never, 1)
    one.end(69, final=True)
    assert zero.start(never, 1) is None and zero.left_by() == (1, 75)
    zero.end(75, final=True)
    assert one.start(never, 5) is None
    # The next job of this run: nobody has left that one.
    zero, one = Meeting(tmp_path, 0, 7000), Meeting(tmp_path, 1, 7000)
    assert one.start(never, 0.3) is None  # the old start is known to be over
    port = zero.start(never, 1)
    assert port is not None and zero.left_by() is None and zero.news() == ""
    assert one.start(never, 1) == port


def test_a_start_that_a_dead_job_left_is_given_up_for_the_new_one(tmp_path: Path) -> None:
    Meeting(tmp_path, 0, 7000).start(never, 1)
    one = Meeting(tmp_path, 1, 7000)
    old = one.start(never, 1)
    new = Meeting(tmp_path, 0, 7000).start(never, 1)
    one._next_look = 0.0
    assert one.superseded() and "new start" in one.news()
    assert one.start(never, 1) == new != old

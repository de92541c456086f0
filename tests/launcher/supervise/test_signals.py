"""Signals that reach a supervised run on every way.

The ranks are fake_rank.py, with real signal handlers, heartbeats, ledger and exit codes, and without torch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from electra_launcher.supervise.wait_for_ranks import ReceivedSignals
from support.supervised_runs import FAKE, Supervised, supervised

from electra_dist.run.heartbeat import read_heartbeats
from electra_dist.run.this_node import status_field
from electra_dist.train.stop_request import STOP_SIGNALS

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    """Programs that the tests start receive SIGHUP, also if the tests themselves were started with nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


def to_the_supervisor(run: Supervised) -> None:
    """Send SIGTERM to the supervisor."""
    run.process.send_signal(signal.SIGTERM)


def hang_up(run: Supervised) -> None:
    """Send SIGHUP to the supervisor, as a closed terminal does."""
    run.process.send_signal(signal.SIGHUP)


def to_one_rank(run: Supervised) -> None:
    """Send SIGTERM to rank 1."""
    os.kill(run.rank_pid(1), signal.SIGTERM)


def to_the_step(run: Supervised) -> None:
    """Send SIGUSR2 to every process, as `scancel --signal=USR2` and a time limit do."""
    for pid in [run.process.pid, *run.pids()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)


def interrupt(run: Supervised) -> None:
    """Send SIGINT to the supervisor, as Ctrl-C does."""
    run.process.send_signal(signal.SIGINT)


def interrupt_all(run: Supervised) -> None:
    """Send SIGINT to every process, as `scancel --signal=INT` does: ranks receive it beside what is passed on."""
    for pid in [run.process.pid, *run.pids()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (to_the_supervisor, "SIGTERM"),
        (hang_up, "SIGHUP (the terminal was closed)"),
        (to_one_rank, "SIGTERM"),
        (to_the_step, "SIGUSR2"),
        (interrupt, "interrupted (Ctrl-C)"),
        (interrupt_all, "interrupted (Ctrl-C)"),
    ],
)
def test_a_stop_signal_saves_on_all_ranks_and_ends_with_75(
    tiny_config: Callable[..., Path], tmp_path: Path, send: Callable[[Supervised], None], why: str
) -> None:
    config = tiny_config(**{"train.num_steps": 100_000})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(7)
        sent = time.time()
        send(run)
        assert run.end() == 75, run.story()
        (stop,) = run.events("stop")
        saved = [event.step for event in run.events("checkpoint")]
        assert saved[-1] == stop.step >= 7
        assert stop.why == why
        assert len(run.events("start")) == 1 and not run.events("resume")
        assert run.pids() == []
        print(f"{send.__name__}: {time.time() - sent:.1f} s, saved at step {stop.step}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_every_signal_that_a_supervisor_receives_has_a_name_and_is_one_that_ranks_handle(
    number: signal.Signals,
) -> None:
    received = ReceivedSignals()
    received.handle(number, None)
    assert received.name == ("Ctrl-C" if number == signal.SIGINT else number.name)
    assert received.number in STOP_SIGNALS and received.number != signal.SIGINT


def test_the_ranks_are_children_of_the_supervisor_in_sessions_of_their_own(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Ctrl-C and the end of a terminal then reach the supervisor only."""
    config = tiny_config(**{"train.num_steps": 100_000})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(2)
        pids = [run.rank_pid(rank) for rank in (0, 1)]
        assert sorted(run.pids()) == sorted(pids)
        assert [os.getsid(pid) for pid in pids] == pids
        assert [status_field(pid, "PPid") for pid in pids] == [str(run.process.pid)] * 2
        assert [os.readlink(f"/proc/{pid}/fd/0") for pid in pids] == [os.devnull] * 2
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.story()


def test_a_killed_rank_is_noticed_within_a_second_and_all_ranks_are_started_again(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny_config(**{"train.num_steps": 60})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(12)
        killed = time.time()
        os.kill(run.rank_pid(1), signal.SIGKILL)
        noticed = run.wait(lambda: run.logged(r"rank 1 \(?SIGKILL", after=killed))
        assert noticed - killed < 1.0
        assert run.end() == 0, run.story()
        (resume,) = run.events("resume")
        assert resume.step % 5 == 0 and resume.step >= 10


def test_a_signal_during_the_start_stops_the_run_once_the_ranks_have_their_handlers(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "slow-start").write_text("3")
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as run:
        ranks = run.wait(lambda: pids if len(pids := run.pids("fake_rank.py --state")) == 2 else [])
        for pid in [run.process.pid, *ranks]:
            os.kill(pid, signal.SIGUSR1)
        assert run.end() == 75, run.story()
        (stop,) = run.events("stop")
        assert stop.step < 10  # the signal was neither lost nor delayed


def test_a_new_supervisor_kills_the_orphans_of_a_killed_one(tiny_config: Callable[..., Path], tmp_path: Path) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "deaf").touch()  # otherwise the ranks stop when their supervisor has ended
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as first:
        first.wait_for_step(7)
        orphans = [beat.pid for beat in read_heartbeats(run_dir)]
        first.process.kill()
        first.process.wait()
        assert all(pid in first.pids() for pid in orphans)
        with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as second:
            second.wait_for_step(12, attempt=3)
            assert second.logged("that an earlier supervisor left")
            assert not any(pid in second.pids() for pid in orphans)
            (run_dir / "deaf").unlink()
            second.process.send_signal(signal.SIGUSR1)
            assert second.end() == 75


def test_ranks_save_and_stop_when_their_supervisor_is_killed_and_the_next_one_sweeps_what_is_left(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    of_another_run = temporary / "electra-dist-ranks-other"
    of_another_run.mkdir()
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as first:
        first.wait_for_step(7)
        first.process.kill()
        first.process.wait()
        deadline = time.monotonic() + 30
        while first.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert first.pids() == []
        (stop,) = first.events("stop")
        assert first.events("checkpoint")[-1].step == stop.step >= 7
        assert stop.why == "its supervisor was killed"
    left_by_first = [folder for folder in temporary.glob("electra-dist-ranks-*") if folder != of_another_run]
    assert len(left_by_first) == 1
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as second:
        second.wait_for_step(int(stop.step) + 1, attempt=2)
        assert not left_by_first[0].exists() and of_another_run.exists()
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 75, second.story()
    assert list(temporary.glob("electra-dist-ranks-*")) == [of_another_run]


@pytest.mark.parametrize("way", ["reader ends", "closed at the start"])
def test_a_supervised_run_reaches_its_end_without_a_reader_of_its_output(
    tiny_config: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 20}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "chatty").touch()
    options = ["--config", str(config), "--gpus-per-node", "2"]
    if way == "reader ends":
        with subprocess.Popen([*FAKE, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(timeout=120) == 0
    else:
        shell = f"exec {shlex.join([*FAKE, *options])} 1>&- 2>&-"
        assert subprocess.run(shell, shell=True, stdin=subprocess.DEVNULL, timeout=120).returncode == 0
    log = (run_dir / "supervise-0.log").read_text()
    assert log.count("starting ranks") == 1 and "the target step 20 is reached" in log

"""Every way a signal can reach a run under DeepSpeed's real launchers; each would fail if their behaviour changed.

The ranks are fake_rank.py: the real handlers, heartbeats, ledger and exit codes, and no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.supervised_runs import FAKE, FAKE_WITHOUT_DEEPSPEED, Supervised, supervised

from electra_dist.run.heartbeat import read_heartbeats

pytestmark = pytest.mark.multiproc


def to_the_supervisor(run: Supervised) -> None:
    run.process.send_signal(signal.SIGTERM)


def to_the_node_launcher(run: Supervised) -> None:
    """DeepSpeed ends its ranks one after the other, and with them the whole run: the first one stops them all."""
    os.kill(run.node_launcher(), signal.SIGTERM)


def to_one_rank(run: Supervised) -> None:
    os.kill(run.rank_pid(1), signal.SIGTERM)


def to_the_step(run: Supervised) -> None:
    """Every process, as `scancel --signal=USR2` and a time limit do it."""
    for pid in [run.process.pid, *run.pids()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)


@pytest.mark.parametrize("send", [to_the_supervisor, to_the_node_launcher, to_one_rank, to_the_step])
def test_a_stop_signal_saves_on_all_ranks_and_ends_with_75(
    tiny_config: Callable[..., Path], tmp_path: Path, send: Callable[[Supervised], None]
) -> None:
    config = tiny_config(**{"train.num_steps": 100_000})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(7)
        told = time.time()
        send(run)
        assert run.end() == 75, run.story()
        (stop,) = run.events("stop")
        saved = [event["step"] for event in run.events("checkpoint")]
        assert saved[-1] == stop["step"] >= 7
        assert len(run.events("start")) == 1 and not run.events("resume")
        assert run.pids() == []
        print(f"{send.__name__}: {time.time() - told:.1f} s, saved at step {stop['step']}")


def test_a_killed_node_launcher_leaves_the_ranks_running_and_the_run_goes_on_to_its_end(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    """`deepspeed` itself ends with 0 here, with its ranks alive: nothing is lost and nothing is believed."""
    config = tiny_config(**{"train.num_steps": 100})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(7)
        os.kill(run.node_launcher(), signal.SIGKILL)
        run.wait(lambda: run.logged("launcher is gone, 2 ranks still run"))
        assert len(run.events("done")) == 0
        assert run.end() == 0, run.story()
        assert len(run.events("start")) == 1 and not run.events("resume")


def test_ranks_that_take_long_to_save_are_not_killed_by_the_node_launcher(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    """It would, 30 s after the first rank's end: so it is ended first, and the ranks are not."""
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "deaf").touch()
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as run:
        run.wait_for_step(7)
        assert len(run.pids("deepspeed.launcher")) == 2
        run.process.send_signal(signal.SIGTERM)
        run.wait(lambda: not run.pids("deepspeed.launcher"))
        step = max(beat.step for beat in read_heartbeats(run_dir))
        run.wait_for_step(step + 3)
        (run_dir / "deaf").unlink()
        assert run.end() == 75, run.story()
        assert len(run.events("stop")) == 1


def test_a_killed_rank_is_noticed_and_all_are_started_again(tiny_config: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny_config(**{"train.num_steps": 60})
    with supervised(FAKE, config, tmp_path / "run", "--gpus-per-node", "2") as run:
        run.wait_for_step(12)
        killed = time.time()
        os.kill(run.rank_pid(1), signal.SIGKILL)
        noticed = run.wait(lambda: run.logged("rank .*1 lost", after=killed))
        assert noticed - killed < 1.0
        assert run.end() == 0, run.story()
        (resume,) = run.events("resume")
        assert resume["step"] % 5 == 0 and resume["step"] >= 10


def test_a_signal_during_start_is_kept_until_the_ranks_can_take_it(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "slow-start").write_text("3")
    with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as run:
        ranks = run.wait(lambda: pids if len(pids := run.pids("fake_rank.py --local_rank")) == 2 else [])
        for pid in [run.process.pid, *ranks]:
            os.kill(pid, signal.SIGUSR1)
        assert run.end() == 75, run.story()
        (stop,) = run.events("stop")
        assert stop["step"] < 10  # not lost, and not late


def test_a_killed_supervisor_is_followed_by_one_that_clears_its_orphans(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 100_000}), tmp_path / "run"
    with supervised(FAKE_WITHOUT_DEEPSPEED, config, run_dir, "--gpus-per-node", "2") as first:
        first.wait_for_step(7)
        orphans = [beat.pid for beat in read_heartbeats(run_dir)]
        first.process.kill()
        first.process.wait()
        assert all(pid in first.pids() for pid in orphans)
        with supervised(FAKE_WITHOUT_DEEPSPEED, config, run_dir, "--gpus-per-node", "2") as second:
            second.wait_for_step(12, attempt=3)
            assert second.logged("that an earlier supervisor left")
            assert not any(pid in second.pids() for pid in orphans)
            second.process.send_signal(signal.SIGUSR1)
            assert second.end() == 75

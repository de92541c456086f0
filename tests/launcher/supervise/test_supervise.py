"""Supervised runs: a hung rank, each exit code, runs without progress, two nodes. Most ranks are fakes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.supervise.supervisor import preflight
from support.real_runs import REPOSITORY, read_losses
from support.supervised_runs import FAKE, REAL, supervised

from electra_dist.run.failures import read_strikes
from electra_dist.run.history import RunEvidence, run_state
from electra_dist.run.lease import read_owner
from electra_dist.run.ledger import read_ledger
from electra_dist.run.this_node import node_name

MakeConfig = Callable[..., Path]
FAKE_NVML = Path(__file__).resolve().parents[2] / "support" / "fake_nvml"
TWO = ("--gpus-per-node", "2")
FOREVER = {"train.num_steps": 100_000}
QUICK = {"cluster.hang_step_floor_s": 2.0, "cluster.hang_checkpoint_s": 10.0, "cluster.hang_setup_s": 120.0}


@pytest.mark.multiproc
def test_a_hung_rank_is_noticed_its_stacks_are_logged_and_the_resumed_run_gives_the_same_losses(
    tiny_config: MakeConfig, pretrain: Callable, tmp_path: Path
) -> None:
    settings = {"train.num_steps": 60, "checkpoint.every_steps": 20, "model.hidden_dropout": 0.1, **QUICK}
    pretrain(tiny_config("uncut", **settings), 2)
    config, run_dir = tiny_config("cut", **settings), tmp_path / "cut"
    with supervised(REAL, config, run_dir, *TWO) as run:
        run.wait_for_step(29)
        stopped = time.time()
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        noticed = run.wait(lambda: run.logged("hung: rank", after=stopped))
        step = run.wait(lambda: run.events("resume"))[0].step
        run.wait_for_step(step + 1, attempt=2)
        print(f"hang to notice {noticed - stopped:.1f} s, to the next step {time.time() - stopped:.1f} s")
        assert run.end(120) == 0, run.story()
        log = "\n".join(run.log())
    assert 2.0 <= noticed - stopped < 6.0  # the floor is 2 s; both ranks wait in a collective that moves megabytes
    assert "stopped or blocked in the kernel: [1]" in log and "State" not in log
    shown = {rank: log.partition(f"  rank {rank}, pid ")[2].partition("  rank ")[0] for rank in (0, 1)}
    assert shown[1].partition("\n")[0].count("T (stopped)") == 1
    for text in shown.values():  # the stacks of both ranks, including the stopped one
        assert "electra_dist/train/trainer.py" in text and "launcher/electra_launcher/supervise/rank_main.py" in text
    assert read_losses(run_dir) == read_losses(tmp_path / "uncut")


def test_three_restarts_without_a_new_checkpoint_end_the_run_with_1(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "crash").touch()
    with supervised(FAKE, tiny_config(**FOREVER), run_dir, *TWO) as run:
        assert run.end() == 1, run.story()
        assert run.starts() == 4
        assert "3 restarts in a row without a new checkpoint" in run.log()[-1]


def test_a_run_whose_checkpoints_advance_is_restarted_more_than_three_times(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    with supervised(FAKE, tiny_config(**{"train.num_steps": 60}), tmp_path / "run", *TWO) as run:
        for attempt in range(4):
            run.wait(lambda wanted=10 * attempt: any(e.step > wanted for e in run.events("checkpoint")))
            os.kill(run.rank_pid(attempt % 2), signal.SIGKILL)
            run.wait(lambda seen=attempt + 1: len(run.events("resume")) == seen)
            run.wait_for_step(run.events("resume")[-1].step + 1, attempt=attempt + 3)
        assert run.end() == 0, run.story()
        assert len(run.events("resume")) == 4


def test_a_rank_that_ends_with_78_ends_the_run_with_78(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "exit-1").write_text("78")
    with supervised(FAKE, tiny_config(**FOREVER), run_dir, *TWO) as run:
        assert run.end() == 78, run.story()
        assert run.starts() == 1


def test_a_mistake_in_the_config_gives_one_line_and_78_and_writes_nothing(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    command = [*REAL, "--config", str(tiny_config()), "--set", "train.micro_bacth=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 78
    assert "did you mean `train.micro_batch`" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_crash_on_a_node_with_a_sick_gpu_ends_with_69_and_a_strike(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "crash").touch()
    monkeypatch.setenv("PYTHONPATH", f"{FAKE_NVML}{os.pathsep}{REPOSITORY}")
    monkeypatch.setenv("FAKE_NVML", '[{}, {"ecc_volatile": 3}]')
    with supervised(FAKE, tiny_config(**FOREVER), run_dir, *TWO) as run:
        assert run.end() == 69, run.story()
        assert run.starts() == 1
    (strike,) = read_strikes(run_dir)
    assert "GPU 1" in strike.device


def test_a_node_that_fails_its_preflight_starts_no_ranks(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKE_NVML}{os.pathsep}{REPOSITORY}")
    monkeypatch.setenv("FAKE_NVML", '[{}, {"ecc_volatile": 3}]')
    with supervised(FAKE, tiny_config(**FOREVER), tmp_path / "run", *TWO, "--preflight") as run:
        assert run.end() == 69, run.story()
        assert run.starts() == 0
    assert [strike.device for strike in read_strikes(tmp_path / "run")] == ["GPU 1"]


def test_a_preflight_that_hangs_is_a_strike_against_the_node(tiny_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert preflight(tmp_path / "run", ["--config", str(tiny_config())], limit_s=0.01) == 69
    (strike,) = read_strikes(tmp_path / "run")
    assert strike.node == node_name() and "not over within" in strike.reason


def test_a_second_supervisor_of_the_same_node_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(**FOREVER)
    with supervised(FAKE, config, tmp_path / "run", *TWO) as run:
        run.wait_for_step(2)
        second = subprocess.run([*FAKE, "--config", str(config), *TWO], capture_output=True, text=True, timeout=30)
        assert second.returncode == 78 and f"supervisor on host {node_name()}, pid {run.process.pid}" in second.stderr
        assert len(run.pids("fake_rank.py")) == 2  # the ranks of the first supervisor still run


def test_ranks_that_are_done_but_do_not_exit_are_killed_and_the_run_ends_with_0(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """A communicator that cannot be destroyed can keep a rank's process alive."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "linger").touch()
    with supervised(FAKE, tiny_config(**{"train.num_steps": 10}), run_dir, *TWO) as run:
        assert run.end(40) == 0, run.story()
        assert run.logged("hung: rank . in phase done")
        assert run.pids() == []


def test_a_stop_file_ends_with_75(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with supervised(FAKE, tiny_config(**FOREVER), tmp_path / "run", *TWO) as run:
        run.wait_for_step(3)
        (tmp_path / "run" / "stop").touch()
        assert run.end() == 75, run.story()


def test_a_second_interrupt_ends_ranks_that_ignore_the_first(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "deaf").touch()
    with supervised(FAKE, tiny_config(**FOREVER), run_dir, *TWO) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)
        run.wait(lambda: run.logged("received Ctrl-C"))
        run.process.send_signal(signal.SIGINT)
        assert run.end(10) == 75, run.story()
        assert run.pids() == []
        assert "without a save" in run.log()[-1] and read_owner(run_dir) is None
        (crash,) = run.events("crash")
        assert crash.step >= 3 and "SIGINT received twice" in crash.why
    just_alive = RunEvidence(now=time.time(), sign_of_life=time.time(), patience_s=60.0)
    assert run_state(read_ledger(run_dir), just_alive) == "dead", "killed ranks must not seem to live for a minute"


def test_two_nodes_start_again_together_after_one_loses_a_rank(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config, run_dir = tiny_config(**{"train.num_steps": 60}), tmp_path / "run"
    options = ["--nodes", "2", "--gpus-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "23000"]
    with (
        supervised(FAKE, config, run_dir, *options, "--node-rank", "1", node=1) as one,
        supervised(FAKE, config, run_dir, *options, "--node-rank", "0", node=0) as zero,
    ):
        zero.wait_for_step(12)
        os.kill(zero.rank_pid(1), signal.SIGKILL)
        one.wait(lambda: one.logged("crash: rank 1 SIGKILL"))
        zero.wait(lambda: len(zero.events("resume")) == 1)
        assert zero.end() == 0, zero.story()
        assert one.end() == 0, one.story()
        for run in (zero, one):
            assert sum("starting ranks" in line for line in run.log()) == 2


def test_a_node_whose_storage_is_away_at_the_start_ends_the_ranks_of_the_other_node(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """They would wait in their first collective for the time-out of the process group, 20 minutes."""
    config, run_dir = tiny_config(**FOREVER), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "away-1").touch()
    options = ["--nodes", "2", "--gpus-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", "23200"]
    with (
        supervised(FAKE, config, run_dir, *options, "--node-rank", "1", node=1) as one,
        supervised(FAKE, config, run_dir, *options, "--node-rank", "0", node=0) as zero,
    ):
        assert one.end(60) == 75, one.story()
        assert zero.end(60) == 75, zero.story()
        assert zero.logged("the ranks of node 1 have ended with exit code 75; ending the ranks of this node too")
        assert "node 1 has ended for good" in zero.log()[-1]


@pytest.mark.parametrize(
    ("nodes", "visible", "num_ranks"),
    [
        (1, "GPU-8f6d1c2a-0000-1111-2222-333344445555,GPU-01", 2),
        (1, "", 1),
        (2, "17,3", 1),  # as in a job on a node that it shares with others
    ],
)
def test_ranks_have_the_visible_devices_that_the_supervisor_was_started_with(
    nodes: int, visible: str, num_ranks: int, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's own launcher takes them for numbers of GPUs that exist, and gives the ranks others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config, run_dir = tiny_config(**{"train.num_steps": 2}), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "devices").touch()
    with contextlib.ExitStack() as stack:
        runs = []
        for node in range(nodes):
            options = []
            if nodes > 1:
                options = ["--nodes", "2", "--gpus-per-node", "1", "--master-addr", "127.0.0.1"]
                options += ["--master-port", "23100", "--node-rank", str(node)]
            runs.append(stack.enter_context(supervised(FAKE, config, run_dir, *options, node=node)))
        for run in runs:
            assert run.end() == 0, run.story()
    written = {file.name: file.read_text() for file in run_dir.glob("devices-*")}
    assert written == {f"devices-{rank}": visible for rank in range(nodes * num_ranks)}

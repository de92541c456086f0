"""Real runs stopped by signal, file and deadline: all ranks stop after the same step, save and exit with 75."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import deepspeed_command, rank_pid

from electra_dist.train.stop_request import INTERRUPT_SIGNAL, INTERRUPTED, STOP_SIGNALS, StopRequest

pytestmark = pytest.mark.multiproc


def stop_run(config: Path, run_dir: Path, step: int, stop: Callable[[int], None], env: dict[str, str]) -> int:
    """Start a run on 2 ranks, call `stop(session)` once `step` is logged, and return the launcher's exit code."""
    process = subprocess.Popen(
        deepspeed_command(config, 2),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **env},
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
            assert time.monotonic() < deadline, "the run makes no progress"
            if process.poll() is not None:
                break
            time.sleep(0.01)
        stop(process.pid)
        return process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_run_stopped_by_signal_file_and_deadline_gives_the_losses_of_an_uninterrupted_run(
    tiny_config: Callable[..., Path], pretrain: Callable, losses: Callable[[Path], list[tuple]], tmp_path: Path
) -> None:
    settings = {"train.num_steps": 80, "checkpoint.every_steps": 1000, "model.hidden_dropout": 0.1}
    pretrain(tiny_config("uncut", **settings), 2)
    config, run_dir = tiny_config("cut", **settings), tmp_path / "cut"
    soon = {
        "SLURM_JOB_END_TIME": str(int(time.time()) + 5)
    }  # less than the smallest margin: the run stops after one step
    assert stop_run(config, run_dir, 12, lambda s: os.kill(rank_pid(s, 1), signal.SIGUSR2), {}) == 75
    assert stop_run(config, run_dir, 25, lambda s: (run_dir / "stop").touch(), {}) == 75
    assert stop_run(config, run_dir, 10**6, lambda s: None, soon) == 75
    assert stop_run(config, run_dir, 45, lambda s: (run_dir / "save").touch(), {}) == 0
    assert losses(run_dir) == losses(tmp_path / "uncut")
    assert not (run_dir / "stop").exists() and not (run_dir / "save").exists()
    events = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    stops = [event["step"] for event in events if event["event"] == "stop"]
    resumes = [event for event in events if event["event"] == "resume"]
    assert [event["step"] for event in resumes] == stops  # nothing was lost
    assert [event["repeated"] for event in resumes] == [0, 0, 0]
    assert stops[2] == stops[1] + 1
    reasons = [event["why"] for event in events if event["event"] == "stop"]
    assert reasons[:2] == ["SIGUSR2", f"file {run_dir / 'stop'}"]  # the signal came to rank 1, the ledger is rank 0's
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    assert len(saved) == 5 and saved[-1] == 80 and stops[2] < saved[3] < 80


def test_margin_before_the_jobs_end_follows_the_longest_step_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
        rank_0, rank_1 = StopRequest(tmp_path, True), StopRequest(tmp_path, False)
        rank_0.longest_step_s, rank_0.longest_save_s = 10.0, 30.0
        assert not rank_0.wants_stop()  # a margin of 80 s is less than the 100 s that remain
        rank_0.longest_save_s = 45.0
        assert rank_0.wants_stop() and "the job ends in" in rank_0.reason
        assert not rank_1.wants_stop()  # only rank 0 watches the clock
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank_1.wants_stop() and rank_1.reason == "SIGTERM"
        hung_up = StopRequest(tmp_path, False)
        os.kill(os.getpid(), signal.SIGHUP)  # the terminal was closed
        assert hung_up.wants_stop() and hung_up.reason == "SIGHUP (the terminal was closed)"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        under_nohup = StopRequest(tmp_path, False)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not under_nohup.wants_stop()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_ctrl_c_that_comes_from_the_supervisor_and_by_itself_is_one_and_the_next_interrupts(tmp_path: Path) -> None:
    """`scancel --signal=INT` sends SIGINT to the ranks, too, at times after the supervisor has passed it on."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for first in ([INTERRUPT_SIGNAL, signal.SIGINT], [signal.SIGINT, INTERRUPT_SIGNAL, signal.SIGINT]):
            request = StopRequest(tmp_path, False)
            for number in first:
                os.kill(os.getpid(), number)
            assert request.wants_stop() and request.reason == INTERRUPTED
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        StopRequest(tmp_path, False)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

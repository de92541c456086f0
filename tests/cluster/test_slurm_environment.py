"""Jobs that are submitted in the shell of another job, at a site that exports nothing, run to their own end.

Real Slurm, real batch script, and fake_ranks.py, which stops as real ranks do: 10 s before its job ends, or by signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from machines import wait_for
from slurm import SlurmCluster
from submitted import SubmittedRun, submit_fake

from electra_dist.run.ledger import read_jobs, read_ledger

ONE_MINUTE = {"time_limit": "1", "signal_ahead_s": 1}  # Slurm sends the signal up to half a minute earlier
LEAST_S = 15  # how long the ranks of a job run at least


def enter_shell_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of such a shell. Call it when the cluster is up, whose daemons must not have them."""
    variables = {
        "SBATCH_EXPORT": "NONE",
        "SBATCH_TIMELIMIT": "5",
        "SBATCH_WAIT": "1",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 20),
        "SLURM_RESTART_COUNT": "3",
        "SLURM_MEM_PER_CPU": "1",
        "RANK": "5",
        "WORLD_SIZE": "8",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def ends(run: SubmittedRun) -> list[tuple[str, int, str]]:
    """Return the job id, number of requeues and verdict of each start that has ended, the first one first."""
    return [(r.job, r.restart, r.verdict) for r in read_jobs(run.folder) if r.event == "end"]


def num_begun(run: SubmittedRun) -> int:
    """Return how many starts of all jobs have begun."""
    return sum(record.event == "begin" for record in read_jobs(run.folder))


def seconds_of_starts(run: SubmittedRun) -> list[float]:
    """Return how long the ranks of each start ran that stopped because its job ended soon, the first one first."""
    seconds = []
    begun = 0.0
    for event in read_ledger(run.folder):
        moment = datetime.fromisoformat(event.time).timestamp()
        if event.event in ("start", "resume"):
            begun = moment
        elif event.event == "stop":
            seconds.append(moment - begun)
    return seconds


def test_each_link_of_a_chain_and_the_replacement_of_a_crashed_one_runs_to_its_own_end(
    cluster: Callable[..., SlurmCluster], tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config("run", **{"train.num_steps": 1000})
    (config.parent / "run").mkdir()
    (config.parent / "run" / "exit-n1").write_text("1")  # the first link crashes after two steps
    slurm = cluster(2)
    enter_shell_of_another_job(monkeypatch)
    run = submit_fake(slurm, config, chain=2, **ONE_MINUTE)
    run.wait(300)
    first, second = run.jobs
    (*links, replacement) = ends(run)
    assert links == [(first, 0, "again"), (second, 0, "next")], run.log()
    assert replacement[0] not in run.jobs
    assert replacement[1:] == (0, "next")
    assert [seconds > LEAST_S for seconds in seconds_of_starts(run)] == [True, True], run.log()


def test_a_requeued_job_and_the_standby_job_that_it_submits_run_to_their_own_end(
    cluster: Callable[..., SlurmCluster], tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    slurm = cluster(2)
    enter_shell_of_another_job(monkeypatch)
    run = submit_fake(slurm, tiny_config("run", **{"train.num_steps": 1000}), **ONE_MINUTE)
    job, standby = run.jobs
    run.wait_for_checkpoint(3)
    slurm.slurm("scancel", standby)  # as a person may do: the job submits another one when it starts again
    wait_for(lambda: num_begun(run) == 2, 300, run.log)
    slurm.slurm("scontrol", "update", f"JobId={job}", "Requeue=0")  # so that the standby job takes over
    wait_for(lambda: len(ends(run)) == 3, 300, run.log)
    (run.folder / "exit-n1").write_text("78")  # ends the run
    run.wait(60)
    assert ends(run)[:2] == [(job, 0, "next"), (job, 1, "next")], run.log()
    new_standby, restart, verdict = ends(run)[2]
    assert new_standby not in run.jobs
    assert (restart, verdict) == (0, "next")
    assert [seconds > LEAST_S for seconds in seconds_of_starts(run)[:3]] == [True, True, True], run.log()

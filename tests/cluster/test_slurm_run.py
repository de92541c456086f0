"""A real run on a real Slurm: time limit, dead node, and every loss is the uninterrupted run's, bit for bit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from machines import wait_for
from slurm import SlurmCluster
from submitted import SubmittedRun, submit

from electra_dist.run.ledger import read_jobs

MakeConfig = Callable[..., Path]
NUM_STEPS = 2000  # a fast machine makes 800 before the first link must stop
LONG = {
    "train.num_steps": NUM_STEPS,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "checkpoint.every_steps": 50,
    "data.heldout": None,
}


def first_step_after(run: SubmittedRun, moment: float) -> float:
    """Seconds from `moment` (time.time()) to the first step that a later start recorded."""
    from electra_dist.run.metrics import read_metrics

    starts = [datetime.fromisoformat(e.time).timestamp() for e in [*run.events("start"), *run.events("resume")]]
    begun = len([s for s in starts if s > moment])
    wait_for(
        lambda: len([e for e in run.events("resume") if datetime.fromisoformat(e.time).timestamp() > moment]) > begun,
        120,
        run.log(),
    )
    resumed = run.events("resume")[-1].step
    wait_for(lambda: any(r.step > resumed for r in read_metrics(run.folder)), 60, run.log)
    return time.time() - moment


def test_a_chain_outlives_its_time_limit_and_a_dead_node_with_the_losses_of_an_uninterrupted_run(
    cluster: Callable[..., SlurmCluster],
    tiny_config: MakeConfig,
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
):
    slurm = cluster(3)
    options = ["--nodes", "2", "--gpus-per-node", "0", "--time", "1", "--signal-ahead", "20", "--chain", "4"]
    run = submit(slurm, tiny_config("cut", **LONG), *options)

    wait_for(lambda: run.events("stop"), 90, run.log)
    asked_to_stop_at = time.time()
    print(f"time limit: {run.events('stop')[0]}")
    for job in run.jobs[1:]:
        slurm.slurm("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    print(f"stop to the first step of the next link: {first_step_after(run, asked_to_stop_at):.1f} s")
    run.wait_for_checkpoint(run.events("resume")[-1].step + 50)

    slurm.crash("n2")
    died = time.time()
    print(f"node dead to the first step without it: {first_step_after(run, died):.1f} s")
    assert run.nodes()[-1] == "n1,n3"
    run.wait(400)
    print(run.log()[-800:])

    assert run.events("done")[-1].step == NUM_STEPS
    pretrain(tiny_config("uncut", **LONG), 2)
    assert losses(run.folder) == losses(tmp_path / "uncut")
    assert len(losses(run.folder)) == NUM_STEPS


def test_a_spare_node_takes_the_place_of_a_dead_one_without_a_new_job(
    cluster: Callable[..., SlurmCluster],
    tiny_config: MakeConfig,
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
):
    slurm = cluster(3)
    settings = {**LONG, "train.num_steps": 600}
    options = ["--nodes", "2", "--spares", "1", "--gpus-per-node", "0", "--time", "20", "--chain", "2"]
    run = submit(slurm, tiny_config("cut", **settings), *options)
    run.wait_for_checkpoint(100, timeout_s=120)

    slurm.crash("n2")
    died = time.time()
    print(f"node dead to the first step on the spare one: {first_step_after(run, died):.1f} s")
    print(run.status())
    run.wait(300)

    assert run.nodes() == ["n1,n2", "n1,n3"]
    begins = [record for record in read_jobs(run.folder) if record.event == "begin"]
    assert [record.job for record in begins] == 2 * [run.jobs[0]]
    assert run.events("done")[-1].step == 600
    pretrain(tiny_config("uncut", **settings), 2)
    assert losses(run.folder) == losses(tmp_path / "uncut")
    assert len(losses(run.folder)) == 600

"""What Slurm does when things break, and that a run comes through: real Slurm, real batch script, fake_ranks.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import wait_for
from slurm import SlurmCluster
from submitted import submit_fake

from electra_dist.run.ledger import read_jobs

MakeConfig = Callable[..., Path]
StartCluster = Callable[..., SlurmCluster]


def test_a_run_folder_with_a_space_a_quote_and_a_percent_sign(cluster: StartCluster, tiny_config: MakeConfig):
    config = tiny_config("it's 100 % a run", **{"train.num_steps": 3})
    run = submit_fake(cluster(2), config)
    run.wait(30)
    assert run.verdicts() == ["done"], run.log()
    assert [file.name for file in (run.folder / "slurm").glob("*.log")] == [f"job-{run.jobs[0]}.log"]


def test_time_limit_then_requeue(cluster: StartCluster, tiny_config: MakeConfig):
    config = tiny_config("run", **{"train.num_steps": 300})  # 100 s
    run = submit_fake(cluster(2), config, time_limit="2", signal_ahead_s=45)  # which Slurm may give a minute early
    print(f"done after {run.wait(400):.1f} s, 11 s of it for each requeue")
    *before, last = run.verdicts()
    assert before and set(before) == {"next"} and last == "done", run.log()
    assert run.events("stop")[0].why == "SIGUSR1"
    assert run.events("resume")[0].step == run.events("stop")[0].step


def test_a_node_that_crashes_and_is_back_at_once_does_not_end_the_run(cluster: StartCluster, tiny_config: MakeConfig):
    """Slurm sees no node failure: without the batch script's own requeue the job would be FAILED and gone."""
    slurm = cluster(2)
    run = submit_fake(slurm, tiny_config("run"))
    run.wait_for_checkpoint(3)
    slurm.crash("n2")
    slurm.boot("n2")
    crashed = time.time()
    wait_for(lambda: run.events("resume"), 60, run.log)
    print(f"reboot to the next start: {time.time() - crashed:.1f} s")
    run.wait(60)
    assert run.verdicts() == ["again", "done"], run.log()
    assert "Node failure" not in run.log()


def test_a_dead_node_is_left_behind(cluster: StartCluster, tiny_config: MakeConfig):
    slurm = cluster(3)
    run = submit_fake(slurm, tiny_config("run", **{"train.num_steps": 90}))
    run.wait_for_checkpoint(3)
    slurm.crash("n2")
    crashed = time.time()
    wait_for(lambda: "PENDING" in run.queue(), 60, run.log)
    print(run.status())
    wait_for(lambda: run.events("resume"), 60, run.log)
    print(run.status())
    print(f"power loss to the next start without the node: {time.time() - crashed:.1f} s")
    assert run.nodes() == ["n1,n2", "n1,n3"]
    run.wait(60)
    assert run.verdicts()[-1] == "done"


def test_an_unhealthy_node_is_left_out_of_the_next_start(cluster: StartCluster, tiny_config: MakeConfig):
    slurm = cluster(3)
    runs = {}
    for name, chain in (("requeued", 0), ("chain", 2)):
        config = tiny_config(name, **{"train.num_steps": 6})
        folder = config.parent / name
        folder.mkdir()
        (folder / "exit-n2").write_text("69")
        runs[name] = submit_fake(slurm, config, chain=chain)
        runs[name].wait(60)
    for run in runs.values():
        assert run.nodes() == ["n1,n2", "n1,n3"], run.log()
        assert run.verdicts() == ["next", "done"]


def test_crashes_without_progress_end_the_chain_after_three_restarts(cluster: StartCluster, tiny_config: MakeConfig):
    config = tiny_config("run")
    (config.parent / "run").mkdir()
    (config.parent / "run" / "crash-always").touch()
    run = submit_fake(cluster(2), config, chain=2)
    run.wait(240)  # a job that crashes holds its nodes for 20 s
    assert run.verdicts() == ["again", "again", "again", "stop"], run.log()
    print(run.status())
    assert "4 starts in a row ended without a new checkpoint" in run.log()


def test_a_mistake_that_only_a_person_can_mend_cancels_the_chain(cluster: StartCluster, tiny_config: MakeConfig):
    config = tiny_config("run")
    (config.parent / "run").mkdir()
    (config.parent / "run" / "exit-n1").write_text("78")
    run = submit_fake(cluster(2), config, chain=3)
    run.wait(30)
    assert run.verdicts() == ["stop"], run.log()


def test_a_cancelled_job_saves_and_stays_away(cluster: StartCluster, tiny_config: MakeConfig):
    slurm = cluster(2)
    run = submit_fake(slurm, tiny_config("run", **{"train.num_steps": 300}))
    run.wait_for_checkpoint(3)
    slurm.slurm("scancel", run.jobs[0])
    run.wait(60)
    assert run.verdicts() == ["leave"], run.log()
    print(run.status())
    assert slurm.job_state(run.jobs[0]) == "CANCELLED"
    assert run.events("stop")


def test_after_a_healed_cut_the_node_is_drained_and_the_job_held_and_status_says_what_releases_them(
    cluster: StartCluster, tiny_config: MakeConfig
):
    """The first node's ranks end behind the cut; its slurmd still holds the job when Slurm starts it there again."""
    slurm = cluster(2)
    run = submit_fake(slurm, tiny_config("run", **{"train.num_steps": 30}))
    run.wait_for_checkpoint(3)
    (run.folder / "crash-always").touch()
    slurm.cut("n1")
    wait_for(lambda: slurm.node_state("n1").startswith("down"), 60, run.queue)
    slurm.heal()
    (run.folder / "crash-always").unlink()
    wait_for(lambda: "held" in run.queue(), 90, run.log)
    said = run.status()
    print(said)
    assert f"scontrol release {run.jobs[0]}" in said
    assert "scontrol update nodename=n1 state=resume" in said
    slurm.crash("n1")  # as the administrator would: reboot the node that holds on to the dead job
    slurm.boot("n1")
    for line in said.splitlines():
        if line.strip().startswith("scontrol"):
            slurm.slurm(*line.split())
    run.wait(120)
    assert run.verdicts()[-1] == "done", run.log()


@pytest.mark.parametrize("chain", [0, 2])
def test_an_unhealthy_node_is_replaced_by_a_spare_one_in_the_same_job(
    cluster: StartCluster, tiny_config: MakeConfig, chain: int
):
    config = tiny_config("run", **{"train.num_steps": 12})
    run_folder = config.parent / "run"
    run_folder.mkdir()
    (run_folder / "exit-n2").write_text("69")
    run = submit_fake(cluster(3), config, spare_nodes=1, chain=chain)
    run.wait(60)
    assert run.verdicts() == ["next", "done"], run.log()
    assert run.nodes() == ["n1,n2", "n1,n3"]
    assert {record.job for record in read_jobs(run.folder) if record.event == "begin"} == {run.jobs[0]}


@pytest.mark.parametrize("chain", [0, 2])
def test_the_next_job_takes_over_when_the_first_node_of_a_job_with_spares_dies(
    cluster: StartCluster, tiny_config: MakeConfig, chain: int
):
    """The batch script dies with the first node. Slurm would keep the job without its script until its time limit."""
    slurm = cluster(4)
    run = submit_fake(slurm, tiny_config("run", **{"train.num_steps": 60}), spare_nodes=1, chain=chain)
    run.wait_for_checkpoint(3)
    slurm.crash("n1")
    run.wait(180)
    assert run.nodes() == ["n1,n2", "n2,n3"], run.log()
    assert run.verdicts() == ["done"]

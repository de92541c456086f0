"""A node behind a cut link lives on beside the run that has been started again without it, and harms nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from machines import wait_for
from slurm import SlurmCluster
from submitted import submit
from support.real_runs import read_losses, step_records

MakeConfig = Callable[..., Path]
SETTINGS = {"train.num_steps": 300, "checkpoint.every_steps": 20, "data.heldout": None}


def test_a_node_that_is_cut_off_is_left_behind_and_what_lives_on_there_harms_nothing(
    cluster: Callable[..., SlurmCluster], tiny_config: MakeConfig, pretrain: Callable[..., object]
):
    slurm = cluster(3)
    run = submit(slurm, tiny_config("cut", **SETTINGS), "--nodes", "2", "--gpus-per-node", "0")
    wait_for(lambda: len(step_records(run.folder)) >= 60, 120, run.log)
    assert run.nodes() == ["n1,n2"]
    slurm.cut("n2")
    cut = time.monotonic()
    wait_for(lambda: slurm.node_state("n2").startswith("down"), 60, run.queue)
    old = slurm.processes("n2", "electra_launcher.")
    print(f"given up by Slurm after {time.monotonic() - cut:.1f} s; alive there, behind the cut: {len(old)} processes")
    assert old
    wait_for(lambda: run.events("resume"), 180, run.log)
    print(f"cut to the next start without the node: {time.monotonic() - cut:.1f} s")
    waited = wait_for(lambda: not slurm.processes("n2", "electra_launcher."), 120, "n2 keeps processes of the run")
    print(f"the next start to nothing left on the old node, still behind the cut: {waited:.1f} s")
    run.wait(400)
    assert run.nodes() == ["n1,n2", "n1,n3"]
    assert run.verdicts()[-1] == "done", run.log()
    attempts = [event.attempt for event in run.events("checkpoint")]
    assert attempts == sorted(attempts)  # once a newer attempt has saved, the older one commits nothing
    pretrain(tiny_config("uncut", **SETTINGS), 2)
    assert read_losses(run.folder) == read_losses(run.folder.with_name("uncut"))


def test_a_whole_run_behind_a_cut_is_fenced_by_the_run_that_took_over(
    cluster: Callable[..., SlurmCluster], tiny_config: MakeConfig, pretrain: Callable[..., object]
):
    """All ranks are on the cut node, so they train on, at full speed, beside their successors on another node."""
    slurm = cluster(2)
    settings = {**SETTINGS, "train.global_batch": 64, "checkpoint.every_steps": 10}  # slow steps: both are at work
    run = submit(slurm, tiny_config("cut", **settings), "--nodes", "1", "--gpus-per-node", "0")
    wait_for(lambda: len(step_records(run.folder)) > 20, 120, run.log)
    slurm.cut("n1")
    cut = time.monotonic()
    wait_for(lambda: run.events("resume"), 180, run.log)
    print(f"cut to the next start on another node: {time.monotonic() - cut:.1f} s")
    taken_over = time.monotonic()
    waited = wait_for(lambda: not slurm.processes("n1", "--local_rank"), 120, "the old ranks train on")
    print(f"take-over to the end of the old ranks: {waited:.1f} s")
    run.wait(400)
    print(f"done {time.monotonic() - taken_over:.1f} s after the take-over")
    assert run.nodes() == ["n1", "n2"]
    assert [event.attempt for event in [*run.events("start"), *run.events("resume")]] == [1, 2]  # no tug of war
    records = step_records(run.folder)
    assert [record["step"] for record in records] == list(range(1, 301))
    pretrain(tiny_config("uncut", **settings), 1)
    assert read_losses(run.folder) == read_losses(run.folder.with_name("uncut"))

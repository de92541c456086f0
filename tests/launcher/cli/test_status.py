"""`electra-dist status` prints the state of a run and the next command, for each state that a run can be in."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from electra_launcher.cli import run_facts
from electra_launcher.cli.main import app
from electra_launcher.cli.run_facts import facts, gather, hung_ranks, waits_for_storage
from electra_launcher.cli.status import lines
from electra_launcher.slurm.slurm import NodeOut, QueuedJob, QueueView
from support.hostile_text import HOSTILE, assert_shown
from support.run_records import EVAL, STEP
from typer.testing import CliRunner

from electra_dist.config import ClusterConfig
from electra_dist.errors import UserError
from electra_dist.run.environment_record import write_environment
from electra_dist.run.failures import Failure, Strike, add_strike, record_failure
from electra_dist.run.heartbeat import Heartbeat
from electra_dist.run.lease import take_lease
from electra_dist.run.metrics import EvalRecord
from electra_dist.run.records import Record, encode
from electra_dist.run.this_node import node_name

MakeConfig = Callable[..., Path]
NOW = time.time()
STEP_12 = STEP.model_copy(update={"step": 12, "loss": 8.5185, "step_s": 2.0})
RUNNING = QueuedJob(job="7", state="RUNNING", reason="None", nodes="n[1-2]")
WAITING = QueuedJob(job="8", state="PENDING", reason="Resources", nodes="")
HELD = QueuedJob(job="7", state="PENDING", reason="launch failed requeued held", nodes="")


def test_a_folder_that_a_refused_first_start_left_names_the_refusal(tmp_path: Path) -> None:
    fields = {"time": "2026-01-01T00:00:00+00:00", "start": "s", "node": "n7", "rank": 0, "error": "refused"}
    record_failure(tmp_path, 0, Failure(**fields, line="corpus/corpus.json: no finished corpus"), {})

    result = CliRunner().invoke(app, ["status", str(tmp_path)])

    assert isinstance(result.exception, UserError)
    message = str(result.exception)
    assert f"{tmp_path}: the first start was refused" in message and "no finished corpus" in message
    assert f"electra-dist why {tmp_path}" in message and "not a run folder" not in message


def test_a_first_start_that_was_killed_is_not_said_to_be_refused(tmp_path: Path) -> None:
    fields = {"time": "2026-01-01T00:00:00+00:00", "start": "s", "node": "n7", "rank": 0, "error": "refused"}
    record_failure(tmp_path, 0, Failure(**fields), {})
    take = "import sys, pathlib, os; from electra_dist.run.lease import take_lease"
    die = f"{take}; take_lease(pathlib.Path(sys.argv[1]), 'supervisor', say=print); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", die, str(tmp_path)], check=False)

    result = CliRunner().invoke(app, ["status", str(tmp_path)])

    assert "killed before it recorded a config" in str(result.exception) and "start again" in str(result.exception)


@pytest.fixture
def run(tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A submitted run of 20 steps that is at step 12 with checkpoint 10; `queue` sets what Slurm answers."""
    folder = tmp_path / "run"
    (folder / "slurm").mkdir(parents=True)
    (folder / "config.yaml").write_text(tiny_config("run").read_text())
    (folder / "slurm" / "submission-0001.sh").write_text("#!/bin/bash\n# electra-dist submit --config c --nodes 2\n")
    write(folder / "slurm" / "jobs.jsonl", [event("begin", job="7", restart=0, nodes="n1,n2", ledger_events=0)])
    write(folder / "metrics.jsonl", [STEP_12])
    ledger(folder)
    monkeypatch.setattr(run_facts, "queue_view", lambda name: None)
    monkeypatch.setattr(
        run_facts, "time", SimpleNamespace(time=lambda: NOW)
    )  # so that ages do not depend on the machine's speed
    return folder


def event(name: str, ago_s: float = 60.0, **details: Any) -> dict[str, Any]:
    """Return an event that happened `ago_s` seconds before NOW."""
    moment = datetime.fromtimestamp(NOW - ago_s, UTC).isoformat(timespec="milliseconds")
    return {"time": moment, "event": name, **details}


def write(file: Path, records: Sequence[Record | dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    file.write_bytes(b"".join(map(encode, records)))


def ledger(folder: Path, *more: dict[str, Any]) -> None:
    """Write a ledger with a start, a checkpoint at step 10 and the events `more`."""
    spent = {"first": 4.0, "step": 18.0, "data": 0.0, "stall": 0.5, "eval": 0.0}
    start = event("start", 110, step=0, attempt=1, setup_s={"import": 5.0, "build": 2.0, "restore": 0.0})
    saved = event("checkpoint", 80, step=10, attempt=1, stall_s=0.5, wait_s=0.0, spent_s=spent)
    write(folder / "ledger.jsonl", [start, saved, *more])


def shown(run: Path) -> list[str]:
    """Run the command and return the lines that it prints."""
    result = CliRunner().invoke(app, ["status", str(run)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def commands(page: list[str]) -> list[str]:
    """Return the commands that a printed page suggests."""
    return [line.strip() for line in page[page.index("next:") + 1 :]]


def queue(monkeypatch: pytest.MonkeyPatch, *jobs: QueuedJob, out: tuple[NodeOut, ...] = ()) -> None:
    """Let Slurm answer with these jobs and unused nodes."""
    monkeypatch.setattr(run_facts, "queue_view", lambda name: QueueView(jobs=jobs, out=out))


def test_a_running_job_is_shown_as_living_with_progress_checkpoint_job_and_goodput(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    queue(monkeypatch, RUNNING, WAITING)
    page = shown(run)
    assert page[0] == f"run {run}: living"
    assert "  step        12 of 20 (60.0 %), loss 8.5185 (mlm 2.3457, rtd 0.1235), eta 16s" in page
    assert "  checkpoint  step 10, 1m20s old" in page
    assert "  job         7 RUNNING n[1-2]" in page
    goodput = next(line for line in page if "goodput" in line)
    assert goodput.startswith(
        "  goodput     54.1 % (import"
    )  # 20 s of steps in 37 s, from the start of the process to the save
    assert commands(page)[0] == f"tail -f {run}/slurm/job-7.log"


def test_a_dead_run_is_said_to_repeat_the_steps_since_its_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "slurm")  # started by hand
    ledger(run, event("crash", 50, step=12, why="RuntimeError"))
    assert "  checkpoint  step 10, 1m20s old; a restart repeats 2 steps" in shown(run)
    assert json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["steps_to_repeat"] == 2
    ledger(run, event("stop", 50, step=10, why="SIGTERM"))
    assert not any("repeats" in line for line in shown(run))


def test_a_step_that_is_behind_the_checkpoint_is_said_to_be_the_last_one_logged(run: Path) -> None:
    ledger(run, event("checkpoint", 20, step=14, attempt=1, stall_s=0.5, wait_s=0.0, spent_s={}))
    page = shown(run)
    assert any(
        line.startswith(
            "  step        14 of 20 (70.0 %), loss 8.5185 (mlm 2.3457, rtd 0.1235) at the last logged step"
        )
        for line in page
    )
    assert any(line.startswith("  checkpoint  step 14") for line in page)


def test_the_losses_of_an_objective_are_shown_and_a_single_one_is_not_repeated(run: Path) -> None:
    """An objective without a part records 0 for it: masked language modelling has no detection."""
    for changes, shown_loss in (
        ({"rtd_loss": 0.0}, "loss 8.5185, eta"),
        ({"rtd_loss": 0.0, "token_loss": 3.25}, "loss 8.5185 (mlm 2.3457, tokens 3.2500), eta"),
    ):
        write(run / "metrics.jsonl", [STEP_12.model_copy(update=changes)])
        assert any(shown_loss in line for line in shown(run)), changes


def test_the_page_is_also_printed_as_json(run: Path, monkeypatch: pytest.MonkeyPatch):
    queue(monkeypatch, RUNNING, WAITING)
    result = CliRunner().invoke(app, ["status", str(run), "--json"])
    tree = json.loads(result.stdout)
    assert (tree["state"], tree["step"], tree["num_steps"]) == ("living", 12, 20)
    assert (tree["loss"], tree["eta_s"]) == (8.5185, 16.0)
    assert tree["losses"] == {"mlm": STEP.mlm_loss, "rtd": STEP.rtd_loss}
    assert tree["checkpoint"]["step"] == 10 and tree["goodput"] == pytest.approx(20 / 37)
    assert [job["job"] for job in tree["jobs"]] == ["7", "8"]
    assert tree["next"][0] == f"tail -f {run}/slurm/job-7.log"
    assert tree["context_auc"] is None


def test_the_context_auc_of_the_newest_evaluation_is_shown_with_a_warning_if_it_is_low(run: Path):
    undefined = EVAL.model_copy(update={"step": 4})
    early = EVAL.model_copy(update={"step": 5, "context_auc": 0.5, "context_auc_se": 0.004})
    low = early.model_copy(update={"step": 10})
    high = EVAL.model_copy(update={"step": 12, "context_auc": 0.6123, "context_auc_se": 0.0042})

    def context_lines(*records: EvalRecord) -> list[str]:
        write(run / "metrics.jsonl", [STEP_12, *records])
        return [line for line in shown(run) if line.startswith(("  context ", "  warning "))]

    assert context_lines() == []
    assert context_lines(undefined) == []
    assert context_lines(undefined, early) == [
        "  context     AUC 0.5000 at step 5 (standard error 0.0040; 0.5 is chance, 1 is perfect)"
    ]
    newest, warning = context_lines(early, low)
    assert newest == "  context     AUC 0.5000 at step 10 (standard error 0.0040; 0.5 is chance, 1 is perfect)"
    assert warning.startswith(
        "  warning     step 10: context AUC 0.500 (standard error 0.004) is below 0.52 after 50 %"
    )
    assert "objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}" in warning
    assert context_lines(low, high) == [
        "  context     AUC 0.6123 at step 12 (standard error 0.0042; 0.5 is chance, 1 is perfect)"
    ]


def test_ranks_without_a_recent_heartbeat_in_a_running_job_are_listed(run: Path, monkeypatch: pytest.MonkeyPatch):
    queue(monkeypatch, RUNNING)
    for rank in (0, 1):
        beat = Heartbeat(run, rank, attempt=1)
        for step in range(12):
            beat.beat("step", step)
    later = dataclasses.replace(gather(run), now=time.time() + 1000)
    silent = [line for line in lines(later) if line.startswith("  silent")]
    assert [line.split()[2] for line in silent] == ["0", "1"]
    assert "step 11, 1000 s" in silent[0]


def test_a_pending_job_is_shown_as_waiting_with_its_reason(run: Path, monkeypatch: pytest.MonkeyPatch):
    queue(monkeypatch, WAITING)
    page = shown(run)
    assert page[0].endswith(": waiting (Resources: no free nodes)")
    assert commands(page)[0].startswith("squeue --start --name=run-")


def test_a_held_job_and_its_drained_node_are_shown_with_the_commands_that_release_them(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    ours = NodeOut(node="n1", state="drained", reason="Duplicate jobid")
    other = NodeOut(node="n9", state="down", reason="Maintenance")
    queue(monkeypatch, HELD, out=(ours, other))
    page = shown(run)
    assert page[0].endswith(": held (launch failed requeued held)")
    assert commands(page) == ["scontrol update nodename=n1 state=resume", "scontrol release 7"]
    assert not any("n9" in line for line in page)


def test_a_stopped_run_is_shown_with_the_command_that_submitted_it(run: Path, monkeypatch: pytest.MonkeyPatch):
    queue(monkeypatch)
    ledger(run, event("stop", 50, step=12, why="SIGTERM"))
    page = shown(run)
    assert page[0].endswith(": stopped (stop: SIGTERM, 50s ago)")
    assert commands(page) == ["electra-dist submit --config c --nodes 2"]


def test_while_slurm_does_not_answer_the_page_suggests_to_look_into_the_queue_before_a_new_submission(run: Path):
    ledger(run, event("crash", 50, step=12))
    page = shown(run)
    assert any(line.startswith("  queue       unknown") for line in page)
    assert json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["jobs"] is None
    assert commands(page)[0].startswith("squeue --name=run-")
    assert commands(page)[1] == "electra-dist submit --config c --nodes 2"


def test_a_run_that_the_launcher_ended_is_shown_as_dead_with_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch):
    queue(monkeypatch)
    ledger(run, event("crash", 50, step=12))
    with open(run / "slurm" / "jobs.jsonl", "a") as file:
        file.write(
            json.dumps(event("end", job="7", restart=0, ledger_events=3, verdict="stop", why="4 starts in a row"))
            + "\n"
        )
    assert shown(run)[0].endswith(": dead (4 starts in a row)")


def test_why_the_newest_start_has_failed_is_shown_until_the_run_saves_again_or_is_finished(run: Path):
    fields = {"time": event("crash", 60)["time"], "start": "s", "node": "n7", "rank": 3, "error": "device-assert"}
    record_failure(run, 7, Failure(**fields, step=12, repeated=True), {})
    (line,) = [line for line in shown(run) if line.startswith("  failure ")]
    assert line.startswith(
        "  failure     rank 3 on n7: CUDA error, device-side assert, at step 12: the same step on the"
    )
    assert "code, not node; not restarted a second time" in line and f"electra-dist why {run}" in line
    known = json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["failure"]
    assert (known["rank"], known["fault"], known["repeated"]) == (3, "code", True)
    lease = take_lease(run, "supervisor", say=print)  # The next start has begun, and has recorded nothing yet.
    assert not [line for line in shown(run) if line.startswith("  failure ")]
    lease.release()
    for end in (event("stop", 5, step=15, why="SIGTERM"), event("done", 0, step=20)):
        ledger(run, end)
        assert not [line for line in shown(run) if line.startswith("  failure ")]


def test_the_reason_of_a_job_is_not_shown_for_a_run_that_was_continued_without_slurm(run: Path):
    by_hand = [event("resume", 40, step=10, attempt=2), event("stop", 30, step=15, why="SIGINT")]
    ledger(run, event("crash", 50, step=12), *by_hand)
    with open(run / "slurm" / "jobs.jsonl", "a") as file:
        ended = event("end", job="7", restart=0, ledger_events=3, verdict="stop", why="4 starts in a row")
        file.write(json.dumps(ended) + "\n")
    assert shown(run)[0].endswith(": stopped (stop: SIGINT, 30s ago)")


def test_a_start_that_lives_ends_the_account_of_an_earlier_refusal(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    fields = {"time": "2026-01-01T00:00:00+00:00", "start": "s", "node": "n7", "rank": 0, "error": "refused"}
    record_failure(folder, 0, Failure(**fields, line="corpus/corpus.json: no finished corpus"), {})
    lease = take_lease(folder, "supervisor", say=print)
    (folder / "supervise-0.log").touch()

    page = shown(folder)
    assert page[0].startswith(f"run {folder}: living (its first start began 0s ago")
    assert commands(page) == [f"tail -f {folder}/supervise-0.log"]
    assert f"pid {os.getpid()}" in page[1]
    known = json.loads(CliRunner().invoke(app, ["status", str(folder), "--json"]).output)
    assert (known["state"], known["failure"], known["num_steps"]) == ("living", None, None)
    assert set(known) == set(facts(gather(run)))
    why = CliRunner().invoke(app, ["why", str(folder)]).output.splitlines()
    assert why[0] == f"run {folder}: running" and "its first start began" in why[1]
    assert commands(why) == commands(page)

    lease.release()
    refused = CliRunner().invoke(app, ["status", str(folder)])
    assert "the first start was refused" in str(refused.exception)


def test_a_start_that_has_recorded_nothing_yet_lives_for_status_and_why(run: Path):
    shutil.rmtree(run / "slurm")  # started by hand
    ledger(run, event("crash", 50, step=12, why="RuntimeError"))
    assert shown(run)[0].startswith(f"run {run}: dead")
    lease = take_lease(run, "supervisor", say=print)
    page = shown(run)
    assert page[0] == f"run {run}: living"
    why = CliRunner().invoke(app, ["why", str(run)]).output.splitlines()
    assert why[:2] == [f"run {run}: running", "  what        the newest start goes on, at step 12"]
    assert commands(why) == commands(page)
    lease.release()
    ledger(run, event("resume", 0, step=10, attempt=2))
    assert CliRunner().invoke(app, ["why", str(run)]).output.splitlines()[0] == f"run {run}: running"


def test_before_the_first_checkpoint_no_goodput_is_claimed(run: Path):
    write(run / "ledger.jsonl", [event("start", 110, step=0, attempt=1, setup_s={"import": 5.0, "build": 2.0})])
    (line,) = [line for line in shown(run) if line.startswith("  goodput ")]
    assert line == "  goodput     known from the first checkpoint on (imports 5s, build 2s; 1 start, 0 steps repeated)"


def test_a_resumed_run_that_compiles_its_first_step_lives(run: Path):
    """Until its first step a start may be silent for `hang_setup_s`, although earlier starts have trained."""
    ledger(run, event("resume", 0, step=10, attempt=2))
    Heartbeat(run, 0, attempt=2).beat("step", 10)
    assert dataclasses.replace(gather(run), now=time.time() + 200).state == "living"
    Heartbeat(run, 0, attempt=2).beat("step", 11)
    assert dataclasses.replace(gather(run), now=time.time() + 200).state == "dead"


def test_a_run_that_ended_before_its_first_record_has_all_its_steps(run: Path):
    (run / "metrics.jsonl").write_text("")
    ledger(run, event("done", 5, step=20))
    assert "  step        20 of 20" in shown(run)


def test_a_finished_run_is_shown_with_the_export_command(run: Path):
    ledger(run, event("done", 5, step=20))
    page = shown(run)
    assert page[0].endswith(": finished")
    assert "  step        20 of 20 (100.0 %), loss 8.5185 (mlm 2.3457, rtd 0.1235) at the last logged step" in page
    assert commands(page)[0] == f"electra-dist export {run}"


def test_a_dead_run_without_slurm_is_shown_with_the_command_that_goes_on(run: Path):
    (run / "slurm" / "submission-0001.sh").unlink()
    (run / "slurm" / "jobs.jsonl").unlink()
    ledger(run, event("crash", 50, step=12))
    page = shown(run)
    assert page[0].endswith(": dead (crash, 50s ago)")
    assert commands(page) == [f"electra-dist train {run}"]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({"n1": 2}, ["electra-dist train {run}"]),  # which reads the number from the record
        (
            {"n1": 4, "n2": 4},
            [
                r"printf '%s\n' 'n1 slots=4' 'n2 slots=4' > {run}/hostfile",
                "electra-dist train {run} --hostfile {run}/hostfile",
            ],
        ),
        (
            {"n1": 8, "n2": 4},
            [
                r"printf '%s\n' 'n1 slots=8' 'n2 slots=4' > {run}/hostfile",
                "deepspeed --hostfile {run}/hostfile --module electra_launcher.pretrain --config {run}/config.yaml",
            ],
        ),
    ],
)
def test_the_command_that_goes_on_starts_as_many_ranks_as_before(
    run: Path, hosts: dict[str, int], expected: list[str]
):
    """A start with another number of ranks is not equal to the run bit by bit."""
    (run / "slurm" / "submission-0001.sh").unlink()
    (run / "slurm" / "jobs.jsonl").unlink()
    ledger(run, event("crash", 50, step=12))
    world_size = sum(hosts.values())
    write_environment(run, world_size, [host for host, num_ranks in hosts.items() for _ in range(num_ranks)])
    assert commands(shown(run)) == [command.format(run=run) for command in expected]

    moved = run.rename(run.with_name("moved"))
    command = commands(shown(moved))[-1]
    assert command.startswith("electra-dist train ") or command.endswith(f" --set 'run_dir=\"{moved}\"'")


def test_a_node_with_a_strike_is_shown_with_its_reason(run: Path):
    add_strike(run, Strike(time=NOW - 3600, node="n3", device="GPU 2", reason="ECC", by="preflight"))
    line = next(line for line in shown(run) if "left out" in line)
    assert line.startswith("  left out    n3 for 23h00m more: GPU 2 ECC")


def test_a_folder_that_is_no_run_is_a_user_error(tmp_path: Path):
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert isinstance(result.exception, UserError)


def test_a_rank_that_waits_for_storage_is_shown_with_its_reason_and_the_run_lives(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    """The rank has been silent for longer than a step may take, and the run is not taken for dead."""
    ledger(run, event("resume", 60, step=10, attempt=2))
    beats = [Heartbeat(run, rank, attempt=2) for rank in (0, 1)]
    beats[0].beat("storage", 12, "/data/metrics.jsonl: disk full; free space there")
    beats[1].beat("step", 12, "/data/checkpoints: read-only file system")
    later = dataclasses.replace(gather(run), now=time.time() + 300)
    page = lines(later)
    assert page[0].endswith(": living")
    waiting, training = [line for line in page if line.startswith("  storage")]
    assert "rank 0 on " in waiting and "waits for 5m" in waiting and "at most 10m" in waiting
    assert waiting.endswith(": /data/metrics.jsonl: disk full; free space there")
    assert "rank 1 on " in training and training.endswith("trains on: /data/checkpoints: read-only file system")
    waits = facts(later)["waiting_for_storage"]
    assert [(wait["rank"], wait["is_training"]) for wait in waits] == [(0, False), (1, True)]
    assert not [line for line in page if line.startswith("  silent")]


def test_ranks_of_an_earlier_start_are_neither_silent_nor_waiting(tmp_path: Path):
    """The earlier start had a rank more; its heartbeat file is left, with a reason and a very old time."""
    old = dataclasses.replace(Heartbeat(tmp_path, 2, attempt=1).last, reason="disk full", time=NOW - 1e6)
    new = [dataclasses.replace(Heartbeat(tmp_path, rank, attempt=2).last, step=3) for rank in (0, 1)]
    assert hung_ranks([*new, old], time.time(), ClusterConfig()) == []
    assert waits_for_storage(tmp_path, "", [*new, old], time.time()) == []
    of_one_start = dataclasses.replace(old, attempt=2)
    assert [rank.rank for rank in hung_ranks([*new, of_one_start], time.time(), ClusterConfig())] == [2]
    assert [wait["rank"] for wait in waits_for_storage(tmp_path, "", [*new, of_one_start], time.time())] == [2]


def test_a_run_folder_that_takes_no_records_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_facts, "disk_problem", lambda folder: "read-only file system")
    ledger(run, event("resume", 60, step=10, attempt=2))
    page = lines(dataclasses.replace(gather(run), now=time.time() + 300))
    assert page[0].endswith(": living")
    assert f"  storage     the run folder takes no records: {run}: read-only file system" in page


def test_a_run_that_ended_for_lack_of_storage_is_stopped_with_the_reason(run: Path):
    write(run / "slurm" / "jobs.jsonl", [])
    ledger(run, event("storage", 30, step=12, why="/data/metrics.jsonl: disk full"))
    assert shown(run)[0].endswith(": stopped (storage: /data/metrics.jsonl: disk full, 30s ago)")


def test_the_owner_of_the_run_folder_is_shown_in_the_text_and_as_json(run: Path) -> None:
    assert json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["owner"] is None
    lease = take_lease(run, "supervisor", say=print)
    (line,) = [line for line in shown(run) if line.startswith("  owner  ")]
    assert f"supervisor on host {node_name()}, pid {os.getpid()}, since 2" in line and "last renewed 0s ago" in line
    owner = json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["owner"]
    assert (owner["holder"], owner["host"], owner["pid"]) == ("supervisor", node_name(), os.getpid())
    assert NOW <= owner["since"] <= owner["renewed"] + 1
    lease.release()
    assert not [line for line in shown(run) if line.startswith("  owner  ")]


def test_a_run_whose_owner_was_killed_on_this_machine_is_dead_at_once(run: Path) -> None:
    shutil.rmtree(run / "slurm")  # started by hand
    ledger(run, event("resume", 1, step=10, attempt=2))
    take = "import sys, pathlib, time; from electra_dist.run.lease import take_lease"
    hold = f"{take}; take_lease(pathlib.Path(sys.argv[1]), 'supervisor', say=print); print('held'); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(run)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        assert shown(run)[0] == f"run {run}: living"
        owner.kill()
        owner.wait()
        reason = f"killed: its supervisor, pid {owner.pid}, no longer runs on this machine"
        page = shown(run)
        assert page[0] == f"run {run}: dead ({reason})"
        assert not [line for line in page if line.startswith("  owner  ")]
        assert json.loads(CliRunner().invoke(app, ["status", str(run), "--json"]).output)["owner"] is None
        assert commands(page) == [f"electra-dist train {run}"]
        why = CliRunner().invoke(app, ["why", str(run)]).output.splitlines()
        assert why[:2] == [f"run {run}: killed", f"  what        no end is recorded; {reason}"]
        assert commands(why) == commands(page)


def test_every_link_is_shown_with_its_verdict_and_a_waiting_run_with_the_last_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    records = [
        event("submit", 900, jobs=["7", "8", "9"]),
        event("begin", 890, job="7", restart=0, nodes="n1", ledger_events=0),
        event("end", 600, job="7", restart=0, verdict="next", why="stopped on purpose at step 10"),
        event("begin", 590, job="8", restart=0, nodes="n1", ledger_events=2),
        event("begin", 300, job="9", restart=0, nodes="n1", ledger_events=2),
        event("end", 100, job="9", restart=0, verdict="later", why="storage stayed full or away at step 12"),
    ]
    write(run / "slurm" / "jobs.jsonl", records)
    queue(monkeypatch, QueuedJob(job="10", state="PENDING", reason="BeginTime", nodes=""))
    page = shown(run)
    assert "waiting (BeginTime: its begin time has not come" in page[0]
    assert page[0].endswith("; the last job: storage stayed full or away at step 12)")
    assert [line for line in page if line.startswith("  link")] == [
        "  link        7: next: stopped on purpose at step 10",
        "  link        8: ended without a verdict: its first node failed, or the job was killed",
        "  link        9: later: storage stayed full or away at step 12",
    ]
    verdicts = [link["verdict"] for link in facts(gather(run))["links"]]
    assert verdicts == ["next", None, "later"]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "never submitted"),
        ([{"jobs": ["7", "8"]}], "jobs 7, 8 are not in the queue any more"),
    ],
)
def test_a_run_that_has_not_begun_is_shown_with_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], words: str
):
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    write(run / "slurm" / "jobs.jsonl", [event("submit", 90, **record) for record in records])
    queue(monkeypatch)
    assert "not begun (" in shown(run)[0]
    assert words in shown(run)[0]


def test_one_step_that_waited_for_storage_does_not_set_the_remaining_time(run: Path):
    write(run / "metrics.jsonl", [STEP_12.model_copy(update={"step_s": 7200.0})])
    pulse = Heartbeat(run, 0, attempt=1)
    pulse._step_times.extend([2.0] * 20)
    pulse.beat("step", 12)
    assert "eta 16s" in next(line for line in shown(run) if line.startswith("  step"))
    assert facts(gather(run))["eta_s"] == pytest.approx(16.0)


def test_text_of_others_reaches_the_terminal_escaped_and_on_the_line_that_it_is_in(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons of jobs and strikes, names of nodes, and what Slurm answers."""
    queue(
        monkeypatch,
        dataclasses.replace(WAITING, reason=HOSTILE),
        out=(NodeOut(node=HOSTILE, state="down", reason=HOSTILE),),
    )
    add_strike(run, Strike(time=NOW, node=HOSTILE, device="", reason=HOSTILE, by="preflight"))
    (run / "slurm" / "submission-0001.sh").write_text(f"#!/bin/bash\n# submit {HOSTILE}\n")
    end = event("end", job="7", restart=0, nodes=HOSTILE, ledger_events=9, verdict="stop", why=HOSTILE)
    begin = event("begin", job=HOSTILE, restart=0, nodes=HOSTILE, ledger_events=0)
    write(run / "slurm" / "jobs.jsonl", [begin, end])
    ledger(run, event("crash", step=12, attempt=1, why=HOSTILE))
    result = CliRunner().invoke(app, ["status", str(run)])
    assert result.exit_code == 0, result.output
    assert_shown(result.output, times=5)


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(app, [command, str(tmp_path)])
    assert str(done.exception) == (
        f"{tmp_path}: not a run folder, because it has no config.yaml; give the run_dir of a run"
    )
    missing = CliRunner().invoke(app, [command, str(tmp_path / "missing")])
    assert str(missing.exception) == f"{tmp_path}/missing: no such folder; give the run_dir of a run"
    (tmp_path / "mine" / "run").mkdir(parents=True)
    (tmp_path / "mine" / "run" / "config.yaml").write_text("")
    within = CliRunner().invoke(app, [command, str(tmp_path / "mine")])
    assert str(within.exception).endswith(f"give the run_dir of a run; did you mean {tmp_path}/mine/run?")
    (tmp_path / "slurm").mkdir()
    assert command == "status" or "running or killed" in CliRunner().invoke(app, ["why", str(tmp_path)]).output


@pytest.mark.parametrize("command", ["status", "why", "report", "export", "verify"])
@pytest.mark.parametrize("record", ["finetune.json", "best/finetune.json", "seed-1/finetune.json"])
def test_a_tuned_model_is_named_with_what_it_can_be_used_for(tmp_path: Path, command: str, record: str) -> None:
    file = tmp_path / "tuned" / record
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    message = str(CliRunner().invoke(app, [command, str(tmp_path / "tuned")]).exception)
    assert message.startswith(f"{tmp_path}/tuned: a tuned model, not a run; use it: electra-dist predict {tmp_path}")


def test_a_run_that_has_lost_its_config_is_told_how_to_write_it_again(run: Path):
    """A later start that was refused, as for another num_steps, is not taken for the first one."""
    shutil.rmtree(run / "slurm")
    (run / "config.yaml").unlink()
    fields = {"time": "2026-01-01T00:00:00+00:00", "start": "s", "node": "n7", "rank": 0, "error": "refused"}
    record_failure(run, 0, Failure(**fields, line="num_steps was 20, is 30"), {})

    message = str(CliRunner().invoke(app, ["status", str(run)]).exception)

    assert message.startswith(f"{run}: a run whose config.yaml is missing") and "electra-dist train CONFIG" in message
    assert str(CliRunner().invoke(app, ["verify", str(run)]).exception) == message


def test_lost_metrics_are_named_by_status_and_report(run: Path):
    ledger(run, event("checkpoint", 30, step=15))
    (run / "metrics.jsonl").unlink()
    done = CliRunner().invoke(app, ["report", str(run)])

    (line,) = [line for line in shown(run) if line.startswith("  step ")]
    assert line == "  step        15 of 20, loss not known, because metrics.jsonl is missing"
    assert done.exit_code == 0 and f"{run}/metrics.jsonl is missing" in done.stderr
    page = (run / "report.html").read_text()
    assert "Warning: metrics.jsonl is missing" in page and "last record of step 15" in page

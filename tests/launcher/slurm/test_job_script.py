"""Check what job.sh does on the first node of a job, with fake Slurm commands that fail or refuse."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Literal

import pytest
from electra_launcher.slurm.batch_script import JobOptions, Submission, batch_script
from support.small_disks import can_mount, small_disk

from electra_dist.config.load import load_config
from electra_dist.corpus.prepare.sbatch_environment import environment_of_submission

JOB = "7"
CONFIG = load_config(Path(__file__).parents[3] / "configs" / "large_25pct_mask.yaml")
# Each fake command appends its name and arguments to $CALLS. The file $FAILS/NAME holds how often the command NAME
# will still fail, or "always". The file $FAILS/nodes holds what sinfo prints, and $FAILS/end when the job ends. sbatch
# writes its environment to $FAILS/given.
FAKE = """#!/bin/bash
name=$(basename "$0")
echo "$name $*" >>"$CALLS"
[ "$name" != sbatch ] || env -0 >"$FAILS/given"
if [ "$1" = ping ]; then [ -e "$FAILS/controller" ] && { echo "is DOWN"; exit 1; }; echo "is UP"; exit 0; fi
[ "$name" != srun ] || [ ! -e "$FAILS/slow" ] || sleep 5
if [ -s "$FAILS/$name" ]; then
    left=$(cat "$FAILS/$name")
    [ "$left" != always ] || exit 1
    [ "$left" -gt 1 ] && echo $((left - 1)) >"$FAILS/$name" || rm "$FAILS/$name"
    exit 1
fi
case "$name $*" in
"scontrol show"*) tr , '\n' <<<"$3" ;;
sinfo*) cat "$FAILS/nodes" ;;
*EndTime*) cat "$FAILS/end" 2>/dev/null ;;
*PENDING*)
    [ -e "$FAILS/no-standby" ] || echo 8
    [ ! -e "$FAILS/preempted" ] || echo 7 ;;
esac
"""
# Replaces the Python interpreter. `job begin` exits with $BEGIN_CODE, and `job end` with $END_CODE. The n-th `job end`
# prints line n of $VERDICT, or the last line if there are fewer.
PYTHON = """#!/bin/bash
echo "python ${*:2}" >>"$CALLS"
case "$*" in
*"electra_launcher.slurm.job begin"*) exit "${BEGIN_CODE:-0}" ;;
*"electra_launcher.slurm.job end"*)
    awk -v count="$(grep -c 'job end' "$CALLS")" 'NR <= count { line = $0 } END { print line }' <<<"$VERDICT"
    exit "${END_CODE:-0}" ;;
esac
"""


@dataclasses.dataclass
class FakeSlurm:
    """Fake Slurm: a folder with fake commands, and the methods that run a batch script with them."""

    folder: Path  # bin/: the commands; fails/: which of them fail; run/: the run folder; calls: the calls so far

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def fail(self, command: str, times: int | Literal["always"] = 1) -> None:
        """Make the next calls of a command fail, or switch another fault on.

        Args:
            command: name of a command of Slurm; or "controller" (away), "slow" (srun takes 5 s), "no-standby" (no
                standby job waits) or "preempted" (this job waits in the queue, too).
            times: how many calls fail; "always" lasts until the test deletes the file fails/COMMAND.
        """
        (self.folder / "fails" / command).write_text(str(times))

    def calls(self, word: str = "") -> list[str]:
        """Return the command lines of all calls that contain `word`, oldest first, without `scontrol ping`."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if word in line and not line.endswith(" ping")]

    def start(
        self,
        verdict: str,
        chain: int = 0,
        *,
        begin_code: int = 0,
        end_code: int = 0,
        num_nodes: int = 1,
        spares: int = 0,
        **limits: int,
    ) -> subprocess.Popen[bytes]:
        """Start the batch script of a job on the nodes n1, n2 and so on, and return its process.

        Args:
            verdict: what `job end` prints, one line for each start of the ranks.
            chain: number of jobs of the chain; 0: no chain.
            begin_code: exit code of `job begin`.
            end_code: exit code of `job end`.
            num_nodes: nodes on which the ranks run.
            spares: spare nodes of the job.
            **limits: `patience_s`, `retry_s` or `least_job_s` of the script, in seconds.
        """
        submission = Submission(
            options=JobOptions(num_nodes=num_nodes, spare_nodes=spares, gpus_per_node=1, chain=chain),
            config=CONFIG.model_copy(update={"run_dir": str(self.run)}),
            command="electra-dist submit",
            work_dir=str(self.folder),
            python=str(self.folder / "bin" / "python"),
        )
        text = batch_script(submission)
        for name, seconds in {"patience_s": 900, "retry_s": 4, "least_job_s": 0, **limits}.items():
            old = {"patience_s": 900, "retry_s": 120, "least_job_s": 20}[name]
            assert f"{name}={old}" in text
            text = text.replace(f"{name}={old}", f"{name}={seconds}")
        script = self.folder / "script.sh"
        script.write_text(text)
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "FAILS": str(self.folder / "fails"),
            "VERDICT": verdict,
            "BEGIN_CODE": str(begin_code),
            "END_CODE": str(end_code),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NAME": "run-0123abcd",
            "SLURM_JOB_NODELIST": ",".join(f"n{number + 1}" for number in range(num_nodes + spares)),
            "SLURM_JOB_END_TIME": "9999999999",
            "SLURMD_NODENAME": "n1",
        }
        return subprocess.Popen(["bash", script], env=environment, stdout=subprocess.DEVNULL)

    def finish(self, verdict: str, chain: int = 0, **options: int) -> int:
        """Run the batch script of a job until it ends, and return its exit code; takes the arguments of `start`."""
        return self.start(verdict, chain, **options).wait(60)

    def given(self) -> dict[str, str]:
        """Return the environment variables that the newest call of sbatch was given."""
        entries = (self.folder / "fails" / "given").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)

    def log(self) -> str:
        """Return the content of the job's log."""
        return (self.run / "slurm" / f"job-{JOB}.log").read_text()


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """A folder with fake commands of Slurm and a fake Python interpreter; none of them fails yet."""
    for name in ("bin", "fails", "run"):
        (tmp_path / name).mkdir()
    for name in ("sbatch", "scontrol", "scancel", "sinfo", "squeue", "srun"):
        (tmp_path / "bin" / name).write_text(FAKE)
    (tmp_path / "bin" / "python").write_text(PYTHON)
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    return FakeSlurm(tmp_path)


STOPPED = "next|75||stopped on purpose at step 7"
CRASHED = "again|1||crash (n1 1)"
AWAY = "later|75||storage stayed full or away at step 7"


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        ("done|0||the target step is reached", 0),
        (STOPPED, 0),
        ("stop|75||stopped by file stop", 0),
        (AWAY, 0),
        (CRASHED, 1),
        ("stop|78||user error", 78),
        ("next|69|n1|n1 unhealthy", 69),
        ("", 1),
    ],
)
def test_a_stop_on_purpose_is_no_failure_in_the_accounting_and_everything_else_is(
    slurm: FakeSlurm, verdict: str, code: int
):
    assert slurm.finish(verdict) == code


@pytest.mark.parametrize(("verdict", "is_requeued"), [(STOPPED, True), (CRASHED, True), ("stop|78||error", False)])
def test_a_requeue_that_is_refused_at_first_is_repeated(slurm: FakeSlurm, verdict: str, is_requeued: bool):
    slurm.fail("srun")  # The script does not use srun's exit code.
    process = slurm.start(verdict)
    slurm.fail("scontrol", times=2)  # `show hostnames`, and one requeue
    process.wait(60)
    assert bool(slurm.calls("scontrol requeue 7")) == is_requeued
    if is_requeued:
        assert "cannot be requeued" not in slurm.log()


def test_a_requeue_that_stays_forbidden_leaves_the_run_to_the_standby_job(slurm: FakeSlurm):
    process = slurm.start(STOPPED, retry_s=2)
    slurm.fail("scontrol", times="always")
    assert process.wait(60) == 0
    assert len(slurm.calls("scontrol requeue 7")) >= 2
    assert "the standby job takes over" in slurm.log()
    assert not slurm.calls("scancel")


def test_a_requeue_is_repeated_for_as_long_as_the_controller_is_away(slurm: FakeSlurm):
    slurm.fail("controller")
    process = slurm.start(STOPPED, retry_s=1)
    slurm.fail("scontrol", times="always")
    time.sleep(5)  # several times as long as a command is repeated while the controller is up
    assert process.poll() is None
    for name in ("scontrol", "controller"):
        (slurm.folder / "fails" / name).unlink()
    assert process.wait(60) == 0
    assert "cannot be requeued" not in slurm.log()


def test_a_job_without_a_successor_in_the_queue_submits_a_standby_job(slurm: FakeSlurm):
    assert slurm.finish(STOPPED) == 0
    assert not slurm.calls("sbatch")
    slurm.fail("no-standby")
    assert slurm.finish(STOPPED) == 0
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.parametrize("chain", [0, 3])
def test_a_finished_run_cancels_the_jobs_that_wait(slurm: FakeSlurm, chain: int):
    assert slurm.finish("done|0||the target step is reached", chain) == 0
    assert slurm.calls("scancel") == ["scancel 8"]


@pytest.mark.parametrize(("chain", "cancelled"), [(0, ["scancel 8"]), (3, [])])
def test_a_cancelled_job_cancels_its_standby_job_but_neither_itself_nor_a_chain(
    slurm: FakeSlurm, chain: int, cancelled: list[str]
):
    """A preempted job receives the same signal as a cancelled one, and waits in the queue again."""
    slurm.fail("slow")
    slurm.fail("preempted")
    process = slurm.start("leave|75||the job was cancelled", chain)
    deadline = time.monotonic() + 30
    while not slurm.calls("srun") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert slurm.calls("scancel") == cancelled


def test_a_crashed_link_is_replaced_and_a_refused_replacement_is_left_to_the_next_link(slurm: FakeSlurm):
    assert slurm.finish(CRASHED, chain=3) == 1
    assert len(slurm.calls("sbatch")) == 1
    slurm.fail("sbatch", times="always")
    assert slurm.finish(CRASHED, chain=3, retry_s=2) == 1
    assert len(slurm.calls("sbatch")) >= 3
    assert "the next link takes over" in slurm.log()


def test_storage_that_stays_away_costs_no_link_and_the_others_wait_ten_minutes(slurm: FakeSlurm):
    assert slurm.finish(AWAY, chain=3) == 0
    assert "scontrol update JobId=8 StartTime=now+600" in slurm.calls()
    (replacement,) = slurm.calls("sbatch")
    assert "--begin=now+600" in replacement
    assert slurm.finish(AWAY) == 0
    assert "scontrol requeue 7" in slurm.calls()
    assert "scontrol update JobId=7 StartTime=now+600" in slurm.calls()


@pytest.mark.parametrize("option", ["begin_code", "end_code"])
def test_bookkeeping_that_ends_for_lack_of_storage_is_taken_for_an_outage(slurm: FakeSlurm, option: str):
    assert slurm.finish("", chain=3, **{option: 75}) == 0
    assert "--begin=now+600" in slurm.calls("sbatch")[0]
    assert "later: the run folder stayed full or away" in slurm.log()


def test_a_job_that_would_begin_another_run_starts_no_ranks_and_cancels_the_rest(slurm: FakeSlurm):
    assert slurm.finish("", chain=3, begin_code=78) == 78
    assert slurm.calls("scancel") == ["scancel 8"]
    assert not slurm.calls("srun")


def test_a_job_without_a_verdict_keeps_its_distance_to_the_next_one(slurm: FakeSlurm):
    begin = time.monotonic()
    assert slurm.finish("", chain=3, least_job_s=4) == 1
    assert time.monotonic() - begin >= 3.0


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount a file system")
def test_a_run_folder_that_is_read_only_when_a_job_begins_is_waited_for(slurm: FakeSlurm):
    with small_disk(slurm.run) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        process = slurm.start(STOPPED, chain=3)
        time.sleep(2)
        assert process.poll() is None
        assert not slurm.calls()
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert process.wait(60) == 0
        assert [call.split()[0] for call in slurm.calls("electra_launcher.slurm.job")] == ["python", "python"]
        assert "next: stopped on purpose" in slurm.log()


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount a file system")
def test_a_run_folder_that_stays_read_only_costs_no_link(slurm: FakeSlurm):
    with small_disk(slurm.run) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert slurm.finish(STOPPED, chain=3, patience_s=1) == 0
        assert [call.split()[0] for call in slurm.calls()] == ["squeue", "scontrol", "sbatch"]


def steps(slurm: FakeSlurm) -> list[str]:
    """Return, for each srun that has started ranks, the names of its nodes, separated by commas; oldest first."""
    calls = [call for call in slurm.calls("srun") if call.endswith(" node")]
    return [call.partition("--nodelist=")[2].split()[0] for call in calls]


@pytest.mark.parametrize(
    ("fault", "states"),
    [
        (CRASHED, "n1 allocated\nn2 down*\nn3 allocated\n"),
        ("next|69|n2|n2 unhealthy; the run continues on other nodes", "n1 allocated\nn2 allocated\nn3 allocated\n"),
    ],
)
def test_a_spare_node_takes_the_place_of_one_that_is_down_or_unhealthy_in_the_same_job(
    slurm: FakeSlurm, fault: str, states: str
):
    (slurm.folder / "fails" / "nodes").write_text(states)
    assert slurm.finish(f"{fault}\ndone|0||the target step is reached", num_nodes=2, spares=1) == 0
    assert steps(slurm) == ["n1,n2", "n1,n3"]
    for command in ("job begin", "job end"):
        sessions = [call.split("--session ")[1].split()[0] for call in slurm.calls(command)]
        assert sessions == ["job-7-0", "job-7-0-1"]
    begins = slurm.calls("job begin")
    assert [call.split("--nodes ")[1].split()[0] for call in begins] == ["n1,n2", "n1,n3"]
    assert slurm.calls("requeue") == slurm.calls("sbatch") == []


@pytest.mark.parametrize(
    ("verdict", "states", "spares"),
    [
        (CRASHED, "n1 allocated\nn2 allocated\nn3 allocated\n", 1),  # no node failed
        (CRASHED, "n1 allocated\nn2 down*\nn3 drained\n", 1),  # no spare is left
        (CRASHED, "n1 allocated\nn2 down*\n", 0),
        (STOPPED, "n1 allocated\nn2 down*\nn3 allocated\n", 1),
    ],
)
def test_without_a_failed_node_or_a_healthy_spare_the_job_ends_as_without_spares(
    slurm: FakeSlurm, verdict: str, states: str, spares: int
):
    (slurm.folder / "fails" / "nodes").write_text(states)
    slurm.finish(verdict, num_nodes=2, spares=spares)
    assert steps(slurm) == ["n1,n2"]
    assert len(slurm.calls(f"requeue {JOB}")) == 1


OF_THIS_JOB = {
    "SLURM_JOB_END_TIME": "1",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_ARRAY_TASK_ID": "3",
    "SBATCH_WAIT": "1",  # sbatch would wait for the end of the job that waits for this one
    "SBATCH_ARRAY_INX": "1-9",
    "SBATCH_SIGNAL": "USR2@5",
    "RANK": "7",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "n9",
    "CUDA_VISIBLE_DEVICES": "3",
    "ELECTRA_DIST_SUPERVISED": "/runs/other#0",
}
OF_THE_USER = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "vision", "WANDB_API_KEY": "it's\na key"}


@pytest.mark.parametrize(("verdict", "chain"), [(STOPPED, 0), (CRASHED, 3), (AWAY, 3)])
def test_a_job_that_another_one_submits_is_given_nothing_that_describes_the_other(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, verdict: str, chain: int
):
    for name, value in (OF_THIS_JOB | OF_THE_USER).items():
        monkeypatch.setenv(name, value)
    slurm.fail("no-standby")
    slurm.finish(verdict, chain)
    given = slurm.given()
    assert OF_THE_USER.items() <= given.items()
    assert given.keys() & OF_THIS_JOB.keys() == set()
    assert [name for name in given if name.startswith("SLURM") or name in ("session", "master_addr")] == ["SLURM_CONF"]
    assert given == environment_of_submission(given, ["time"])


def test_the_end_of_the_job_is_that_of_the_queue_and_not_that_of_an_earlier_job(slurm: FakeSlurm):
    (slurm.folder / "fails" / "end").write_text("4102444800          \n")
    slurm.finish(STOPPED)  # with SLURM_JOB_END_TIME=9999999999 in the environment
    (end,) = slurm.calls("job end")
    assert end.endswith("--end-time 4102444800")


def test_every_step_has_the_environment_of_the_script_whatever_the_site_exports(slurm: FakeSlurm):
    (slurm.folder / "fails" / "nodes").write_text("n1 allocated\nn2 allocated\n")
    slurm.fail("slow")
    slurm.finish(STOPPED, spares=1)
    calls = slurm.calls("srun")
    assert len(calls) == 2  # the ranks, and the watch of the first node
    assert all(call.startswith("srun --export=ALL ") for call in calls)

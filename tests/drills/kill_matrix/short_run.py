"""A short real run of 2 ranks whose starts are forked from this process, with everything in it that changes files.

The run has 12 steps and two checkpoint targets, a folder and an S3 service or Azurite. The last steps read a second
corpus, which start 1 begins and start 2 goes on with. Its parts, in order:

    start 1         saves a checkpoint, meets two spikes in a row, goes back to a checkpoint, and is preempted by
                    SIGTERM: it saves and ends with 75
    older attempt   a writer of the first attempt, which still runs although start 1 has replaced it by its return to
                    a checkpoint: it must be refused in both targets, and leaves files behind
    start 2         sweeps these, resumes, saves on request and at the end, and deletes old checkpoints

A part that is killed is started again with the same command until it ends as it should. The report at the end of a
start is left out: it is written from the records, after everything else, and takes longer than the training.

torch and DeepSpeed are imported once, in the process that forks; it must have no threads and no process group.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import electra_launcher.pretrain
import torch
from drills.forks import fork_ranks
from drills.kill_matrix.durable_operations import Kill, Operation, OperationLog
from drills.kill_matrix.remote_objects import Objects, objects_of
from support import checkpoints as small
from support.real_runs import write_tiny_config
from support.s3_server import S3Server

import electra_dist.store.cloud_store
import electra_dist.store.s3.s3_store
from electra_dist.checkpoint.commit import Fenced, retain
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig
from electra_dist.objectives.base import StepInput, StepOutput, Sums
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.run.folder import SAVE_FILE, read_identity
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

START_1, OLDER_ATTEMPT, START_2 = PHASES = ("start 1", "older attempt", "start 2")
RANKS = 2
NUM_STEPS = 12
SPIKES = (5, 6)
PREEMPTED_FROM_STEP = 6
SECOND_CORPUS_FROM_STEP = 7
SECOND_CORPUS = "second"  # name of its folder in that of the first one
SAVE_REQUESTED_AT_STEP = 8
DONE, STOPPED = 0, 75
PATIENCE_S = 120.0  # for one start
PART_BYTES = 50_000  # files of more bytes are uploaded in parts of so many

SETTINGS: dict[str, Any] = {
    "train.num_steps": NUM_STEPS,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "model.hidden_dropout": 0.1,
    "model.discriminator.num_layers": 1,
    "model.generator.num_layers": 1,
    "guard.window": 3,
    "guard.spike_sigma": 50.0,  # of a window of three losses
    "guard.max_in_a_row": len(SPIKES),
    "guard.skip_before": 1,
    "checkpoint.every_steps": 4,
    "checkpoint.keep_last": 1,
    "log.eval_every_steps": 8,
    "log.eval_rows": 4,
}


@dataclass(frozen=True)
class Trial:
    """The folder of one run, and the bucket with its objects."""

    folder: Path
    bucket: str
    server: S3Server

    @property
    def name(self) -> str:
        """Name of the folder, with which the keys of the run's objects begin."""
        return self.folder.name

    @property
    def watched(self) -> Path:
        """The folder in which the run writes: the run folder and the checkpoints."""
        return self.folder / "watched"

    @property
    def run_dir(self) -> Path:
        return self.watched / "run"

    @property
    def objects(self) -> Objects:
        return objects_of(self.bucket, self.server)

    def object_keys(self) -> list[str]:
        """Return the keys of the run's objects, sorted."""
        return self.objects.keys(f"{self.name}/")

    def targets(self) -> list[Store]:
        """Open the two checkpoint targets."""
        far = open_store(f"{self.bucket}/{self.name}/checkpoints", self.server.endpoint_url)
        return [open_store(str(self.watched / "checkpoints")), far]

    def write_config(self, corpus: str) -> Path:
        """Write the config of the run and return its file."""
        targets = [str(self.watched / "checkpoints"), f"{self.bucket}/{self.name}/checkpoints"]
        places: dict[str, Any] = {"checkpoint.targets": targets, "checkpoint.endpoint_url": self.server.endpoint_url}
        if "://" in corpus:
            places |= {"data.endpoint_url": self.server.endpoint_url, "data.heldout": f"{corpus}/heldout"}
        phase = {"corpus": f"{corpus}/{SECOND_CORPUS}", "from_step": SECOND_CORPUS_FROM_STEP}
        settings = {**SETTINGS, **places, "data.phases": [phase]}
        return write_tiny_config(self.folder / "run.yaml", self.run_dir, corpus, **settings)


@dataclass
class PhaseEnd:
    """How one attempt at a part of the run ended."""

    codes: list[int]  # exit code of each process; negative: the signal that killed it
    operations: list[Operation] = field(default_factory=list)  # only of processes that ended by themselves
    missed: list[str] = field(default_factory=list)  # changes of files that were not intercepted
    seconds: float = 0.0

    @property
    def was_killed(self) -> bool:
        """Whether the kill came."""
        return -signal.SIGKILL in self.codes


def run_phase(trial: Trial, corpus: str, phase: str, kill: Kill | None) -> PhaseEnd:
    """Run one part of the run once, with a kill or without, and return how it ended.

    If one process is killed, the others are killed as soon as that is noticed, as a launcher does.
    """
    begin = time.monotonic()
    config = trial.write_config(corpus)
    num_processes = 1 if phase == OLDER_ATTEMPT else RANKS

    def rank_main(rank: int) -> int:
        log = OperationLog(trial.watched, f"{trial.name}/", phase, rank, kill)
        try:
            if phase == OLDER_ATTEMPT:
                return save_as_older_attempt(trial)
            plan_events(trial.run_dir, is_preempted=phase == START_1 and rank == 0)
            return electra_launcher.pretrain.main(["--config", str(config)])
        finally:
            report = {"operations": log.operations, "missed": log.missed}
            unfinished = trial.folder / f"operations-{rank}.json.unfinished"  # this process may be killed meanwhile
            unfinished.write_text(json.dumps(report))
            unfinished.replace(trial.folder / f"operations-{rank}.json")

    for rank in range(num_processes):
        (trial.folder / f"operations-{rank}.json").unlink(missing_ok=True)
    codes = fork_ranks(rank_main, num_processes, trial.folder / "output.txt", PATIENCE_S, world_size=RANKS)
    end = PhaseEnd(codes, seconds=time.monotonic() - begin)
    for rank in range(num_processes):
        file = trial.folder / f"operations-{rank}.json"
        report = json.loads(file.read_text()) if file.exists() else {"operations": [], "missed": []}
        end.operations += [Operation(*fields) for fields in report["operations"]]
        end.missed += report["missed"]
    return end


def plan_events(run_dir: Path, is_preempted: bool) -> None:
    """Let this process meet the spikes, the request to save and, if `is_preempted`, SIGTERM at their steps."""
    forward = ReplacedTokenDetection.forward
    pending = [signal.SIGTERM] if is_preempted else []
    factors = torch.tensor([100.0 if "loss" in name else 1.0 for name in Sums._fields])

    def with_events(self: Any, step_input: StepInput) -> StepOutput:
        out = forward(self, step_input)
        if not self.training:
            return out
        if pending and step_input.step >= PREEMPTED_FROM_STEP:
            os.kill(os.getpid(), pending.pop())
        if step_input.step == SAVE_REQUESTED_AT_STEP and os.environ["RANK"] == "0":
            # By a shell, as a user does: it is no operation of the run.
            os.spawnlp(os.P_WAIT, "touch", "touch", str(run_dir / SAVE_FILE))
        if step_input.step in SPIKES:
            out = out._replace(loss=out.loss * 100.0, sums=out.sums * factors)
        return out

    ReplacedTokenDetection.forward = with_events  # type: ignore[method-assign]
    electra_launcher.pretrain._write_report = lambda run_dir: None
    use_small_parts()


def save_as_older_attempt(trial: Trial) -> int:
    """Try to save, commit and delete as the first attempt of the run; return 0 if everything was refused."""
    use_small_parts()
    targets = trial.targets()
    policy = CheckpointConfig(keep_last=1)
    digest = read_identity(trial.run_dir)["corpus_fingerprint"]
    state = small.state_at(NUM_STEPS - 1, attempt=1, world_size=1, corpus_fingerprint=digest)
    writer = CheckpointWriter(targets, 0, policy)
    writer.save(state, small.share(small.content(state.step), 0, 1))
    refusals: list[str] = []
    try:
        writer.close()
    except Fenced as refusal:
        refusals.append(str(refusal))
    for target in targets:
        try:
            retain(target, policy, 0, 1, {})
        except Fenced as refusal:
            refusals.append(str(refusal))
    print("\n".join(refusals))
    return DONE if len(refusals) == 1 + len(targets) else 1


def use_small_parts() -> None:
    """Let uploads of the small files of this run consist of parts."""
    for store in (electra_dist.store.s3.s3_store, electra_dist.store.cloud_store):
        store._MULTIPART_FROM = store.PART_BYTES = PART_BYTES


def expected_codes(phase: str) -> set[int]:
    """Return the exit codes with which an attempt at a part that is not killed may end."""
    return {STOPPED} if phase == START_1 else {DONE}


def copy_run(source: Trial, copy: Trial) -> None:
    """Copy the files and objects of a run, of which no process is running; the folder of the copy must not exist."""
    shutil.copytree(source.folder, copy.folder)
    for key in source.object_keys():
        source.objects.copy(key, copy.name + key.removeprefix(source.name))


def delete_run(trial: Trial) -> None:
    """Delete the files and the objects of a run, of which no process is running."""
    shutil.rmtree(trial.folder)
    trial.objects.delete(trial.object_keys())

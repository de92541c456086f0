"""Make the legs of the long drill: hit the run, train the uninterrupted run to the same step, compare both."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drills.faults.forked_run import ForkedDrill, run_uninterrupted
from drills.faults.kinds import ALL_FAULTS, FaultyService, PlannedFault, PlannedLeg
from drills.faults.progress import Leg, Progress
from drills.kill_matrix.short_run import fork
from support.fault_server import FaultPlan, FaultProxy
from support.real_runs import free_port, step_records, write_corpus, write_tiny_config
from support.s3_server import make_bucket, running_s3
from support.small_disks import small_disk

from electra_dist.checkpoint.checkpoint_manifest import committed
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_STOPPED
from electra_dist.store.local_store import LocalStore
from launcher.chaos.__main__ import compared_lines
from launcher.chaos.drill import Hit, Planned, Stuck

EVERY_STEPS = 4  # steps between two checkpoints of the run with faults
NUM_FIRST_STEPS = 20
_ROWS_PER_SHARD = [4 + number % 9 for number in range(80)]
_SPARE_STEPS = 1_000_000  # neither run reaches the last step of its config
_REFERENCE_LIMIT_S = 3600.0
_DISK_MB = 6
_CACHE_LIMIT_GB = 0.0003  # smaller than the corpus, so that shards are fetched again and again
_MOST_STUCK = 5  # faults after which the run made no progress or ended; then the drill gives up


@dataclass
class Campaign:
    """The two runs of the drill, and the folder in which they are."""

    progress: Progress
    bucket: str = ""  # s3://BUCKET of this start of the drill
    num_stuck: int = 0

    @property
    def folder(self) -> Path:
        return self.progress.folder

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def reference_dir(self) -> Path:
        return self.folder / "reference"

    def hit_leg(self, planned: PlannedLeg, faults: list[PlannedFault], leg: Leg, until: Callable[[], bool]) -> None:
        """Hit the run with the faults of a leg, one after another, then stop it and record the step.

        Args:
            planned: the leg.
            faults: those of its faults that are still to come.
            leg: where its last step is recorded.
            until: called after each fault; True ends the leg before its last fault.
        """
        with contextlib.ExitStack() as stack:
            overrides = self._place(planned, stack)
            has_stopped = False
            while not has_stopped:
                has_stopped = self._hit_until_stuck(planned, faults, leg, overrides, until)
        leg.last_step = newest_step(self.run_dir)
        self.progress.write()

    def _hit_until_stuck(
        self,
        planned: PlannedLeg,
        faults: list[PlannedFault],
        leg: Leg,
        overrides: list[str],
        until: Callable[[], bool],
    ) -> bool:
        """Start the run, hit it, and stop it; each fault is removed from `faults` when its result is recorded.

        Returns:
            Whether the run was stopped and has saved. False: it made no progress or ended unexpectedly after a fault,
            which is recorded as the result of that fault, and was killed.

        Raises:
            RuntimeError: that happened too often, or the run did not stop as it must.
        """
        command = [sys.executable, "-m", "launcher.supervise", "--config", str(self._config(self.run_dir))]
        command += ["--gpus-per-node", str(planned.ranks)]
        for override in overrides:
            command += ["--set", override]
        seed = self.progress.seed * 1_000_003 + len(self.progress.hits)
        disk = self.folder / "disk" if planned.place == "disk" else None
        run = ForkedDrill(self.run_dir, command, seed, ALL_FAULTS, leg.first_step, disk)
        try:
            base = leg.first_step
            while faults and not until():
                fault = faults[0]
                moment = Planned(kind=fault.kind, step=base + fault.steps, in_save=fault.in_save, delay=fault.delay)
                try:
                    hit = run.hit(moment)
                except Stuck as stuck:
                    hit = Hit(kind=fault.kind, step=run.step, what="", fault=f"stuck: {stuck}")
                    run.end_fault(fault.kind)
                    self.num_stuck += 1
                faults.pop(0)
                self.progress.add(hit)
                if hit.fault.startswith("stuck"):
                    if self.num_stuck > _MOST_STUCK:
                        raise RuntimeError(f"{self.num_stuck} faults got the run stuck; read {self.run_dir}.log")
                    return False
                base = run.step
            code = run.stop()
            if code != EXIT_STOPPED:
                raise RuntimeError(f"the run ended with exit code {code} at the end of a leg; read {self.run_dir}.log")
            return True
        finally:
            run.close()

    def compare_leg(self, leg: Leg) -> None:
        """Train the uninterrupted run to the last step of a leg with its number of ranks, and compare the leg."""
        assert leg.last_step is not None
        if newest_step(self.reference_dir) < leg.last_step:
            config = self._config(self.reference_dir, every_steps=_SPARE_STEPS)
            run_uninterrupted(config, [], leg.ranks, leg.last_step, _REFERENCE_LIMIT_S)
        found = _lines_of(self.run_dir, leg.first_step, leg.last_step)
        expected = _lines_of(self.reference_dir, leg.first_step, leg.last_step)
        assert len(expected) == leg.last_step - leg.first_step, (len(expected), leg)
        different = [(one, other) for one, other in zip(found, expected) if one != other]
        leg.different_steps = len(different) + abs(len(found) - len(expected))
        if different:
            leg.first_difference = f"{different[0][0]} instead of {different[0][1]}"
        self.progress.write()

    def _config(self, run_dir: Path, every_steps: int = EVERY_STEPS) -> Path:
        """Write the config of a run and return its file."""
        settings = {**run_settings(), "checkpoint.every_steps": every_steps}
        return write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, f"{self.folder}/corpus", **settings)

    def _place(self, planned: PlannedLeg, stack: contextlib.ExitStack) -> list[str]:
        """Return the overrides of the config that give the data of a leg their place; `stack` ends what that needs."""
        if planned.place == "local":
            return []
        first = self.run_dir / CHECKPOINTS_DIR
        if planned.place == "disk":
            disk = stack.enter_context(small_disk(self.folder / "disk", _DISK_MB))
            return [f"checkpoint.targets=[{first},{disk}/checkpoints]"]
        if not self.bucket:
            raise RuntimeError("a leg with S3 needs a service")
        FaultyService.set_plan(rate=0.0, faults=[])
        url = FaultyService.endpoint_url
        return [
            f"checkpoint.targets=[{first},{self.bucket}/leg-{len(self.progress.legs)}]",
            f"checkpoint.endpoint_url={url}",
            f"data.corpus={self.bucket}/corpus",
            f"data.endpoint_url={url}",
            f"data.cache_limit_gb={_CACHE_LIMIT_GB}",
        ]

    @contextlib.contextmanager
    def s3_service(self, kind: str) -> Iterator[None]:
        """Run an S3 service with the corpus, and the proxy in front of it, for the length of the block."""
        with running_s3(kind) as server:
            os.environ.update(server.env)
            self.bucket = make_bucket(*server, "faults")
            endpoint = server.endpoint_url
            output = self.folder / "s3.log"
            port = free_port()
            _run_fork(lambda: _write_corpus(f"{self.bucket}/corpus", endpoint), output)
            FaultyService.endpoint_url = f"http://127.0.0.1:{port}"
            proxy = fork(lambda: _serve_proxy(endpoint, port), output, {})
            try:
                _wait_for_proxy()
                yield
            finally:
                os.kill(proxy, 9)
                os.waitpid(proxy, 0)
                self.bucket = ""


def run_settings() -> dict[str, object]:
    """Return the settings that both runs of the drill share."""
    return {
        "train.num_steps": _SPARE_STEPS,
        "train.micro_batch": 4,
        "model.hidden_dropout": 0.1,
        "model.discriminator.num_layers": 1,
        "model.generator.num_layers": 1,
        "data.heldout": None,
        "log.report_every_minutes": 0.0,
        "cluster.hang_step_floor_s": 4.0,
        "cluster.hang_setup_s": 120.0,
        "cluster.hang_checkpoint_s": 60.0,
    }


def write_data(folder: Path) -> None:
    """Write the corpus of the drill into its folder, in a fork, because a store may start threads."""
    _run_fork(lambda: _write_corpus(f"{folder}/corpus", None), folder / "corpus.log")


def measure_first_losses(folder: Path) -> list[list[float]]:
    """Return loss and gradient norm of the first 20 steps of a run of 2 ranks on this CPU, made in an empty folder."""
    config = write_tiny_config(folder / "first.yaml", folder / "first", f"{folder}/corpus", **run_settings())
    run_uninterrupted(config, [], 2, NUM_FIRST_STEPS, _REFERENCE_LIMIT_S)
    return [[record["loss"], record["grad_norm"]] for record in step_records(folder / "first")]


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint in a run folder, 0 if there is none."""
    folder = run_dir / CHECKPOINTS_DIR
    return max((step for step, _, _ in committed(LocalStore(folder))), default=0) if folder.exists() else 0


def _lines_of(run_dir: Path, first_step: int, last_step: int) -> list[str]:
    """Return what is compared of the steps after `first_step` up to `last_step`, one line for each step."""
    return [line for line in compared_lines(run_dir) if first_step < json.loads(line)["step"] <= last_step]


def _write_corpus(url: str, endpoint: str | None) -> int:
    """Write the corpus of the drill; return 0, the exit code of the fork."""
    write_corpus(url, _ROWS_PER_SHARD, endpoint_url=endpoint)
    return 0


def _serve_proxy(upstream: str, port: int) -> int:
    """Serve the proxy in this process until it is killed."""
    with FaultProxy(upstream, FaultPlan(rate=0.0), port) as proxy:
        proxy.serve_forever()
    return 0


def _wait_for_proxy() -> None:
    """Wait until the proxy answers."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            FaultyService.num_hits()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _run_fork(act: Callable[[], int], output: Path) -> None:
    """Call a function in a fork and wait for its end."""
    _, status = os.waitpid(fork(act, output, {}), 0)
    if status:
        raise RuntimeError(f"a part of the drill failed: {output.read_text(errors='replace')[-3000:]}")

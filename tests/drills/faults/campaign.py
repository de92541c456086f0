"""Make the legs of the long drill: hit the run, train the uninterrupted run to the same step, and compare both.

A leg is a stretch of the run with a fixed number of ranks and a fixed place of the data (kinds.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drills.faults.forked_run import ForkedDrill, run_uninterrupted
from drills.faults.kinds import ALL_FAULTS, FaultyService, PlannedLeg
from drills.forks import fork, run_in_fork
from electra_launcher.chaos.__main__ import compared_lines
from electra_launcher.chaos.drill import Hit, Planned, Stuck
from support.checkpoints import committed
from support.fault_server import FaultPlan, FaultProxy
from support.real_runs import free_port, write_corpus, write_tiny_config
from support.s3_server import make_bucket, running_s3
from support.small_disks import small_disk

from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_STOPPED
from electra_dist.run.folder import SKIPPED_STEPS_FILE
from electra_dist.store.open_store import LocalStore

EVERY_STEPS = 4  # steps between two checkpoints of the run with faults
_ROWS_PER_SHARD = [4 + number % 9 for number in range(80)]  # of the drill's corpus
_SPARE_STEPS = 1_000_000  # train.num_steps of both runs, which neither reaches
_REFERENCE_LIMIT_S = 3600.0  # time limit of the uninterrupted run for one leg
_DISK_MB = 6  # size of the small disk
_CACHE_LIMIT_GB = 0.0003  # smaller than the corpus, so that shards are fetched again and again
_MOST_STUCK = 5  # If more faults leave the run stuck, the drill gives up.


@dataclass(kw_only=True)
class Leg:
    """A leg that was made: a stretch of the run with a fixed number of ranks and a fixed place of its data."""

    ranks: int
    place: str  # "local", "s3" or "disk", see kinds.py
    first_step: int  # steps done before the leg
    last_step: int = 0  # steps done at its end
    different_steps: int = 0  # steps that differ from the uninterrupted run
    first_difference: str = ""  # both values of the first of them


class Campaign:
    """The long drill: the run that is hit by faults, and the uninterrupted run with which it is compared.

    Call `make_leg` for each leg. Legs with the place "s3" need the block of `s3_service`.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        """Take the folder of all files of the drill, which exists."""
        self.folder = folder
        self.seed = seed
        self.run_dir = folder / "run"  # of the run that is hit by faults
        self.reference_dir = folder / "reference"  # of the uninterrupted run
        self.legs: list[Leg] = []
        self.hits: list[Hit] = []  # results of the faults
        self._begin = time.monotonic()
        self._bucket = ""  # URL s3://BUCKET while the block of `s3_service` is active
        self._num_stuck = 0  # faults that left the run stuck

    @property
    def seconds(self) -> float:
        """Time since the drill has begun."""
        return time.monotonic() - self._begin

    def write_data(self) -> None:
        """Write the corpus of the drill into its folder.

        A forked process does it, because a store may start threads, with which this process could not fork safely
        later.
        """
        run_in_fork(lambda: write_corpus(f"{self.folder}/corpus", _ROWS_PER_SHARD), self.folder / "corpus.log")

    def make_leg(self, planned: PlannedLeg, advance: Callable[[], None]) -> Leg:
        """Hit the run with the faults of a leg, and compare it; `advance` is called after each fault.

        If a fault leaves the run stuck (it makes no progress, or ends unexpectedly), the run is killed and started
        again, and hit by the faults that are left.
        """
        first_step = self.legs[-1].last_step if self.legs else 0
        leg = Leg(ranks=planned.ranks, place=planned.place, first_step=first_step)
        self.legs.append(leg)
        faults = list(planned.faults)
        with contextlib.ExitStack() as stack:
            overrides = self._prepare_place(planned, stack)
            while not self._hit_until_stuck(planned, faults, leg, overrides, advance):
                pass
        leg.last_step = newest_step(self.run_dir)
        self.compare_leg(leg)
        return leg

    def _hit_until_stuck(
        self,
        planned: PlannedLeg,
        faults: list[Planned],
        leg: Leg,
        overrides: list[str],
        advance: Callable[[], None],
    ) -> bool:
        """Start the run, hit it with faults until one leaves it stuck or no fault is left, and stop it.

        Each fault that was made is removed from `faults`, and its result is added to `hits`. Return False if one left
        the run stuck, which was then killed; a run that does not stop as it must is a RuntimeError.
        """
        command = [sys.executable, "-m", "electra_launcher.supervise", "--config", str(self._config(self.run_dir))]
        command += ["--gpus-per-node", str(planned.ranks)]
        for override in overrides:
            command += ["--set", override]
        seed = self.seed * 1_000_003 + len(self.hits)
        disk = self.folder / "disk" if planned.place == "disk" else None
        run = ForkedDrill(self.run_dir, command, seed, ALL_FAULTS, leg.first_step, disk)
        try:
            step_after_fault = leg.first_step
            while faults:
                hit, is_stuck = self._hit_once(run, faults[0], step_after_fault)
                faults.pop(0)
                self.hits.append(hit)
                advance()
                if is_stuck:
                    if self._num_stuck > _MOST_STUCK:
                        raise RuntimeError(f"{self._num_stuck} faults got the run stuck; read {self.run_dir}.log")
                    return False
                step_after_fault = run.step
            code = run.stop()
            if code != EXIT_STOPPED:
                raise RuntimeError(f"the run ended with exit code {code} at the end of a leg; read {self.run_dir}.log")
            return True
        finally:
            run.close()

    def _hit_once(self, run: ForkedDrill, fault: Planned, step_before: int) -> tuple[Hit, bool]:
        """Hit the run with one fault; return the result, and whether the run was stuck and was killed."""
        try:
            return run.hit(dataclasses.replace(fault, step=step_before + fault.step)), False
        except Stuck as stuck:
            hit = Hit(kind=fault.kind, step=run.step, what="", fault=f"stuck: {stuck}")
        run.end_fault(fault.kind)
        self._num_stuck += 1
        return hit, True

    def compare_leg(self, leg: Leg) -> None:
        """Train the uninterrupted run to the last step of a leg, and record the steps at which the two runs differ.

        The uninterrupted run has as many ranks in this leg as the run with faults.
        """
        if newest_step(self.reference_dir) < leg.last_step:
            config = self._config(self.reference_dir, every_steps=_SPARE_STEPS)
            run_uninterrupted(config, leg.ranks, leg.last_step, _REFERENCE_LIMIT_S)
        found = _lines_of(self.run_dir, leg.first_step, leg.last_step)
        expected = _lines_of(self.reference_dir, leg.first_step, leg.last_step)
        # The guard of the uninterrupted run may have refused the updates of some steps, which have no record then.
        num_skipped = _num_skipped_steps(self.reference_dir, leg.first_step, leg.last_step)
        assert len(expected) + num_skipped == leg.last_step - leg.first_step, (len(expected), num_skipped, leg)
        differences = [
            f"{found_line} instead of {expected_line}"
            for found_line, expected_line in zip(found, expected)
            if found_line != expected_line
        ]
        leg.different_steps = len(differences) + abs(len(found) - len(expected))
        if differences:
            leg.first_difference = differences[0]

    def _config(self, run_dir: Path, every_steps: int = EVERY_STEPS) -> Path:
        """Write the config of a run beside its folder, and return the path of the file."""
        settings = {**run_settings(), "checkpoint.every_steps": every_steps}
        return write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, f"{self.folder}/corpus", **settings)

    def _prepare_place(self, planned: PlannedLeg, stack: contextlib.ExitStack) -> list[str]:
        """Prepare the place of a leg's data, and return the overrides of config keys that make the run use it.

        "local" needs nothing, "disk" mounts the small disk, and "s3" resets the proxy of the S3 service.
        """
        if planned.place == "local":
            return []
        first = self.run_dir / CHECKPOINTS_DIR
        if planned.place == "disk":
            disk = stack.enter_context(small_disk(self.folder / "disk", _DISK_MB))
            return [f"checkpoint.targets=[{first},{disk}/checkpoints]"]
        if not self._bucket:
            raise RuntimeError("a leg with S3 needs a service")
        FaultyService.set_plan(rate=0.0, faults=[])
        url = FaultyService.endpoint_url
        return [
            f"checkpoint.targets=[{first},{self._bucket}/leg-{len(self.legs)}]",
            f"checkpoint.endpoint_url={url}",
            f"data.corpus={self._bucket}/corpus",
            f"data.endpoint_url={url}",
            f"data.cache_limit_gb={_CACHE_LIMIT_GB}",
        ]

    @contextlib.contextmanager
    def s3_service(self, kind: str) -> Iterator[None]:
        """Run an S3 service with the corpus in a bucket, and a faulty proxy in front of it, during a `with` block."""
        with running_s3(kind) as server:
            os.environ.update(server.env)
            self._bucket = make_bucket(*server, "faults")
            endpoint = server.endpoint_url
            output = self.folder / "s3.log"
            port = free_port()
            corpus = f"{self._bucket}/corpus"
            run_in_fork(lambda: write_corpus(corpus, _ROWS_PER_SHARD, endpoint_url=endpoint), output)
            FaultyService.endpoint_url = f"http://127.0.0.1:{port}"
            proxy = fork(lambda: _serve_proxy(endpoint, port), output, {})
            try:
                _wait_for_proxy()
                yield
            finally:
                os.kill(proxy, 9)
                os.waitpid(proxy, 0)
                self._bucket = ""


def run_settings() -> dict[str, object]:
    """Return the config keys and values that both runs of the drill share."""
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


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest committed checkpoint in a run folder; 0 if there is none."""
    folder = run_dir / CHECKPOINTS_DIR
    if not folder.exists():
        return 0
    return max((step for step, _attempt, _folder in committed(LocalStore(folder))), default=0)


def _lines_of(run_dir: Path, first_step: int, last_step: int) -> list[str]:
    """Return one line with loss, gradient norm and receipt for each step after `first_step` up to `last_step`."""
    return [line for line in compared_lines(run_dir) if first_step < json.loads(line)["step"] <= last_step]


def _num_skipped_steps(run_dir: Path, first_step: int, last_step: int) -> int:
    """Return how many of the steps after `first_step` up to `last_step` a run has skipped."""
    file = run_dir / SKIPPED_STEPS_FILE
    if not file.exists():
        return 0
    skipped: list[int] = json.loads(file.read_text())["steps"]
    return sum(first_step < step + 1 <= last_step for step in skipped)  # the file counts steps from 0


def _serve_proxy(upstream: str, port: int) -> int:
    """Serve the faulty proxy of an S3 service in this process until it is killed; it begins without faults."""
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

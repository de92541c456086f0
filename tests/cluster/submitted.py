"""A run that a test has submitted: what it noted, what its jobs printed, when its steps were."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from electra_launcher.slurm.batch_script import JobOptions
from electra_launcher.slurm.submit import check
from electra_launcher.slurm.submit import submit as submit_jobs
from machines import show, wait_for
from slurm import SlurmCluster

from electra_dist.run.ledger import JobBegan, JobEnded, JobSubmitted, LedgerEvent, read_jobs, read_ledger

FAKE_PYTHON = Path(__file__).parent / "fake_python"


@dataclass(frozen=True)
class SubmittedRun:
    """A run folder on a cluster."""

    cluster: SlurmCluster
    folder: Path
    jobs: list[str]

    def log(self) -> str:
        """What all its jobs printed."""
        return "\n".join(file.read_text(errors="replace") for file in sorted((self.folder / "slurm").glob("*.log")))

    def events(self, name: str) -> list[LedgerEvent]:
        """The ledger's events of one kind."""
        return [event for event in read_ledger(self.folder) if event.event == name]

    def verdicts(self) -> list[str]:
        """What became of each job that lived to say so."""
        return [record.verdict for record in read_jobs(self.folder) if isinstance(record, JobEnded)]

    def nodes(self) -> list[str]:
        """Where each start ran."""
        return [record.nodes for record in read_jobs(self.folder) if isinstance(record, JobBegan)]

    def queue(self) -> str:
        """Its jobs, with state and reason."""
        return self.cluster.slurm("squeue", "--noheader", "--format=%A %T %r")

    def wait(self, timeout_s: float) -> float:
        """Seconds until no job is left in the queue."""
        try:
            return wait_for(lambda: not self.queue(), timeout_s, "jobs are left")
        except TimeoutError as error:
            raise AssertionError(
                f"{error}: {self.queue()}\n{self.cluster.slurm('sinfo', '-N')}\n{self.log()}"
            ) from None

    def wait_for_checkpoint(self, step: int, timeout_s: float = 60) -> None:
        """Until a checkpoint of at least this step is committed."""
        wait_for(lambda: any(e.step >= step for e in self.events("checkpoint")), timeout_s, self.log)

    def status(self) -> str:
        """What `electra-dist status` says."""
        command = str(Path(sys.executable).parent / "electra-dist")
        return show([command, "status", str(self.folder)], self.cluster.environment)


def submit(cluster: SlurmCluster, config: Path, *options: str) -> SubmittedRun:
    """Submit as a person would."""
    command = [str(Path(sys.executable).parent / "electra-dist"), "submit", "--config", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return _run(cluster, config)


def submit_fake(cluster: SlurmCluster, config: Path, num_nodes: int = 2, **fields: Any) -> SubmittedRun:
    """Submit with fake_ranks.py in the place of the training."""
    return submit_with(cluster, config, FAKE_PYTHON, num_nodes, **fields)


def submit_with(cluster: SlurmCluster, config: Path, python: Path, num_nodes: int = 2, **fields: Any) -> SubmittedRun:
    """Submit a run whose jobs have another interpreter, which may replace the training."""
    settings = {"gpus_per_node": 0, "num_nodes": num_nodes, **fields}
    (submission,) = check(config, (), (), JobOptions(**settings), ["test"])
    submit_jobs(replace(submission, python=str(python)))
    return _run(cluster, config)


def _run(cluster: SlurmCluster, config: Path) -> SubmittedRun:
    folder = Path(yaml.safe_load(config.read_text())["run_dir"])
    submitted = [record for record in read_jobs(folder) if isinstance(record, JobSubmitted)]
    assert submitted, read_jobs(folder)
    return SubmittedRun(cluster, folder, submitted[-1].jobs)

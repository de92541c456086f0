"""Run the stages of a preparation by datatrove's executors: processes of this machine, or Slurm arrays.

Guarantee: a task that is completed is not repeated (datatrove's completion files), so a preparation that was
interrupted continues when the same command runs again. At most one process of a machine uses a work folder at a time.

How: on this machine the stages run one after another, in worker processes like those of a build (`workers.py`). On
Slurm each stage is an array job that depends on the job of the stage before; the command returns when all are
submitted.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dill
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from typing_extensions import override

from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.prepare.sbatch_environment import directive, environment_of_submission
from electra_dist.corpus.prepare.stages import Stage
from electra_dist.corpus.workers import WorkerKilled, WorkerPool
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import lock_file

_RUN_DIR = "run"  # of a stage: datatrove's completions, logs, statistics and job script
_LOCK_FILE = "lock"
_PROGRESS_INTERVAL_S = 0.5

Report = Callable[[str, int, int], None]  # name of a stage, completed tasks, all tasks


def run_here(config: PrepareConfig, stages: Sequence[Stage], report: Report) -> None:
    """Run all stages on this machine, and return when the last one is complete; `report` shows the progress.

    Raises UserError if a task raises it, for example for a damaged file, or if another process uses the work folder;
    WorkerKilled if a worker process was killed.
    """
    logger.remove()  # datatrove's messages are in the logs of the tasks
    with _only_process(Path(config.work)):
        for stage in stages:
            with _progress(config, stage, report):
                _run_locally(config, stage)


def submit(config: PrepareConfig, stages: Sequence[Stage]) -> dict[str, str]:
    """Submit a Slurm array for each stage that is not complete; return the job ids: name of the stage -> id.

    Raises NothingSubmitted if sbatch is missing or refuses the first job; UserError if sbatch refuses a later job.
    """
    if shutil.which("sbatch") is None:
        raise NothingSubmitted(
            "executor.kind slurm: there is no sbatch on this machine; run the command on a login node"
        )
    executors: list[SlurmPipelineExecutor] = []
    for stage in stages:
        executors.append(_slurm_executor(config, stage, executors[-1] if executors else None))
    logger.remove()
    try:
        with _environment_of_submission(executors[-1]):
            executors[-1].run()  # submits the jobs on which its own depends first
    except subprocess.CalledProcessError as error:
        has_job = any(executor.job_id not in (None, -1) for executor in executors)
        kind = UserError if has_job else NothingSubmitted
        raise kind(f"sbatch refused a job (exit code {error.returncode}); see its message above") from None
    job_ids = {stage.name: executor.job_id for stage, executor in zip(stages, executors, strict=True)}
    return {name: str(job_id) for name, job_id in job_ids.items() if job_id != -1}  # -1: the stage is complete


def completed_tasks(config: PrepareConfig, stage: Stage) -> int:
    """Return how many tasks of a stage are completed, by the marks that datatrove leaves in the work folder."""
    return len(_completions(config, stage))


def forget_completed(config: PrepareConfig, stage: Stage) -> None:
    """Delete the marks of the completed tasks of a stage, so that the next run repeats all of its tasks."""
    for path in _completions(config, stage):
        path.unlink()


def _completions(config: PrepareConfig, stage: Stage) -> list[Path]:
    """Return the files by which datatrove marks completed tasks; the name of each is the number of its task."""
    folder = run_folder(config, stage) / "completions"
    return [path for path in folder.glob("*") if path.name.isdecimal()]


def run_folder(config: PrepareConfig, stage: Stage) -> Path:
    """Return the folder in which datatrove keeps a stage's logs, marks of completed tasks and job script."""
    return Path(config.work) / stage.name / _RUN_DIR


class NothingSubmitted(UserError):
    """Error if Slurm has accepted no job. The preparation has not begun, so its work folder may be used again."""


def _run_locally(config: PrepareConfig, stage: Stage) -> None:
    """Run the tasks of a stage that are not completed in worker processes, and wait for all of them.

    If a task fails or a worker is killed, the other workers are killed; raises WorkerKilled for a killed one.
    """
    executor = LocalPipelineExecutor(stage.steps, tasks=stage.num_tasks, logging_dir=str(run_folder(config, stage)))
    tasks = executor.get_incomplete_ranks()
    if not tasks:
        return
    executor.save_executor_as_json()
    # Datatrove's own pool would wait forever for the task of a worker that was killed.
    num_workers = min(config.executor.workers or len(os.sched_getaffinity(0)), stage.num_tasks)
    start = functools.partial(_start_tasks, dill.dumps(executor))
    try:
        with WorkerPool(start, num_workers, preload=__name__, isolated=True) as pool:
            for _ in pool.results(tasks):
                pass
    except WorkerKilled:
        raise WorkerKilled(f"a task of {executor.logging_dir.path} was killed") from None


def _start_tasks(pickled: bytes) -> Callable[[int], None]:
    """Return the function with which a worker runs a task of `pickled`, an executor of datatrove, by its number."""
    # Otherwise the extractor's process would be the child of a further fork server, and outlive the worker.
    multiprocessing.set_start_method("fork", force=True)

    def run_task(rank: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            dill.loads(pickled)._run_for_rank(rank)  # each task with new steps

    return run_task


class _QuotingSlurmExecutor(SlurmPipelineExecutor):
    """Slurm executor of datatrove that quotes paths and options in job scripts; datatrove itself quotes neither."""

    @override
    def get_launch_file_contents(self, sbatch_args: dict[str, Any], run_script: str) -> str:
        folder = str(self.logging_dir.path)
        options = {}
        for name, value in sbatch_args.items():
            # Slurm replaces %A and the like in the name of a log.
            text = str(value).replace(folder, folder.replace("%", "%%"))
            options[name] = directive(text) if text else ""
        contents: str = super().get_launch_file_contents(options, run_script.replace(folder, shlex.quote(folder)))
        return contents


@contextlib.contextmanager
def _environment_of_submission(executor: SlurmPipelineExecutor) -> Iterator[None]:
    """Hide the environment variables that a new job must not inherit from this process, while the block runs."""
    given = dict(os.environ)
    kept = environment_of_submission(given, executor.get_sbatch_args())
    for name in given.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(given)


def _slurm_executor(
    config: PrepareConfig, stage: Stage, depends: SlurmPipelineExecutor | None
) -> SlurmPipelineExecutor:
    """Return datatrove's executor that runs a stage as a Slurm array, after the stage `depends` if there is one."""
    settings = config.executor.slurm
    assert settings is not None
    # The tasks use this Python; launch_pickled_pipeline is a command beside it.
    setup = [f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"', *settings.setup.splitlines()]
    return _QuotingSlurmExecutor(
        stage.steps,
        tasks=stage.num_tasks,
        time=settings.time,
        partition=settings.partition,
        cpus_per_task=settings.cpus_per_task,
        mem_per_cpu_gb=settings.mem_per_cpu_gb,
        workers=config.executor.workers or -1,
        job_name=f"prepare-{stage.name}",
        qos=settings.qos,
        env_command="\n".join(setup),
        # A job whose dependency failed would wait in the queue forever.
        sbatch_args={"kill-on-invalid-dep": "yes", **settings.options},
        max_array_size=settings.max_array_size,
        depends=depends,
        logging_dir=str(run_folder(config, stage)),
        mail_user=None,
        srun_args={"export": "ALL"},  # srun would obey the --export of sbatch
    )


@contextlib.contextmanager
def _only_process(work: Path) -> Iterator[None]:
    """Lock a work folder while the block runs; raise UserError if another process of this machine has locked it."""
    with (work / _LOCK_FILE).open("ab") as stream:
        try:
            lock_file(stream, wait=False)
        except BlockingIOError:
            raise UserError(
                f"{work}: another preparation uses this folder; wait for it, or set another `work`"
            ) from None
        yield


@contextlib.contextmanager
def _progress(config: PrepareConfig, stage: Stage, report: Report) -> Iterator[None]:
    """Call `report` with the completed tasks of a stage twice a second while the block runs, and at its end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_PROGRESS_INTERVAL_S):
            report(stage.name, completed_tasks(config, stage), stage.num_tasks)

    report(stage.name, completed_tasks(config, stage), stage.num_tasks)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    report(stage.name, completed_tasks(config, stage), stage.num_tasks)

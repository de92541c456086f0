"""Begin, continue and report a preparation, in processes of this machine or as Slurm arrays: `corpus prepare`.

Guarantee: everything that can be refused is refused before the first task: unknown keys, missing files of sources,
models and lists, labels that a model lacks, a missing package, an output or a work folder of another preparation.
Nothing is downloaded. A task that is completed is not repeated (datatrove's completion files), so a preparation that
was interrupted continues when the same command runs again. At most one process of a machine uses a work folder at a
time.

How: on this machine the stages run one after another, in worker processes like those of a build (`workers.py`). On
Slurm each stage is an array job that depends on the job of the stage before; the command returns when all are
submitted.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dill
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from typing_extensions import override

from electra_dist.corpus.evaluation_texts import EvaluationTexts, read_evaluation_texts
from electra_dist.corpus.inputs.find_inputs import paths_of_input
from electra_dist.corpus.prepare.document_files import DOCUMENTS_DIR, file_of_task
from electra_dist.corpus.prepare.filter_steps import EVALUATION_KEY, check_labels
from electra_dist.corpus.prepare.prepare_config import PrepareConfig, local_files
from electra_dist.corpus.prepare.prepare_report import REPORT, REPORT_FILE, PrepareReport
from electra_dist.corpus.prepare.sbatch_environment import directive, environment_of_submission
from electra_dist.corpus.prepare.source_plan import PLAN_FILE, SourcePlan, make_plan, write_plan
from electra_dist.corpus.prepare.stages import Stage, make_stages
from electra_dist.corpus.workers import WorkerKilled, WorkerPool
from electra_dist.errors import StoreError, UserError
from electra_dist.store.atomic_files import lock_file, make_folder
from electra_dist.store.interface import Store
from electra_dist.store.json_file import find_document, first_difference
from electra_dist.store.open_store import open_store

_RUN_DIR = "run"  # of a stage: datatrove's completions, logs, statistics and job script
_LOCK_FILE = "lock"
_PROGRESS_INTERVAL_S = 0.5
# Key of a file -> what it is, and where it comes from.
_HOW_TO_GET = {
    "filters.language.model": "download lid.176.bin (https://fasttext.cc/docs/en/language-identification.html)",
    "filters.c4_bad_words.list": "download the list of the language "
    "(https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words)",
    "filters.classifier.model": "train or download a fastText model",
}

Report = Callable[[str, int, int], None]  # name of a stage, completed tasks, all tasks


class Preparation(NamedTuple):
    """A run of `corpus prepare` that passed all checks: its config, its files for each task, and its stages."""

    config: PrepareConfig
    plan: SourcePlan
    stages: list[Stage]
    evaluation: EvaluationTexts | None  # what `filters.decontamination` looks for


def check(config: PrepareConfig) -> Preparation:
    """Check everything that a run of `corpus prepare` needs, and return its plan and stages; write nothing.

    Raises UserError if a file or a package is missing, a model lacks a label, or the output or work folder is in a
    source.
    """
    for key, path in local_files(config).items():
        if not path.is_file():
            advice = _HOW_TO_GET.get(key, "write it, one entry a line")
            raise UserError(f"{key}: there is no file {path}; {advice} and set {key} to its path")
    if config.words == "spacy" and importlib.util.find_spec("spacy") is None:
        raise UserError("words: spacy: the package spacy is not installed; pip install spacy, or set words: plain")
    filters = config.filters
    if filters.language is not None:
        check_labels("filters.language.languages", filters.language.languages, filters.language.model)
    if filters.classifier is not None:
        check_labels("filters.classifier.keep", filters.classifier.keep, filters.classifier.model)
    _refuse_folders_in_sources(config)
    plan = make_plan(config)
    sought = config.filters.decontamination
    evaluation = None
    if sought is not None:
        evaluation = read_evaluation_texts(sought.files, sought.min_words, EVALUATION_KEY)
    return Preparation(config, plan, make_stages(config), evaluation)


def run(preparation: Preparation, report: Report) -> None:
    """Run on this machine the tasks that are not completed; return when prepare.json is written.

    `report` shows the progress. If a new preparation fails before it has completed a task, its plan.json is deleted,
    so that a corrected config may use the same work folder. Raises UserError if the work folder holds another
    preparation or another process uses it, or if a task raises it, for example for a damaged file; WorkerKilled if a
    worker process was killed.
    """
    config = preparation.config
    is_new = _begin(preparation)
    try:
        logger.remove()  # datatrove's messages are in the logs of the tasks
        with _only_process(Path(config.work)):
            for stage in preparation.stages:
                with _progress(config, stage, report):
                    _run_locally(config, stage)
    except StoreError:
        raise
    except (UserError, KeyboardInterrupt):
        has_result = any(completed_tasks(config, stage) for stage in preparation.stages)
        if is_new and not has_result:
            _give_up(preparation)
        raise


def submit_to_slurm(preparation: Preparation) -> dict[str, str]:
    """Submit the stages that are not complete to Slurm; return the job ids: name of the stage -> id."""
    is_new = _begin(preparation)
    try:
        return _submit(preparation.config, preparation.stages)
    except NothingSubmitted:
        if is_new:
            _give_up(preparation)
        raise


def finished_report(preparation: Preparation) -> PrepareReport | None:
    """Return the content of prepare.json if the preparation is complete; None if it is not.

    Raises UserError if prepare.json is damaged, or belongs to another preparation or to other files.
    """
    config = preparation.config
    store = open_store(config.output, config.endpoint_url)
    next_step = "delete it and run the same command again, or set another `output`"
    report = find_document((store, REPORT_FILE), REPORT, next_step)
    if report is None:
        return None
    # A key that is missing in the report counts as null: the release that wrote it may not have had that key.
    difference = first_difference(report["config"], json.loads(json.dumps(preparation.plan.identity)))
    if difference is not None:
        raise UserError(
            f"{store.url}/{REPORT_FILE}: is the result of another preparation ({difference.key} was "
            f"{json.dumps(difference.old)}, is {json.dumps(difference.new)}); set another `output`, or delete the "
            f"files in this folder"
        )
    for name, counts in report["sources"].items():
        sizes = [file.size for file in preparation.plan.files if file.source == name]
        if (len(sizes), sum(sizes)) != (counts["files"], counts["bytes"]):
            raise UserError(
                f"{store.url}/{REPORT_FILE}: is the result of other files of the source {name} "
                f"({counts['bytes']:,} bytes in {counts['files']:,}, now {sum(sizes):,} in {len(sizes):,}); set "
                "another `output` and `work`"
            )
    return report


def tasks_left(preparation: Preparation) -> dict[str, int]:
    """Return how many tasks of each stage are not completed: name of the stage -> number."""
    config = preparation.config
    return {stage.name: stage.num_tasks - completed_tasks(config, stage) for stage in preparation.stages}


def _submit(config: PrepareConfig, stages: Sequence[Stage]) -> dict[str, str]:
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


def _begin(preparation: Preparation) -> bool:
    """Make the work folder and write plan.json; return whether there was none, so that the preparation is new.

    If prepare.json is missing, the last stage, which writes it, is made to run again. Raises UserError if the work
    folder holds another preparation, or the output has files of one.
    """
    work = Path(preparation.config.work)
    output = open_store(preparation.config.output, preparation.config.endpoint_url)
    last_stage = preparation.stages[-1]
    is_new = not (work / PLAN_FILE).exists()
    if is_new:
        _refuse_documents_of_others(output, last_stage.num_tasks)
    make_folder(work)
    write_plan(preparation.plan, work)  # raises an error if the work folder has another plan
    if not output.exists(REPORT_FILE):
        forget_completed(preparation.config, last_stage)
    return is_new


def _give_up(preparation: Preparation) -> None:
    """Delete plan.json, so that another preparation may use the work folder."""
    (Path(preparation.config.work) / PLAN_FILE).unlink(missing_ok=True)


def _refuse_documents_of_others(output: Store, num_tasks: int) -> None:
    """Raise UserError if the output of a new preparation already has files that its tasks would replace."""
    present = set(output.list(f"{DOCUMENTS_DIR}/"))
    for rank in range(num_tasks):
        key = f"{DOCUMENTS_DIR}/{file_of_task(rank)}"
        if key in present:
            raise UserError(
                f"{output.url}/{key}: exists, but this preparation has not written it; set another `output`, or "
                f"delete {DOCUMENTS_DIR}/ there"
            )


def _refuse_folders_in_sources(config: PrepareConfig) -> None:
    """Raise UserError if the output or work folder is inside a source, because its files would be read as text."""
    for source in config.sources:
        for key, folder in (("output", config.output), ("work", config.work)):
            if any(_is_inside(folder, path) for path in paths_of_input(source.path)):
                raise UserError(
                    f"{key}: {folder} is inside the source {source.name} ({source.path}); choose a folder outside"
                )


def _is_inside(folder: str, source: str) -> bool:
    """Return whether a folder is a source's path or inside it; for a glob pattern, inside a path that it matches."""
    if "://" in source or "://" in folder:
        return f"{folder.rstrip('/')}/".startswith(f"{source.rstrip('/')}/")
    path, root = Path(folder).resolve(), Path(source).resolve()
    return any(place == root or fnmatch.fnmatchcase(str(place), str(root)) for place in (path, *path.parents))

"""Begin, continue and report a preparation: what `electra-dist corpus prepare` does.

Guarantee: everything that can be refused is refused before the first task: unknown keys, missing files of sources,
models and lists, labels that a model lacks, a missing package, an output or a work folder of another preparation.
Nothing is downloaded.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

from electra_dist.corpus.evaluation_texts import EvaluationTexts, read_evaluation_texts
from electra_dist.corpus.inputs.find_inputs import paths_of_input
from electra_dist.corpus.prepare.document_files import DOCUMENTS_DIR, file_of_task
from electra_dist.corpus.prepare.executors import (
    NothingSubmitted,
    Report,
    completed_tasks,
    forget_completed,
    run_here,
    submit,
)
from electra_dist.corpus.prepare.filter_steps import EVALUATION_KEY, check_labels
from electra_dist.corpus.prepare.prepare_config import PrepareConfig, local_files
from electra_dist.corpus.prepare.prepare_report import REPORT, REPORT_FILE, PrepareReport
from electra_dist.corpus.prepare.source_plan import PLAN_FILE, SourcePlan, make_plan, write_plan
from electra_dist.corpus.prepare.stages import Stage, make_stages
from electra_dist.errors import StoreError, UserError
from electra_dist.store.atomic_files import make_folder
from electra_dist.store.interface import Store
from electra_dist.store.json_file import find_document, first_difference
from electra_dist.store.open_store import open_store

# Key of a file -> what it is, and where it comes from.
_HOW_TO_GET = {
    "filters.language.model": "download lid.176.bin (https://fasttext.cc/docs/en/language-identification.html)",
    "filters.c4_bad_words.list": "download the list of the language "
    "(https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words)",
    "filters.classifier.model": "train or download a fastText model",
}


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

    If a new preparation fails before it has completed a task, its plan.json is deleted, so that a corrected config may
    use the same work folder. Raises UserError if the work folder holds another preparation, or if a task raises it,
    for example for a damaged file; WorkerKilled if a worker process was killed.
    """
    is_new = _begin(preparation)
    try:
        run_here(preparation.config, preparation.stages, report)
    except StoreError:
        raise
    except (UserError, KeyboardInterrupt):
        has_result = any(completed_tasks(preparation.config, stage) for stage in preparation.stages)
        if is_new and not has_result:
            _give_up(preparation)
        raise


def submit_to_slurm(preparation: Preparation) -> dict[str, str]:
    """Submit the stages that are not complete to Slurm; return the job ids: name of the stage -> id."""
    is_new = _begin(preparation)
    try:
        return submit(preparation.config, preparation.stages)
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

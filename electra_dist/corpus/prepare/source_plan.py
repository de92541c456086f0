"""Find the files of all sources and divide them among tasks; keep the result in plan.json of the work folder.

Guarantee: a preparation that is started again reads the same files in the same tasks. A work folder of another
preparation (other steps, thresholds, files or number of tasks) is refused, with the first difference.
"""

from __future__ import annotations

import glob
import heapq
import importlib.metadata
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, TypeAdapter

from electra_dist.corpus.inputs.find_inputs import InputFile, search_inputs
from electra_dist.corpus.prepare.prepare_config import PrepareConfig, SourceSection
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import first_difference, read_document

PLAN_FILE = "plan.json"
_FORMAT = 1
# Keys that do not change what is prepared; of executor only `tasks` does.
_PLACES = {"output", "work", "endpoint_url", "executor"}
_LIBRARIES = ("datatrove", "trafilatura")


class SourcePlan(NamedTuple):
    """Content of plan.json: all input files of a preparation, and which task reads which of them."""

    output: str  # folder or s3:// URL into which the tasks of the last stage write
    identity: dict[str, Any]  # what decides the result, beside the files: the config and the versions of libraries
    files: list[InputFile]  # the source of each is the name of its source in the config
    tasks: list[list[int]]  # for each task the indices of its files, in the order in which it reads them
    inputs_skipped: dict[str, dict[str, dict[str, int]]]  # source -> reason -> ending -> number of inputs left out

    def files_of_task(self, rank: int) -> list[InputFile]:
        """Return the files of a task in reading order."""
        return [self.files[index] for index in self.tasks[rank]]


def _without_format(tree: object) -> object:
    return {key: value for key, value in tree.items() if key != "format"} if isinstance(tree, dict) else tree


_PLAN = TypeAdapter(Annotated[SourcePlan, BeforeValidator(_without_format)])


def make_plan(config: PrepareConfig) -> SourcePlan:
    """Find the files of all sources, and divide them among the tasks so that each has about the same bytes.

    Raises UserError if a source has no files.
    """
    files: list[InputFile] = []
    inputs_skipped: dict[str, dict[str, dict[str, int]]] = {}
    for source in config.sources:
        found, inputs_skipped[source.name] = _files_of_source(source, config.endpoint_url)
        files += found
    return SourcePlan(config.output, _identity(config), files, _divide(files, config.executor.tasks), inputs_skipped)


def _files_of_source(
    source: SourceSection, endpoint_url: str | None
) -> tuple[list[InputFile], dict[str, dict[str, int]]]:
    """Return a source's files in reading order, and counts of what is left out: reason -> ending -> number."""
    paths = [source.path]
    is_glob = glob.has_magic(source.path) and "://" not in source.path and not Path(source.path).exists()
    if is_glob:
        paths = sorted(glob.glob(source.path, recursive=True))
        if not paths:
            raise UserError(f"sources: {source.name}: no file matches {source.path}; correct the path")
    try:
        found = search_inputs(paths, endpoint_url, with_pages=True)
    except UserError as error:
        raise UserError(str(error).replace("--input ", f"sources: {source.name}: ", 1)) from None
    files = []
    for file in found.files:
        location = file.location if file.is_remote else str(Path(file.location).resolve())
        files.append(InputFile(file.name, location, file.format, file.size, source.name, version=file.version))
    return files, found.skipped.skipped_by_reason()


def _divide(files: list[InputFile], num_tasks: int) -> list[list[int]]:
    """Give each file, largest first, to the task with the fewest bytes so far; return each task's file indices."""
    tasks: list[list[int]] = [[] for _ in range(num_tasks)]
    loads = [(0, rank) for rank in range(num_tasks)]  # a heap of (bytes, task)
    for index in sorted(range(len(files)), key=lambda index: (-files[index].size, index)):
        load, rank = heapq.heappop(loads)
        tasks[rank].append(index)
        heapq.heappush(loads, (load + files[index].size, rank))
    return [sorted(indices) for indices in tasks]


def _identity(config: PrepareConfig) -> dict[str, Any]:
    """Return what decides the result: the config without folders and machines, and the versions of the libraries."""
    identity = config.model_dump(mode="json", exclude=_PLACES)
    identity["executor"] = {"tasks": config.executor.tasks}
    identity["versions"] = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return identity


def write_plan(plan: SourcePlan, work: Path) -> None:
    """Write plan.json into the work folder, or check the plan that is there; raise UserError if it is another one."""
    path = work / PLAN_FILE
    if path.exists():
        _refuse_other_plan(read_plan(work), plan, path)
        return
    with replacing(path) as out:
        out.write(json.dumps({"format": _FORMAT, **plan._asdict()}).encode())


def read_plan(work: Path) -> SourcePlan:
    """Return the plan of a preparation from its work folder; raise UserError if plan.json is missing or damaged."""
    return read_document(work / PLAN_FILE, _PLAN, f"delete {work} and prepare again")


def _refuse_other_plan(stored: SourcePlan, plan: SourcePlan, path: Path) -> None:
    """Raise UserError, which names the first difference, if the plan stored at `path` is not `plan`."""
    advice = f"set another `work`, or delete {path.parent} and prepare again"
    difference = first_difference(
        {"output": stored.output, **stored.identity}, {"output": plan.output, **plan.identity}
    )
    if difference is not None:
        raise UserError(
            f"{path}: holds a preparation with {difference.key} {difference.old!r}, not {difference.new!r}; {advice}"
        )
    for stored_file, file in zip(stored.files, plan.files, strict=False):
        if stored_file != file:
            raise UserError(f"{path}: holds a preparation of other files (first: {file.location}); {advice}")
    if len(stored.files) != len(plan.files):
        raise UserError(
            f"{path}: holds a preparation of {len(stored.files)} files, and the sources have {len(plan.files)} now; "
            f"{advice}"
        )
    if stored.tasks != plan.tasks:
        raise UserError(f"{path}: damaged, because its files are divided among the tasks in another way; {advice}")

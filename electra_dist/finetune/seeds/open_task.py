"""Open a fine-tuning task by its name on the command line, in this process or in another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from electra_dist.errors import UserError
from electra_dist.finetune.squad.squad_task import SquadTask
from electra_dist.finetune.tagging.tagging_task import TaggingTask
from electra_dist.finetune.task import Task
from electra_dist.finetune.texts.text_specs import GLUE, TextSpec
from electra_dist.finetune.texts.text_task import TextTask

_SQUAD_VERSIONS = {"squad1": 1, "squad2": 2}
_TAGGING = ("ner", "tagging")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """What `open_task` needs: name of a task, folder of its data, columns. Hashable, and can be sent to a process."""

    name: str  # name of a GLUE task, squad1, squad2, ner, tagging or custom
    data: Path  # folder of the data
    text_a: str | None = None  # column of the text; the columns and `kind` are used by the task `custom` only
    text_b: str | None = None  # column of the second text; None for single texts
    label: str | None = None  # column of the label
    kind: Literal["classification", "regression"] = "classification"
    with_test: bool = False  # whether to read the test sets, too, so that predictions for them are written


def open_task(request: TaskRequest) -> Task:
    """Read the data of a task and return the task; raise UserError if the name is unknown or the data are invalid."""
    name = request.name
    if name in GLUE:
        return TextTask(GLUE[name], request.data, with_test=request.with_test)
    if name in _SQUAD_VERSIONS:
        return SquadTask(_SQUAD_VERSIONS[name], request.data)
    if name in _TAGGING:
        return TaggingTask(name, request.data)
    if name != "custom":
        known_names = ", ".join([*GLUE, *_SQUAD_VERSIONS, *_TAGGING, "custom"])
        raise UserError(f"--task {name}: unknown; choose one of {known_names}")
    if request.text_a is None or request.label is None:
        raise UserError(
            "--task custom: the columns are missing; add --text-a COLUMN and --label COLUMN (and --text-b for pairs)"
        )
    spec = TextSpec(
        name="custom",
        text_a=request.text_a,
        text_b=request.text_b,
        label=request.label,
        kind=request.kind,
        metric="accuracy" if request.kind == "classification" else "spearman",
    )
    return TextTask(spec, request.data, with_test=request.with_test)

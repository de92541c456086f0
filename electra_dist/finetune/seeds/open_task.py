"""Open a task by its name: for a fine-tuning command, for another process of it, or for a comparison."""

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

    name: str  # name of a GLUE task, squad1, squad2, ner or tagging; any other is the name of a custom task
    data: Path  # folder of the data
    text_a: str | None = None  # column of the text; the columns and `kind` are used by a custom task only
    text_b: str | None = None  # column of the second text; None for single texts
    label: str | None = None  # column of the label
    kind: Literal["classification", "regression"] = "classification"
    max_train: int | None = None  # number of training examples of a task on texts, a fixed sample; None: all
    with_test: bool = False  # whether to read the test sets, too, so that predictions for them are written


def open_task(request: TaskRequest) -> Task:
    """Read the data of a task and return the task; raise UserError if the name is unknown or the data are invalid."""
    name = request.name
    if name in _SQUAD_VERSIONS:
        return SquadTask(_SQUAD_VERSIONS[name], request.data)
    if name in _TAGGING:
        return TaggingTask(name, request.data)
    spec = GLUE[name] if name in GLUE else _custom_spec(request)
    return TextTask(spec, request.data, request.max_train, request.with_test)


def _custom_spec(request: TaskRequest) -> TextSpec:
    """Describe a task on a user's texts by the columns of the request; raise UserError if it names none."""
    if request.text_a is None or request.label is None:
        raise UserError(
            f"{request.name}: none of the tasks {', '.join([*GLUE, *_SQUAD_VERSIONS, *_TAGGING])}, and a custom task "
            f"needs columns; correct the name, or give the columns `text_a` and `label` (--text-a COLUMN and --label "
            f"COLUMN), and `text_b` for pairs"
        )
    return TextSpec(
        name=request.name,
        text_a=request.text_a,
        text_b=request.text_b,
        label=request.label,
        kind=request.kind,
        metric="accuracy" if request.kind == "classification" else "spearman",
    )

"""Open the tasks of fine-tuning by their names.

Guarantee: nothing here imports torch or transformers, so a wrong file or column is found at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from electra_dist.errors import UserError
from electra_dist.finetune.labelled_texts import GLUE, TextSpec
from electra_dist.finetune.retrieval_task import PAIRS, RetrievalTask
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.task import Task
from electra_dist.finetune.text_task import TextTask

_SQUAD_VERSIONS = {"squad1": 1, "squad2": 2}
_TAGGING = ("ner", "tagging")
CUSTOM = "custom"  # task on the user's own texts
_OF_TABLE = ("text_a", "text_b", "label", "kind", "dev", "delimiter")  # fields that describe the user's own table
_OF_SPLIT = ("dev_share", "split_seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """What `open_task` needs: name of a task, its data, columns. Hashable, and can be sent to a process."""

    name: str  # name of a GLUE task, squad1, squad2, ner, tagging or pairs; any other is the name of a custom task
    data: Path  # folder of the data; of a custom task also the training file
    text_a: str | None = None  # column of the text; it and all fields down to `split_seed`: custom tasks and pairs
    text_b: str | None = None  # column of the second text; None for single texts
    label: str | None = None  # column of the label
    kind: Literal["classification", "regression"] = "classification"
    dev: Path | None = None  # development file; None: that in the folder, or a part of the training file
    delimiter: str | None = None  # of .csv files; None: found in the header
    dev_share: float = 0.1  # of the training examples, held out where there is no development file
    split_seed: int = 0
    max_train: int | None = None  # number of training examples of a task on texts, a fixed sample; None: all
    with_test: bool = False  # whether to read the test sets, too, so that predictions for them are written


def open_task(request: TaskRequest) -> Task:
    """Read the data of a task and return the task; raise UserError if the name is unknown or the data are invalid."""
    name = request.name
    _refuse_ignored(request)
    if name in _SQUAD_VERSIONS:
        return SquadTask(_SQUAD_VERSIONS[name], request.data)
    if name in _TAGGING:
        return TaggingTask(name, request.data, request.dev_share, request.split_seed)
    of_table: dict[str, Any] = {key: getattr(request, key) for key in ("dev", "delimiter", *_OF_SPLIT)}
    if name == PAIRS:
        return RetrievalTask(request.data, request.text_a, request.text_b, **of_table)
    spec = GLUE[name] if name in GLUE else _custom_spec(request)
    return TextTask(spec, request.data, request.max_train, request.with_test, **of_table)


def _refuse_ignored(request: TaskRequest) -> None:
    """Raise UserError if a field is set that this task would ignore."""
    if request.name not in (*GLUE, *_SQUAD_VERSIONS, *_TAGGING):
        return
    obeyed = _OF_SPLIT if request.name in _TAGGING else ()
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for key in (*_OF_TABLE, *_OF_SPLIT):
        if key not in obeyed and getattr(request, key) != defaults[key]:
            option = f"--{key.replace('_', '-')}"
            raise UserError(
                f"{option}: the task {request.name} has files of its own for training and development; leave {option} "
                f"out, or use --task {CUSTOM} for a table of yours"
            )


def _custom_spec(request: TaskRequest) -> TextSpec:
    """Describe a task on a user's texts by the columns of the request; only the name `custom` may leave them open."""
    if request.name != CUSTOM and (request.text_a is None or request.label is None):
        raise UserError(
            f"{request.name}: none of the tasks {', '.join([*GLUE, *_SQUAD_VERSIONS, *_TAGGING, PAIRS, CUSTOM])}; "
            f"correct the name, or give the columns of a task of your own (--text-a COLUMN and --label COLUMN, in a "
            f"comparison text_a and label)"
        )
    return TextSpec(
        name=request.name,
        text_a=request.text_a or "",
        text_b=request.text_b,
        label=request.label or "",
        kind=request.kind,
        metric="accuracy" if request.kind == "classification" else "spearman",
    )

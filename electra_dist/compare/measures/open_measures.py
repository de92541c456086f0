"""Read the data of the tasks and minimal pairs of a comparison, and return the measures that score its encoders."""

from __future__ import annotations

import json
from pathlib import Path

from electra_dist.compare.comparison_config import CompareConfig, TaskEntry
from electra_dist.compare.comparison_plan import Cell
from electra_dist.compare.measures.language_measures import BuiltInPairsMeasure, PairFilesMeasure, TreebankMeasure
from electra_dist.compare.measures.measure import Measure
from electra_dist.compare.measures.task_measure import TaskMeasure
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import settings_for
from electra_dist.finetune.texts.text_specs import GLUE, TextSpec
from electra_dist.finetune.texts.text_task import TextTask


def open_measures(compare: CompareConfig, file: Path, glue: Path | None, cell: Cell) -> list[Measure]:
    """Read the data of a comparison; return a measure for each task, in the config's order, then for minimal pairs.
    `glue` is the folder of the GLUE tasks, or None. `cell` may be any run of the comparison: the sizes of its encoder
    decide the default settings of fine-tuning.
    """
    measures: list[Measure] = []
    model = cell.config.model
    for name, entry in compare.tasks.items():
        try:
            if entry.how in ("tags", "heads"):
                measures.append(TreebankMeasure(name, _treebank_folder(entry), entry.how, entry))
                continue
            task = _open_task(name, entry, glue)
            overrides = [f"{key}={json.dumps(value)}" for key, value in entry.set.items()]
            settings = settings_for(
                task=entry.task or name,
                width=model.discriminator.hidden_size,
                max_positions=model.max_positions,
                overrides=overrides,
            )
            measures.append(TaskMeasure(name, task, entry, settings))
        except UserError as error:
            raise UserError(f"{file}: tasks.{name}: {error}") from None
    if compare.minimal_pairs is True:
        measures.append(BuiltInPairsMeasure(compare.minimal_pairs_per_kind))
    elif compare.minimal_pairs:
        try:
            for path in compare.minimal_pairs:
                measures.append(PairFilesMeasure(Path(path), compare.minimal_pairs_per_kind))
        except UserError as error:
            raise UserError(f"{file}: minimal_pairs: {error}") from None
    return measures


def _treebank_folder(entry: TaskEntry) -> Path:
    if entry.data is None:
        raise UserError(f"`how: {entry.how}` needs a treebank; set `data` to the folder of its CoNLL-U files")
    return Path(entry.data)


def _open_task(name: str, entry: TaskEntry, glue: Path | None) -> TextTask:
    """Read the data of a GLUE task, or of a custom task if the name is not one of GLUE's."""
    folder = Path(entry.data) if entry.data else glue
    if folder is None:
        raise UserError("no folder with data is given; pass --glue DIR, or set `data` of the task")

    task_name = entry.task or name
    if task_name in GLUE:
        return TextTask(GLUE[task_name], folder, entry.max_train)
    if entry.text_a is None or entry.label is None:
        raise UserError(
            f"not a GLUE task ({', '.join(GLUE)}), and a custom task needs `text_a` and `label`; "
            f"correct the name, or set both keys"
        )
    spec = TextSpec(
        name=name,
        text_a=entry.text_a,
        text_b=entry.text_b,
        label=entry.label,
        kind=entry.kind,
        metric="accuracy" if entry.kind == "classification" else "spearman",
    )
    return TextTask(spec, folder, entry.max_train)

"""Scores of checkpoints: every one a JSON file of its own, written when it is whole, so that nothing is scored twice.

Guarantee: a score is found again by what it depends on: the run's identity, the corpus, the step, the task's data and
settings. Another config, other data or another limit is another score, never mistaken for this one. What is evaluated
is the encoder that the run is made for: the large tower, with the pretraining head that its objective gives it.

Shapes: a score is a fraction (accuracy, Matthews, Spearman: the task's metric).
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from electra_dist.compare.config import CompareConfig, TaskEntry
from electra_dist.compare.plan import Cell
from electra_dist.config import canonical_json
from electra_dist.errors import UserError
from electra_dist.finetune.config import FinetuneConfig, settings_for
from electra_dist.finetune.fit import Progress
from electra_dist.finetune.minimal_pairs import ALL, score_minimal_pairs
from electra_dist.finetune.result import summarize
from electra_dist.finetune.run import finetune_task, probe_task
from electra_dist.finetune.tasks import GLUE, TextSpec, TextTask
from electra_dist.pretrained.encoder import Pretrained, device_of_choice, load_pretrained
from electra_dist.store.files import replacing

MINIMAL_PAIRS = "minimal-pairs"
_PAIRS = 200  # of each phenomenon


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """One checkpoint on one task."""

    entry: str
    seed: int
    step: int
    flops: float
    task: str
    metric: str
    score: float | None  # None: no fine-tuning of it came to an end
    failures: tuple[str, ...]
    seconds: float


class Measure(abc.ABC):
    """Something that encoders are scored on. `digest` is of its data and of how they are used."""

    name: str
    metric: str
    digest: str
    at: Literal["all", "ends"] = "all"  # which checkpoints are scored

    @abc.abstractmethod
    def score(self, encoder: Pretrained, progress: Progress) -> tuple[float | None, tuple[str, ...]]:
        """The score, and what went wrong."""


class TaskMeasure(Measure):
    """A task of texts, probed or fine-tuned."""

    def __init__(self, name: str, task: TextTask, entry: TaskEntry, settings: FinetuneConfig) -> None:
        self.name, self.metric, self.at = name, task.metric, entry.at
        self._task, self._entry, self._settings = task, entry, settings
        what = {"task": task.digest, "how": entry.how, "seeds": entry.seeds, "settings": settings.model_dump()}
        self.digest = _digest(what)

    def score(self, encoder: Pretrained, progress: Progress) -> tuple[float | None, tuple[str, ...]]:
        """The probe's score, or the median of the fine-tunings'."""
        device = device_of_choice()
        if self._entry.how == "probe":
            results = [probe_task(encoder, self._task, self._settings, device, progress)]
        else:
            results = [
                finetune_task(encoder, self._task, self._settings, seed, device, progress)
                for seed in range(self._entry.seeds)
            ]
        summary = summarize(results)
        return summary.median, tuple(summary.failed.values())


class PairsMeasure(Measure):
    """Minimal pairs."""

    name, metric, digest = MINIMAL_PAIRS, "accuracy", f"{MINIMAL_PAIRS} {_PAIRS}"

    def score(self, encoder: Pretrained, progress: Progress) -> tuple[float | None, tuple[str, ...]]:
        """The accuracy on all pairs."""
        scores = score_minimal_pairs(encoder, _PAIRS, device_of_choice(), progress)
        return next(score.accuracy for score in scores if score.phenomenon == ALL), ()


def open_measures(compare: CompareConfig, file: Path, glue: Path | None, cell: Cell) -> list[Measure]:
    """All that is scored, its data read.

    Args:
        cell: any run of the comparison; the width and the positions of its encoder decide the default settings.

    Raises:
        UserError: data are missing or not what they should be; names the task and the file.
    """
    measures: list[Measure] = []
    width, positions = cell.config.model.discriminator.hidden_size, cell.config.model.max_positions
    for name, entry in compare.tasks.items():
        try:
            task = _open_task(name, entry, glue)
            overrides = [f"{key}={json.dumps(value)}" for key, value in entry.set.items()]
            settings = settings_for(entry.task or name, width, positions, overrides)
            measures.append(TaskMeasure(name, task, entry, settings))
        except UserError as error:
            raise UserError(f"{file}: tasks.{name}: {error}") from None
    return measures + ([PairsMeasure()] if compare.minimal_pairs else [])


def _open_task(name: str, entry: TaskEntry, glue: Path | None) -> TextTask:
    folder = Path(entry.data) if entry.data else glue
    if folder is None:
        raise UserError("no data; give --glue DIR, or set `data`")
    if (entry.task or name) in GLUE:
        return TextTask(GLUE[entry.task or name], folder, entry.max_train)
    if entry.text_a is None or entry.label is None:
        raise UserError(f"neither one of {', '.join(GLUE)}, nor are `text_a` and `label` set, as for your own task")
    metric = "accuracy" if entry.kind == "classification" else "spearman"
    spec = TextSpec(
        name=name, text_a=entry.text_a, text_b=entry.text_b, label=entry.label, kind=entry.kind, metric=metric
    )
    return TextTask(spec, folder, entry.max_train)


class Scores:
    """The scores of a comparison, in a folder."""

    def __init__(self, folder: Path, vocab_file: Path, fingerprint: str) -> None:
        """`vocab_file` and `fingerprint` are the corpus's."""
        self._folder, self._vocab_file, self._fingerprint = folder, vocab_file, fingerprint

    def missing(self, entry: str, cell: Cell, step: int, measures: Iterable[Measure]) -> list[Measure]:
        """What has not been scored yet at a checkpoint."""
        return [measure for measure in measures if self.find(entry, cell, step, measure) is None]

    def find(self, entry: str, cell: Cell, step: int, measure: Measure) -> Score | None:
        """The score of `entry` (`cell`'s, or the baseline) after `step` steps, if it is there."""
        path = self._path(entry, cell, step, measure)
        if not path.exists():
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        if record.pop("identity") != self._identity(cell, step, measure):
            return None
        return Score(**{**record, "failures": tuple(record["failures"])})

    def make(self, entry: str, cell: Cell, step: int, measures: Iterable[Measure], progress: Progress) -> None:
        """Score a checkpoint, or at step 0 the initial weights, on each of `measures`.

        Raises:
            UserError: the checkpoint cannot be read, or the encoder cannot be asked.
        """
        spec = cell.config.run_dir if step else f"random:{cell.file}"
        encoder = load_pretrained(spec, vocab=self._vocab_file, step=step or None)
        for measure in measures:
            begin = time.monotonic()
            value, failures = measure.score(
                encoder, lambda what, *parts, m=measure: progress(f"{m.name}: {what}", *parts)
            )
            score = Score(
                entry=entry,
                seed=cell.seed,
                step=step,
                flops=cell.flops(step),
                task=measure.name,
                metric=measure.metric,
                score=value,
                failures=failures,
                seconds=time.monotonic() - begin,
            )
            record = dataclasses.asdict(score) | {"identity": self._identity(cell, step, measure)}
            with replacing(self._path(entry, cell, step, measure)) as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")

    def _path(self, entry: str, cell: Cell, step: int, measure: Measure) -> Path:
        return self._folder / f"{entry}-seed{cell.seed}" / f"step-{step:08d}-{measure.name}.json"

    def _identity(self, cell: Cell, step: int, measure: Measure) -> str:
        run = {"run": cell.config.identity_sha256(), "corpus": self._fingerprint, "step": step}
        return _digest({**run, "measure": measure.digest})


def _digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()

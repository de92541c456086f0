"""Score checkpoints, and keep each score in a JSON file of its own, so that nothing is scored twice.

Guarantee: a score is stored with a digest of everything that it depends on: the config of the run, the corpus, the
step, and the data and settings of the task. A stored score is used only if its digest is the current one; after a
change of any of these, the checkpoint is scored again. The encoder that is scored is the one for which the run is made
(in ELECTRA the discriminator, not the generator), with its pretraining head.

Units: a score is a fraction (accuracy, Matthews or Spearman correlation, depending on the task).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from electra_dist.compare.comparison_plan import Cell
from electra_dist.compare.measures.measure import Measure, Measured, digest_of
from electra_dist.finetune.training_loop import Diverged, Progress
from electra_dist.pretrained.load_encoder import load_pretrained
from electra_dist.run.folder import recorded_numerics
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import DamagedJson, damaged_file, read_json_object, validate_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one checkpoint by one measure (a way to score encoders); the fields are the keys of its JSON file.
    The number is a probe's score at the layer that held-out training data choose, the median over the seeds of
    fine-tuning, the accuracy on minimal pairs, or the context AUC (see `context_measure.py`).
    """

    entry: str  # name of the objective's entry, or "random" for the initial weights
    seed: int  # seed of the pretraining run
    step: int  # step of the checkpoint; 0 for the initial weights
    flops: float  # training FLOPs up to that step
    task: str  # name of the measure, a column of the table
    metric: str
    score: float | None  # a fraction; None if there is no score
    failures: tuple[str, ...]  # why there is no score, or why seeds of fine-tuning count as failed, one line each
    seconds: float  # time that scoring took
    standard_error: float | None = None  # over the choice of the test examples; None if it is not known
    layer: int | None = None  # of a probe: the layer that was chosen on the training data; 0 is the embeddings
    details: dict[str, float] = dataclasses.field(default_factory=dict)  # kind of pair, or "layer 2" -> its score


_SCORE = TypeAdapter(Score)


def with_prefix(progress: Progress, prefix: str) -> Progress:
    """Wrap `progress` so that `prefix` stands before each activity, as in "rte: predict" for the prefix "rte: "."""

    def report(activity: str, done: int, total: int) -> None:
        progress(f"{prefix}{activity}", done, total)

    return report


class Scores:
    """Store of a comparison's scores: a folder with one JSON file for each checkpoint and measure.
    An `entry` is the name of the run's objective in the config, or "random" for the initial weights, which have step
    0.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint

    def missing(self, entry: str, cell: Cell, step: int, measures: Iterable[Measure]) -> list[Measure]:
        """Return those of `measures` that have no valid score yet for the checkpoint at `step` of the run `cell`."""
        return [measure for measure in measures if self.find(entry, cell, step, measure) is None]

    def find(self, entry: str, cell: Cell, step: int, measure: Measure) -> Score | None:
        """Return a checkpoint's stored score; None if there is none for the present config, corpus and task data."""
        path = self._path(entry, cell, step, measure)
        if not path.exists():
            return None
        next_step = "delete it, and the checkpoint is scored again"
        record = read_json_object(path, next_step)
        identity = record.pop("identity", None)
        if identity != self._identity(cell, step, measure):
            return None
        try:
            return validate_json(_SCORE, record)
        except DamagedJson as error:
            raise damaged_file(path, error, next_step) from None

    def make(self, entry: str, cell: Cell, step: int, measures: Iterable[Measure], progress: Progress) -> None:
        """Score a checkpoint by each of `measures`, and write every score as soon as it is known.
        An interrupt loses at most one score. Existing scores are replaced. Raises UserError if the checkpoint cannot
        be read, or a measure cannot score it.
        """
        if step == 0:
            # The initial weights are a function of the run's config, so no checkpoint is needed.
            encoder = load_pretrained(f"random:{cell.file}")
        else:
            encoder = load_pretrained(cell.config.run_dir, step=step)
        for measure in measures:
            start = time.monotonic()
            try:
                measured = measure.score(encoder, with_prefix(progress, f"{measure.name}: "))
            except Diverged as error:
                measured = Measured(value=None, failures=(f"diverged: {error}",))
            score = Score(
                entry=entry,
                seed=cell.seed,
                step=step,
                flops=cell.flops(step),
                task=measure.name,
                metric=measure.metric,
                score=measured.value,
                failures=measured.failures,
                seconds=time.monotonic() - start,
                standard_error=measured.standard_error,
                layer=measured.layer,
                details=measured.details,
            )
            record = dataclasses.asdict(score)
            record["identity"] = self._identity(cell, step, measure)
            with replacing(self._path(entry, cell, step, measure)) as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")

    def _path(self, entry: str, cell: Cell, step: int, measure: Measure) -> Path:
        """Return the path of a score's file; it does not depend on the config, so a new score replaces an old one."""
        return self._folder / f"{entry}-seed{cell.seed}" / f"step-{step:08d}-{measure.name}.json"

    def _identity(self, cell: Cell, step: int, measure: Measure) -> str:
        # A run records the version of its arithmetic (numerics), which is used here: scores of older runs stay valid.
        numerics = recorded_numerics(Path(cell.config.run_dir))
        return digest_of(
            {
                "run": cell.config.identity_sha256(numerics),
                "corpus": self._fingerprint,
                "step": step,
                "measure": measure.digest,
            }
        )

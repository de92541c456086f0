"""Keep the scores of a comparison's checkpoints in a file, so that nothing is scored twice.

Guarantee: the identity of a stored score covers everything that it depends on: the config of the run, the corpus, the
step, and the data and settings of the task. After a change of any of these, the checkpoint is scored again.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from electra_dist.compare.comparison_config import TRIGRAM
from electra_dist.compare.comparison_runs import PlannedRun
from electra_dist.compare.measures import Measure
from electra_dist.finetune.stored_scores import Measured, ScoreStore, digest_of
from electra_dist.finetune.training_loop import Diverged, Progress
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.run.folder import recorded_numerics


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointScore:
    """Score of one checkpoint by one measure (a way to score encoders), as a fraction."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    step: int  # step of the checkpoint; 0 for the initial weights
    flops: float  # training FLOPs up to that step
    measured: Measured  # its task is the name of the measure, its seed that of the pretraining run

    @property
    def task(self) -> str:
        """Return the name of the measure, a column of the table."""
        return self.measured.task

    @property
    def seed(self) -> int:
        """Return the seed of the pretraining run."""
        return self.measured.seed

    @property
    def value(self) -> float | None:
        """Return the score as a fraction; None if there is none."""
        return self.measured.score

    def record(self) -> dict[str, Any]:
        """Return the entry of compare.json for this score; its details are the scores of layers or kinds of pairs."""
        measured = self.measured
        of_layers = {f"layer {layer}": score for layer, score in enumerate(measured.layer_scores)}
        return {
            "entry": self.entry,
            "seed": measured.seed,
            "step": self.step,
            "flops": self.flops,
            "task": measured.task,
            "metric": measured.metric,
            "score": measured.score,
            "metrics": measured.metrics,
            "failures": measured.failures,
            "seconds": measured.seconds,
            "standard_error": measured.standard_error,
            "layer": measured.layer,
            "details": {**measured.details, **of_layers},
        }


def with_prefix(progress: Progress, prefix: str) -> Progress:
    """Wrap `progress` so that `prefix` stands before each activity, as in "rte: predict" for the prefix "rte: "."""

    def report(activity: str, done: int, total: int) -> None:
        progress(f"{prefix}{activity}", done, total)

    return report


class CheckpointScores:
    """Scores of a comparison's checkpoints, which are made once and kept in a file.

    In the methods, `entry` is the name of the run's objective in the comparison's config, or "random" for the initial
    weights, which have step 0.
    """

    def __init__(self, file: Path, fingerprint: str) -> None:
        """Read the scores of `file`, which may be missing; `fingerprint` identifies the corpus."""
        self._store = ScoreStore(file)
        self._fingerprint = fingerprint

    def missing(self, entry: str, run: PlannedRun, step: int, measures: Iterable[Measure]) -> list[Measure]:
        """Return those of `measures` that have no valid score yet for the checkpoint of `run` at `step`."""
        return [measure for measure in measures if self.find(entry, run, step, measure) is None]

    def find(self, entry: str, run: PlannedRun, step: int, measure: Measure) -> CheckpointScore | None:
        """Return the stored score of a run's checkpoint by one measure.

        It is None if there is none, or only one that was made with another config, corpus or task data.
        """
        measured = self._store.find(self._identity(run, step, measure), run.seed)
        if measured is None:
            return None
        return CheckpointScore(entry=entry, step=step, flops=run.flops(step), measured=measured)

    def make(self, entry: str, run: PlannedRun, step: int, measures: Iterable[Measure], progress: Progress) -> None:
        """Score a checkpoint by each of `measures`, and write every score as soon as it is known.

        An interrupt loses at most one score. Raises UserError if the checkpoint cannot be read, or a measure cannot
        score it.
        """
        # The initial weights are a function of the run's config, so no checkpoint is needed.
        source = f"random:{run.file}" if step == 0 else run.config.run_dir
        read = functools.partial(load_pretrained, source, step=step or None)
        encoder = read()
        for measure in measures:
            start = time.monotonic()
            try:
                measured = measure.score(
                    encoder, functools.partial(read, tower="generator"), with_prefix(progress, f"{measure.name}: ")
                )
            except Diverged as error:
                measured = measure.measured(None, failures=(f"diverged: {error}",))
            measured = dataclasses.replace(
                measured,
                task=measure.name,
                seed=run.seed,
                identity=self._identity(run, step, measure),
                seconds=time.monotonic() - start,
            )
            self._store.add(measured, checkpoint={"entry": entry, "step": step, "flops": run.flops(step)})

    def find_trigram_score(self, measure: Measure, seed: int) -> CheckpointScore | None:
        """Return the stored score of the trigram model of the corpus; None if there is none."""
        measured = self._store.find(self._trigram_identity(measure), seed)
        return None if measured is None else CheckpointScore(entry=TRIGRAM, step=0, flops=0.0, measured=measured)

    def add_trigram_score(self, measure: Measure, seed: int, measured: Measured) -> None:
        """Write the score of the trigram model of the corpus."""
        identity = self._trigram_identity(measure)
        self._store.add(
            dataclasses.replace(measured, task=measure.name, seed=seed, identity=identity),
            checkpoint={"entry": TRIGRAM, "step": 0, "flops": 0.0},
        )

    def _trigram_identity(self, measure: Measure) -> str:
        return digest_of(
            {
                "model": "trigram, Kneser-Ney",
                "corpus": self._fingerprint,
                "measure": {"name": measure.name, "data": measure.digest},
            }
        )

    def _identity(self, run: PlannedRun, step: int, measure: Measure) -> str:
        """Return a digest of everything on which the score of a run's checkpoint by a measure depends."""
        # A run records the version of its arithmetic (numerics), which is used here: scores of older runs stay valid.
        numerics = recorded_numerics(Path(run.config.run_dir))
        return digest_of(
            {
                "run": run.config.identity_sha256(numerics),
                "corpus": self._fingerprint,
                "step": step,
                "measure": {"name": measure.name, "data": measure.digest},
            }
        )

"""Score encoders in several ways, each of which is a column of a comparison's table.

The encoder that is scored is the one for which a run is made (in ELECTRA the discriminator, not the generator), with
its pretraining head.

Tasks on texts are probed or fine-tuned, the words of a treebank are probed, and minimal pairs need no training. The
measures on held-out rows are in `heldout_measures.py`.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from electra_dist.compare.comparison_config import MINIMAL_PAIRS, CompareConfig, TaskEntry
from electra_dist.compare.comparison_runs import PlannedRun
from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig, settings_for
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.stored_scores import ItemResults, Measured, digest_of, summarize
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.task import Task
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import Progress
from electra_dist.finetune.word_files import read_treebank
from electra_dist.pretrained.encoder import Pretrained, device_of_choice
from electra_dist.scoring.minimal_pairs import ALL, PairScore, score_minimal_pairs, score_sentence_pairs
from electra_dist.scoring.pair_files import read_pair_files
from electra_dist.scoring.trigram_model import TrigramModel
from electra_dist.scoring.word_probes import Target, probe_words

LoadGenerator = Callable[[], Pretrained]  # reads the generator that was trained with an encoder


class Measure(abc.ABC):
    """Interface of a way to score encoders, such as on a task, a treebank, minimal pairs, or by the context AUC."""

    name: str  # title of the column in the table of scores
    mode: str  # how encoders are scored: finetune, probe, tags, heads, pairs, context or detection
    metric: str  # name of the score, such as "accuracy"
    digest: str  # digest of the data and of how they are used; part of the identity of a score
    at: Literal["all", "ends"] = "all"  # checkpoints that are scored: all, or the initial and the last weights only
    scores_trigrams = False  # whether a model without states can be scored
    is_task = True  # whether the score counts in the average of a checkpoint

    def applies_to(self, objective: ObjectiveConfig) -> bool:
        """Return whether runs with this objective can be scored; the others have no score in the column."""
        return True

    @abc.abstractmethod
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        """Score an encoder, for example by fine-tuning a copy of it on a task; the encoder itself is not changed.

        `load_generator` reads the generator of the same checkpoint. Raises UserError if the encoder cannot be scored,
        for example because it has no pretraining head.
        """

    def score_trigrams(self, model: TrigramModel, encoder: Pretrained, progress: Progress) -> Measured:
        """Score a trigram model, with the tokenizer of `encoder`; call it only if `scores_trigrams` is True."""
        raise NotImplementedError

    def measured(self, score: float | None, **found: Any) -> Measured:
        """Return a score by this measure; `found` are further fields of `Measured`."""
        return Measured(task=self.name, mode=self.mode, metric=self.metric, score=score, **found)


class TaskMeasure(Measure):
    """Measure of how well an encoder solves a task: with a linear probe of frozen states, or fine-tuned."""

    def __init__(self, name: str, task: Task, entry: TaskEntry, settings: FinetuneConfig) -> None:
        """Measure by `task` under the column `name`; `entry` says how, `settings` are those of fine-tuning.

        A linear probe uses only the settings that turn texts into examples.
        """
        self.name = name
        self.mode = entry.how
        self.metric = task.metric
        self.at = entry.at
        self._task = task
        self._entry = entry
        self._settings = settings
        self.digest = digest_of(
            {"task": task.digest, "how": entry.how, "seeds": entry.seeds, "settings": settings.identity()}
        )

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        """Return the score of the probe at the chosen layer, or the median over the seeds of fine-tuning.

        The results on single examples, and their error, are those of the seed whose score is nearest to the median.
        The score is None if all seeds diverged. A seed counts as a failure if it diverged, or predicts the same for
        all examples.
        """
        device = device_of_choice()
        if self._entry.how == "probe":
            return probe_task(encoder, self._task, self._settings, device, progress)
        results = [
            finetune_task(encoder, self._task, self._settings, seed, device, progress)
            for seed in range(self._entry.seeds)
        ]
        summary = summarize(results)
        median = summary.median
        if median is None:
            return self.measured(None, failures=tuple(summary.failed.values()))
        score_of = {seed: result.score for seed, result in enumerate(results) if result.score is not None}
        nearest = results[min(score_of, key=lambda seed: abs(score_of[seed] - median))]
        return self.measured(
            self._task.unit * median,
            failures=tuple(summary.failed.values()),
            standard_error=None if nearest.standard_error is None else self._task.unit * nearest.standard_error,
            items=None if nearest.items is None else nearest.items.in_unit(self._task.unit),
        )


class _PairsMeasure(Measure):
    """Base class of measures of how often an encoder, without fine-tuning, prefers the grammatical sentence of a pair.

    The score is the share of pairs whose grammatical sentence scores higher: of all pairs, and of each kind.
    """

    mode = "pairs"
    metric = "accuracy"

    def _of(self, scores: list[PairScore]) -> Measured:
        """Return the accuracy on all pairs, with its standard error, and that on each kind of pair.

        `scores` has an entry for each kind, then that of all pairs. Beside the accuracy stand the mean margin in nats
        and, for a masked language model, the accuracy by each way of scoring a sentence.
        """
        *kind_scores, total = scores
        assert total.phenomenon == ALL
        by_readout = {f"accuracy_{readout}": value for readout, value in total.accuracy_by_readout.items()}
        return self.measured(
            total.accuracy,
            metrics={"margin": total.margin, **by_readout},
            standard_error=total.standard_error,
            details={score.phenomenon: score.accuracy for score in kind_scores},
            items=ItemResults.of_hits([score.hits for score in kind_scores]),
        )


class BuiltInPairsMeasure(_PairsMeasure):
    """Measure on generated pairs of sentences that differ in the number of one word, which is wrong in one of them."""

    name = MINIMAL_PAIRS

    def __init__(self, pairs_per_kind: int) -> None:
        self._pairs_per_kind = pairs_per_kind
        self.digest = f"{MINIMAL_PAIRS} {pairs_per_kind}"

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        return self._of(score_minimal_pairs(encoder, self._pairs_per_kind, device_of_choice(), progress))


class PairFilesMeasure(_PairsMeasure):
    """Measure on the pairs of a file or folder.

    A masked language model reads a word from left to right: while it scores a token, the rest of the word is masked.
    """

    scores_trigrams = True

    def __init__(self, path: Path, pairs_per_kind: int) -> None:
        """Read a file or folder in the formats of `read_pair_files`; the column has its name.

        At most `pairs_per_kind` pairs of each kind are used, always the same ones.
        """
        self.name = path.stem
        files = read_pair_files([path]).sample(pairs_per_kind)
        self._pairs = files.pairs
        self.digest = digest_of({"pairs": files.sha256, "per_kind": pairs_per_kind, "readout": "word"})

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        return self._of(score_sentence_pairs(encoder, self._pairs, device_of_choice(), progress, readout="word"))

    @override
    def score_trigrams(self, model: TrigramModel, encoder: Pretrained, progress: Progress) -> Measured:
        device = torch.device("cpu")
        return self._of(score_sentence_pairs(encoder, self._pairs, device, progress, scorer=model.score))


class TreebankMeasure(Measure):
    """Measure of how well a probe of frozen states finds the parts of speech or the syntactic heads of words."""

    metric = "accuracy"

    def __init__(self, name: str, folder: Path, target: Target, entry: TaskEntry) -> None:
        self.name = name
        self.at = entry.at
        self.mode = target
        self._target = target
        treebank = read_treebank(folder)
        self._treebank = treebank.sample(entry.max_train)
        self.digest = digest_of({"treebank": treebank.sha256, "target": target, "max_train": entry.max_train})

    @override
    def score(self, encoder: Pretrained, load_generator: LoadGenerator, progress: Progress) -> Measured:
        """Return the accuracy on the words of the test sentences, at the layer chosen on held-out training data."""
        return probe_words(encoder, self._treebank, self._target, device_of_choice(), progress)


def open_measures(compare: CompareConfig, file: Path, glue: Path | None, run: PlannedRun) -> list[Measure]:
    """Read the data of a comparison; return a measure for each task, in the config's order, then for minimal pairs.

    `glue` is the folder of the GLUE tasks, or None. `run` may be any run of the comparison: the sizes of its encoder
    decide the default settings of fine-tuning.
    """
    measures: list[Measure] = []
    for name, entry in compare.tasks.items():
        try:
            measures.append(_open_measure(name, entry, glue, run.config.model))
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


def _open_measure(name: str, entry: TaskEntry, glue: Path | None, model: ModelConfig) -> Measure:
    if entry.how in ("tags", "heads"):
        if entry.data is None:
            raise UserError(f"`how: {entry.how}` needs a treebank; set `data` to the folder of its CoNLL-U files")
        return TreebankMeasure(name, Path(entry.data), entry.how, entry)
    task = _open_task(name, entry, glue)
    settings = settings_for(
        task=entry.task or name,
        width=model.discriminator.hidden_size,
        max_positions=model.max_positions,
        overrides=[f"{key}={json.dumps(value)}" for key, value in entry.set.items()],
    )
    return TaskMeasure(name, task, entry, settings)


def _open_task(name: str, entry: TaskEntry, glue: Path | None) -> Task:
    """Read the data of a task from its own folder or from the folder `glue`."""
    folder = Path(entry.data) if entry.data else glue
    if folder is None:
        raise UserError("no folder with data is given; pass --glue DIR, or set `data` of the task")
    request = TaskRequest(
        name=entry.task or name,
        data=folder,
        text_a=entry.text_a,
        text_b=entry.text_b,
        label=entry.label,
        kind=entry.kind,
        max_train=entry.max_train,
    )
    task = open_task(request)
    if isinstance(task, TextTask):
        return task
    if not isinstance(task, (TaggingTask, SquadTask)) or entry.how == "probe":
        raise UserError(
            f"{task.name}: a comparison probes or fine-tunes tasks on texts, and fine-tunes tagging, ner and squad1; "
            f"set `how: finetune`, or use `electra-dist finetune` for this task"
        )
    if entry.max_train is not None:
        raise UserError(f"max_train: {task.name} uses all of its training data; remove the key")
    return task

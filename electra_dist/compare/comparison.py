"""Make a comparison of pretraining objectives, from the first run to the picture, and resume an interrupted one.

Guarantee: configs, corpus and tasks are checked completely before the first run starts. A run that fails, or a
checkpoint that cannot be scored, does not stop the rest: it is listed among the failures in all results, and is tried
again when the comparison is started again. Table and picture are written after each run, from the scores that exist by
then.

How: first the learning rates of objectives that list several are chosen (`learning_rates.py`). Then the checkpoints of
interrupted runs are scored, so that these results are known before the runs go on. Then all objectives are run with
the first seed, then all with the next one. For each seed, the initial weights are scored first. Then, for every
objective, the run is made and its checkpoints are scored, while up to `parallel - 1` of the next runs train at the
same time. A run whose checkpoints have all their scores is not made again.

Limits: each call uses one machine. On a GPU, the scoring process keeps a context of its own (some hundred MB) on the
first device while runs train.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from electra_kernels.operation_types import SpecialIds

from electra_dist.checkpoint.stored_copies import open_targets, owner_of
from electra_dist.compare.checkpoint_scores import CheckpointScore, CheckpointScores, with_prefix
from electra_dist.compare.comparison_config import RANDOM, CompareConfig
from electra_dist.compare.comparison_page import RunState, comparison_page
from electra_dist.compare.comparison_results import ComparisonResults, Failure, score_failures
from electra_dist.compare.comparison_runs import Plan, PlannedRun, Pretrainings, current_step, make_plan, saved_steps
from electra_dist.compare.heldout_measures import first_blocks, open_heldout_measures
from electra_dist.compare.learning_rates import RateSearch, with_rates
from electra_dist.compare.measures import Measure, open_measures
from electra_dist.compare.score_plot import panel_titles, read_curves, write_curves, write_scores
from electra_dist.compare.significance import record_criterion
from electra_dist.config.load import dump_yaml
from electra_dist.engine.engine import check_machine
from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Progress
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.report.pages import write_page
from electra_dist.run.folder import is_run_folder, open_run, read_identity
from electra_dist.scoring.trigram_model import TrigramModel
from electra_dist.store.atomic_files import PRIVATE, SHARED, replacing
from electra_dist.train.check_inputs import check_inputs

_TRIGRAM_TOKENS = 20_000_000  # of the training rows, the first ones, that the trigram model counts at most
SCORES_FILE = "scores.jsonl"  # in the output folder: the score of each checkpoint by each measure
Note = Callable[[str], None]  # called with one line of text for the user


class Comparison:
    """A comparison of pretraining objectives: its runs, the scores of their checkpoints, tables and pictures."""

    def __init__(self, compare: CompareConfig, file: Path, glue: Path | None) -> None:
        """Check config, corpus and tasks; if all are valid, write the vocabulary and each run's config to `output`.

        `file` is the config's path, `glue` the folder of the GLUE tasks, or None if every task has its own `data`.
        Raises UserError if something is not valid, or the folder of a run has checkpoints of another run.
        """
        self._compare = compare
        self._file = file
        self._glue = glue
        self.search = RateSearch(compare, file)
        self.plan: Plan = make_plan(with_rates(compare, []), file)
        self._measures: list[Measure] = open_measures(compare, file, glue, self.plan.runs[0])
        self.folder = Path(compare.output)
        # Whether the version of the arithmetic (numerics) has changed since a run was made is not checked here: a
        # finished run is only read, and for an unfinished run the process that continues it makes this check.
        short_runs = self.search.plan.runs if self.search.plan is not None else ()
        first = (*short_runs, *self.plan.runs)[0]
        check_machine(first.config)
        inputs = check_inputs(first.config, compare.ranks, accept_new_numerics=True)
        self._inputs = inputs  # stand for those of all runs, which read the same corpora
        self._plan_with_rates()  # a run that was begun has the learning rate that was chosen for it
        for run in (*self.plan.runs, *short_runs):
            if run.config != first.config:
                check_machine(run.config)
                check_inputs(run.config, compare.ranks, accept_new_numerics=True)
        self._measures += open_heldout_measures(compare, file, self.plan, inputs.heldout)

        # Everything is valid, so the output folder may be written.
        _replace_file(self.folder / inputs.corpora.tokenizer.vocab_file, inputs.vocabulary.text.encode())
        self._write_configs((*short_runs, *self.plan.runs))
        self._scores = CheckpointScores(self.folder / SCORES_FILE, inputs.corpora.fingerprint)
        # Keyed by the name of a run that is not finished, as in "rtd-seed1", or by name and step of a checkpoint that
        # is missing or cannot be scored, as in "rtd-seed1 500".
        self._failures: dict[str, Failure] = {}
        self._criterion_origin = ""  # when the criterion was stated, for the results

    def _plan_with_rates(self) -> None:
        """Plan the runs anew; an objective whose learning rate is not chosen yet takes the first one in its list.

        Raises UserError if the folder of a run has checkpoints of another run.
        """
        self._rates = self.search.choices(self._inputs.corpora.fingerprint)
        self.plan = make_plan(with_rates(self._compare, self._rates), self._file)
        for run in self.plan.runs:
            run_dir = Path(run.config.run_dir)
            owner = owner_of(open_run(run_dir), read_identity(run_dir)) if is_run_folder(run_dir) else None
            if owner is not None:
                owner.check_all(open_targets(run.config))

    def _write_configs(self, runs: Iterable[PlannedRun]) -> None:
        for run in runs:
            _replace_file(run.file, dump_yaml(run.config).encode(), permissions=PRIVATE)

    def run(self, progress: Progress, note: Note) -> bool:
        """Train the runs and score their checkpoints where scores are missing; write results after each run.

        Returns whether all runs are finished and all checkpoints scored; if not, `failures` says why. `note` is called
        with one line for the user after each run.
        """
        if self._compare.criterion is not None:
            num_scores = len(self.scores())
            self._criterion_origin = record_criterion(self.folder, self._compare.criterion, num_scores)
        self._score_trigrams(progress, note)
        if self.search.plan is not None:
            self.write()  # the short runs may take hours
        for choice in self.search.make(self._inputs.corpora.fingerprint, progress):
            note(f"learning rate of {choice.line()}")
        self._plan_with_rates()
        self._write_configs(self.plan.runs)
        num_runs = len(self.plan.runs)
        first_objective = self._compare.objectives[0].name
        incomplete_runs = [run for run in self.plan.runs if not self._is_scored(run)]
        incomplete_names = {run.name for run in incomplete_runs}
        self._score_interrupted(incomplete_runs, progress)
        with Pretrainings(incomplete_runs, self._compare.ranks, self._compare.parallel) as trainings:
            for number, run in enumerate(self.plan.runs, start=1):
                title = f"[{number}/{num_runs}] {run.name}"
                report = with_prefix(progress, f"{title} ")
                # All objectives start with the same weights of the encoder, so these are scored once per seed.
                if run.entry == first_objective:
                    self._score(RANDOM, run, 0, report)

                # A run with all its scores is not made, because its checkpoints may have been deleted.
                failure = trainings.result(run, report) if run.name in incomplete_names else ""
                if failure:
                    self._failures[run.name] = Failure(entry=run.entry, seed=run.seed, what=failure)
                self._score_saved(run, report)  # also of a run that failed: it may have saved some of its checkpoints
                if not failure:
                    self._record_missing_checkpoints(run)
                self.write()
                note(f"{title}: {failure or self._summary(run)}")
        return not self._failures

    def _score_trigrams(self, progress: Progress, note: Note) -> None:
        """Score a trigram model of the training rows by the measures that need no states, where scores are missing.

        `note` is called with a line on how much the tokens of held-out rows differ from those of the training rows.
        """
        measures = [measure for measure in self._measures if measure.scores_trigrams]
        seed = self._compare.seeds[0]
        missing = [measure for measure in measures if self._scores.find_trigram_score(measure, seed) is None]
        if not missing:
            return
        corpora = self._inputs.corpora
        special = SpecialIds.from_tokens(corpora.tokenizer.special)
        run = self.plan.runs[0]
        num_rows = _TRIGRAM_TOKENS // corpora.seq_len
        rows = first_blocks(corpora, num_rows, with_prefix(progress, "trigrams: "))
        model = TrigramModel(rows, run.config.model.vocab_size, special.cls, special.pad)
        heldout = self._inputs.heldout
        if heldout is not None:
            divergence = model.divergence_of(first_blocks(heldout, num_rows, progress), special.pad)
            note(f"held-out rows: their tokens diverge from those of the training rows by {divergence:.4f} nats")
        encoder = load_pretrained(f"random:{run.file}")
        for measure in missing:
            measured = measure.score_trigrams(model, encoder, with_prefix(progress, f"trigrams: {measure.name}: "))
            self._scores.add_trigram_score(measure, seed, measured)

    def _score_interrupted(self, runs: Sequence[PlannedRun], progress: Progress) -> None:
        """Score the saved checkpoints of unfinished runs, before these go on; finished runs are scored later."""
        for run in runs:
            is_finished = run.marks[-1] in saved_steps(run)
            if not is_finished:
                self._score_saved(run, with_prefix(progress, f"{run.name} "))
        if self.scores():
            self.write()

    def _score_saved(self, run: PlannedRun, progress: Progress) -> None:
        saved = saved_steps(run)
        for step in run.marks:
            if step in saved:
                self._score(run.entry, run, step, progress)

    def _record_missing_checkpoints(self, run: PlannedRun) -> None:
        """Record a failure for each checkpoint of a finished run that still needs scores, but does not exist."""
        saved = saved_steps(run)
        for step in run.marks:
            if step not in saved and self._scores.missing(run.entry, run, step, self._due_measures(run, step)):
                what = (
                    f"after {step:,} steps: the checkpoint is missing; to make the run again, delete "
                    f"{run.config.run_dir} and repeat the command"
                )
                key = _checkpoint_key(run.entry, run, step)
                self._failures[key] = Failure(entry=run.entry, seed=run.seed, what=what)

    def _summary(self, run: PlannedRun) -> str:
        """Describe a finished run in a line: its steps, and how many of its checkpoints have all their scores."""
        state = self._state(run)
        return f"{state.num_steps:,} steps, {state.num_scored} of {state.num_checkpoints} checkpoints scored"

    def _state(self, run: PlannedRun) -> RunState:
        scored_marks = [step for step in run.marks if self._due_measures(run, step)]
        num_scored = sum(
            not self._scores.missing(run.entry, run, step, self._due_measures(run, step)) for step in scored_marks
        )
        num_steps = run.marks[-1]
        saved = saved_steps(run)
        is_finished = num_steps in saved or self._is_scored(run)  # the checkpoints of scored runs may be deleted
        return RunState(
            entry=run.entry,
            seed=run.seed,
            step=num_steps if is_finished else min(max([*saved, current_step(run)]), num_steps - 1),
            num_steps=num_steps,
            num_scored=num_scored,
            num_checkpoints=len(scored_marks),
        )

    def _score(self, entry: str, run: PlannedRun, step: int, progress: Progress) -> None:
        """Score a checkpoint by every measure that lacks a valid score for it; record a UserError as a failure."""
        missing_measures = self._scores.missing(entry, run, step, self._due_measures(run, step))
        if not missing_measures:
            return
        key = _checkpoint_key(entry, run, step)
        self._failures.pop(key, None)  # of an earlier try
        try:
            self._scores.make(entry, run, step, missing_measures, progress)
        except UserError as error:
            self._failures[key] = Failure(entry=entry, seed=run.seed, what=f"after {step:,} steps: {error}")

    def _is_scored(self, run: PlannedRun) -> bool:
        """Return whether all checkpoints of a run are scored, so that it need not train; False without measures."""
        return bool(self._measures) and not any(
            self._scores.missing(run.entry, run, step, self._due_measures(run, step)) for step in run.marks
        )

    def _due_measures(self, run: PlannedRun, step: int) -> list[Measure]:
        """Return the measures that score a run's checkpoint at `step`; some score only the first and the last one."""
        is_first_or_last = step in (0, run.marks[-1])
        return [
            measure
            for measure in self._measures
            if measure.applies_to(run.config.objective) and (measure.at == "all" or is_first_or_last)
        ]

    def scores(self) -> list[CheckpointScore]:
        """Read all stored scores: of initial weights, of the trigram model, then by objective, seed and step."""
        first_objective = self._compare.objectives[0].name
        found: list[CheckpointScore | None] = []
        for run in self.plan.of(first_objective):  # the initial weights are scored once per seed
            found += [self._scores.find(RANDOM, run, 0, measure) for measure in self._measures]
        first_seed = self._compare.seeds[0]
        found += [self._scores.find_trigram_score(measure, first_seed) for measure in self._measures]
        for objective in self._compare.objectives:
            for run in self.plan.of(objective.name):
                for step in run.marks:
                    found += [self._scores.find(run.entry, run, step, measure) for measure in self._measures]
        return [score for score in found if score is not None]

    def failures(self) -> list[Failure]:
        """Return the runs and checkpoints that failed in this process, then the failures that stored scores record."""
        return [*self._failures.values(), *score_failures(self.scores())]

    def results(self) -> ComparisonResults:
        """Read the scores that exist, and make the tables, the texts and the verdict from them."""
        return ComparisonResults(
            compare=self._compare,
            plan=self.plan,
            measures=self._measures,
            scores=self.scores(),
            title=f"{self._file.stem}: objectives at equal FLOPs",
            command=self._command,
            criterion_origin=self._criterion_origin,
            rates=self._rates,
        )

    def write(self) -> list[Path]:
        """Write compare.html, .json, .md, .png (scores) and, after the first evaluation of a run, curves.png.

        Existing files are replaced atomically, so a reader never sees half a file. Returns the paths.
        """
        results = self.results()
        failures = self.failures()
        json_file = self.folder / "compare.json"
        _replace_file(json_file, results.json_text(failures).encode())
        text_file = self.folder / "compare.md"
        _replace_file(text_file, results.markdown_page(failures).encode())
        picture_file = self.folder / "compare.png"
        write_scores(results.rows, panel_titles(results.metric_of, results.rows), picture_file)
        curves = read_curves(self.plan.runs)
        page_file = self.folder / "compare.html"
        states = [self._state(run) for run in self.plan.runs]
        write_page(page_file, comparison_page(results, states, failures, curves))
        written = [json_file, text_file, page_file, picture_file]
        if curves:
            curves_file = self.folder / "curves.png"
            write_curves(curves, curves_file)
            written.append(curves_file)
        return written

    @property
    def _command(self) -> str:
        command = f"electra-dist compare {shlex.quote(str(self._file))}"
        if self._glue is not None:
            command += f" --glue {shlex.quote(str(self._glue))}"
        return command


def _checkpoint_key(entry: str, run: PlannedRun, step: int) -> str:
    """Return the key under which a checkpoint's failure is recorded: run and step, as in "rtd-seed1 500"."""
    return f"{entry}-seed{run.seed} {step}"


def _replace_file(path: Path, data: bytes, permissions: int = SHARED) -> None:
    with replacing(path, permissions=permissions) as file:
        file.write(data)

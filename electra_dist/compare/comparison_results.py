"""Make the results of a comparison from its scores: tables, a Markdown page, a JSON file and the verdict.

Guarantee: everything follows from the scores that are passed, the config and the plan; nothing is read from disk. If a
median is of fewer seeds than the comparison has, it is shown with their number, and each failure is listed with its
reason. A degenerate result (all predictions equal) counts with its score, and is listed, too.

The average of a checkpoint is the mean of its scores on minimal pairs and on the tasks that are scored at all
checkpoints. A checkpoint that lacks one of these scores has no average.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Mapping, Sequence

from rich.table import Table

from electra_dist.compare.checkpoint_scores import CheckpointScore
from electra_dist.compare.comparison_config import AVERAGE, DETECTION, RANDOM, TRIGRAM, CompareConfig
from electra_dist.compare.comparison_runs import Plan, PlannedRun
from electra_dist.compare.learning_rates import RateChoice
from electra_dist.compare.measures import Measure
from electra_dist.compare.significance import REMARK, Verdict, difference_rows, differences_to, judge, verdict_lines
from electra_dist.config.secrets import without_secrets
from electra_dist.escapes import markdown_code, markdown_text
from electra_dist.model.counts import parameter_counts

_ANCHOR_NAMES = {RANDOM: "random initialisation", TRIGRAM: "trigram model"}
PAIR_REMARK = (
    "Margin: mean over the pairs of the grammatical sentence's score minus the other's, in nats. A masked language "
    "model does not see the scored token, or (word) that and the rest of its word. Means over the seeds."
)
_DETECTION_REMARK = (
    f"{DETECTION}: how well a discriminator tells the samples of its own generator from original tokens; objectives "
    f"without both have no score (-), and a better generator makes it harder."
)
_NUM_LAST = 3  # checkpoints at the end of each run over which a second table of differences takes the mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Run that did not finish, checkpoint that could not be scored, or seed of fine-tuning that failed."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    seed: int
    what: str  # what has failed and why, in one line


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Scores of one objective on one task after some steps: one of each seed, as fractions."""

    median: float
    low: float
    high: float
    scores: dict[int, float]  # seed -> score


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """Row of the table of scores: one objective after some number of steps, or the initial weights, with step 0."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    step: int
    flops: float  # training FLOPs up to that step
    columns: dict[str, ScoreSummary]  # task, or `AVERAGE` -> scores; a task without any score is left out


def summarize_rows(scores: Sequence[CheckpointScore], tasks: Mapping[str, bool]) -> list[ScoreRow]:
    """Group scores into table rows, by objective, in the order in which the objectives first occur, and then by step.

    `tasks` maps each task, in the order of the columns, to whether it counts in the average. The average is a column
    only if two or more tasks count.
    """
    scores_of_row: dict[tuple[str, int], list[CheckpointScore]] = {}  # keyed by (objective, step)
    for score in scores:
        scores_of_row.setdefault((score.entry, score.step), []).append(score)
    objectives = list(dict.fromkeys(score.entry for score in scores))
    row_keys = sorted(scores_of_row, key=lambda row_key: (objectives.index(row_key[0]), row_key[1]))

    rows = []
    for objective, step in row_keys:
        row_scores = scores_of_row[objective, step]
        columns = _summarize_columns(row_scores, tasks)
        rows.append(ScoreRow(entry=objective, step=step, flops=row_scores[0].flops, columns=columns))
    return rows


def _summarize_columns(row_scores: Sequence[CheckpointScore], tasks: Mapping[str, bool]) -> dict[str, ScoreSummary]:
    by_task = {task: _scores_by_seed(row_scores, task) for task in tasks}
    averaged_tasks = [task for task, is_averaged in tasks.items() if is_averaged]
    if len(averaged_tasks) > 1:
        by_task[AVERAGE] = _average_by_seed([by_task[task] for task in averaged_tasks])
    return {task: _summarize(by_seed) for task, by_seed in by_task.items() if by_seed}


def score_failures(scores: Sequence[CheckpointScore]) -> list[Failure]:
    """Return the failures that stored scores record, described as in "rte after 1,000 steps: degenerate: ..."."""
    failures = []
    for score in scores:
        for reason in score.measured.failures:
            description = f"{score.task} after {score.step:,} steps: {reason}"
            failures.append(Failure(entry=score.entry, seed=score.seed, what=description))
    return failures


def console_table(title: str, rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """Return texts, the titles first, as a table for the terminal."""
    titles, *rows_of_texts = rows
    table = Table(*titles, title=title, caption=caption)
    for texts in rows_of_texts:
        table.add_row(*texts)
    return table


def markdown_table(rows: Sequence[Sequence[str]], num_names: int = 1) -> list[str]:
    """Return texts, the titles first, as the lines of a Markdown table; no text may contain "|".

    The first `num_names` columns are aligned to the left, the others to the right.
    """
    titles, *rows_of_texts = (f"| {' | '.join(row)} |" for row in rows)
    alignment = "|" + "---|" * num_names + "--:|" * (len(rows[0]) - num_names)
    return [titles, alignment, *rows_of_texts]


def markdown(
    title: str,
    rows: Sequence[ScoreRow],
    failures: Sequence[Failure],
    num_seeds: int,
    notes: Sequence[str],
    sections: Sequence[str] = (),
) -> str:
    """Return a Markdown page with the table of scores and, below it, the failures.

    `notes` are lines before the table, `sections` lines between the table and the failures.
    """
    failure_lines = [f"* {failure.entry} seed {failure.seed}: {markdown_text(failure.what)}" for failure in failures]
    if not failure_lines:
        failure_lines = ["None."]

    lines = [
        f"# {markdown_text(title)}",
        "",
        *notes,
        "",
        *markdown_table(table_texts(rows, num_seeds)),
        "",
        *sections,
        "## Failed or degenerate",
        "",
        *failure_lines,
    ]
    return "\n".join(lines) + "\n"


def _scores_by_seed(scores: Sequence[CheckpointScore], task: str) -> dict[int, float]:
    """Return pretraining seed -> score on one task; seeds without a score are left out."""
    return {score.seed: score.value for score in scores if score.task == task and score.value is not None}


def _average_by_seed(by_task: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return seed -> mean over the tasks, from seed -> score of each task; seeds that lack a score are left out."""
    seeds_per_task = [set(by_seed) for by_seed in by_task]
    complete_seeds = set.intersection(*seeds_per_task)
    return {seed: statistics.fmean(by_seed[seed] for by_seed in by_task) for seed in sorted(complete_seeds)}


def _summarize(by_seed: dict[int, float]) -> ScoreSummary:
    values = list(by_seed.values())
    return ScoreSummary(median=statistics.median(values), low=min(values), high=max(values), scores=by_seed)


def _columns(rows: Sequence[ScoreRow]) -> list[str]:
    """Return the tasks with a score in any row, in the order in which they first occur, then the average."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))  # without repetitions, in order
    if AVERAGE in names:
        names.remove(AVERAGE)
        names.append(AVERAGE)
    return names


def table_texts(rows: Sequence[ScoreRow], num_seeds: int) -> list[list[str]]:
    """Return the table of scores as texts, its header first: median, lowest and highest seed in per cent."""
    columns = _columns(rows)
    return [["objective", "steps", "FLOPs", *columns], *(_row_texts(row, columns, num_seeds) for row in rows)]


def _row_texts(row: ScoreRow, columns: Sequence[str], num_seeds: int) -> list[str]:
    name = _ANCHOR_NAMES.get(row.entry, row.entry)
    num_scores = 1 if row.entry == TRIGRAM else num_seeds
    scores = [_score_text(row.columns.get(column), num_scores) for column in columns]
    return [name, f"{row.step:,}", f"{row.flops:.3g}", *scores]


def _score_text(summary: ScoreSummary | None, num_seeds: int) -> str:
    """Format median, lowest and highest score in per cent: "70.0 (60.0 to 90.0, 2 of 3 seeds)"; "-" for None."""
    if summary is None:
        return "-"
    num_scores = len(summary.scores)
    spread = f"{100 * summary.low:.1f} to {100 * summary.high:.1f}"
    if num_scores < num_seeds:
        spread += f", {num_scores} of {num_seeds} seeds"
    return f"{100 * summary.median:.1f} ({spread})"


class ComparisonResults:
    """Results of a comparison, computed from the scores that exist; some runs or scores may still be missing.

    `rows` are the rows of the table of scores. `metric_of` maps each column, except the average, to its metric.
    `differences` are those to `baseline` at the end of the runs, `mean_differences` those of the mean over the last
    `num_last` checkpoints.
    """

    def __init__(
        self,
        *,
        compare: CompareConfig,
        plan: Plan,
        measures: Sequence[Measure],
        scores: Sequence[CheckpointScore],
        title: str,
        command: str,
        criterion_origin: str,
        rates: Sequence[RateChoice] = (),
    ) -> None:
        """Group the scores into rows, and judge the criterion, if there is one.

        `criterion_origin` is a sentence that says when the criterion was stated; "" without one.
        """
        self.compare = compare
        self.plan = plan
        self._scores = scores
        self.title = title
        self.command = command
        self._criterion_origin = criterion_origin
        self.rates = rates

        existing = {score.task for score in scores}
        self.metric_of: dict[str, str] = {measure.name: measure.metric for measure in measures}
        # The initial weights have one row, with step 0. Only tasks that are scored at all checkpoints count in the
        # average: a task with `at: ends` lacks the rows in between.
        is_averaged = {measure.name: measure.at == "all" and measure.is_task for measure in measures}
        self.rows: list[ScoreRow] = summarize_rows(scores, is_averaged)

        self._last_scores = self._scores_at_end(num_checkpoints=1)
        names = [objective.name for objective in compare.objectives]
        self.baseline = names[0] if compare.criterion is None else compare.criterion.baseline
        self._baseline_of = self._baselines(measures, existing)
        self.differences = differences_to(self._baseline_of, self._last_scores, names, self.baseline)
        self._difference_rows = difference_rows(self.differences, names, self.baseline, self._baseline_of)
        self.num_last = min(_NUM_LAST, len(compare.evaluate_at))
        scores_of_last = self._scores_at_end(self.num_last)
        mean_baseline_of = {
            measure.name: self._baseline_of[measure.name]
            for measure in measures
            if measure.at == "all" and measure.name in self._baseline_of
        }
        self.mean_differences = differences_to(mean_baseline_of, scores_of_last, names, self.baseline, self.num_last)
        self._mean_difference_rows = difference_rows(self.mean_differences, names, self.baseline, mean_baseline_of)
        self.verdict: Verdict | None = None
        if compare.criterion is not None:
            self.verdict = judge(compare.criterion, self._last_scores, len(compare.seeds))

    def _scores_at_end(self, num_checkpoints: int) -> list[CheckpointScore]:
        """Return the scores of the last `num_checkpoints` checkpoints of each run."""
        steps_of = {(run.entry, run.seed): run.marks[-num_checkpoints:] for run in self.plan.runs}
        return [score for score in self._scores if score.step in steps_of.get((score.entry, score.seed), ())]

    def _baselines(self, measures: Sequence[Measure], existing: Collection[str]) -> dict[str, str]:
        """Return for each existing column of scores the objective whose score is subtracted from the others'.

        It is the baseline or, if that has no score in the column, the first objective that can have one.
        """
        names = [self.baseline, *(objective.name for objective in self.compare.objectives)]
        config_of = {name: self.plan.of(name)[0].config for name in names}
        baselines = {}
        for measure in measures:
            scored = [name for name in names if measure.applies_to(config_of[name].objective)]
            if scored and measure.name in existing:
                baselines[measure.name] = scored[0]
        return baselines

    def table(self) -> Table:
        """Return the scores as a table for the terminal: one row per objective and number of steps."""
        return console_table(self.title, table_texts(self.rows, len(self.compare.seeds)))

    def difference_table(self) -> Table:
        """Return the differences of the objectives' final scores to the baseline's, as a table for the terminal."""
        return console_table("differences at the end of the runs", self._difference_rows, caption=REMARK)

    def verdict_lines(self) -> list[str]:
        """Return lines of text: the criterion, its verdict, and when it was stated; no lines without a criterion."""
        if self.compare.criterion is None or self.verdict is None:
            return []
        return [*verdict_lines(self.compare.criterion, self.verdict), self._criterion_origin]

    def json_text(self, failures: Sequence[Failure]) -> str:
        """Return the content of compare.json: config, runs, table, single scores, differences and failures."""
        tree = {
            "command": self.command,
            "budget_flops": self.plan.budget_flops,
            "config": without_secrets(self.compare.model_dump(mode="json")),
            "runs": [_describe_run(run) for run in self.plan.runs],
            "table": [dataclasses.asdict(row) for row in self.rows],
            "scores": [score.record() for score in self._scores],
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "failures": [dataclasses.asdict(failure) for failure in failures],
        }
        if self.rates:
            tree["learning_rates"] = [choice.fields() for choice in self.rates]
        if self.verdict is not None:
            tree["verdict"] = {"answer": self.verdict.answer, "passed": self.verdict.passed}
        return json.dumps(tree, indent=1) + "\n"

    def markdown_page(self, failures: Sequence[Failure]) -> str:
        """Return the content of compare.md: how the comparison was made, the tables, the verdict, and what failed."""
        seeds = ", ".join(map(str, self.compare.seeds))
        remark = (
            f"{markdown_code(self.command)}: {self.plan.budget_flops:.3g} training FLOPs a run, seeds {seeds}. "
            f"Per cent: median (lowest to highest seed)."
        )
        notes = [remark, *([_DETECTION_REMARK] if DETECTION in self._baseline_of else [])]
        sections = _section("Differences at the end of the runs", REMARK, markdown_table(self._difference_rows))
        if self.num_last > 1:
            title = f"Differences of the mean over the last {self.num_last} checkpoints"
            sections += _section(title, REMARK, markdown_table(self._mean_difference_rows))
        pairs = self.pair_table()
        if pairs:
            sections += _section("Minimal pairs at the end of the runs", PAIR_REMARK, markdown_table(pairs, 2))
        if self.rates:
            lines = [f"* {markdown_text(choice.line())}" for choice in self.rates]
            sections += ["## Learning rates", "", *lines, ""]
        if self.verdict is not None:
            sections += ["## Criterion", "", *(f"* {markdown_text(line)}" for line in self.verdict_lines()), ""]
        return markdown(self.title, self.rows, failures, len(self.compare.seeds), notes=notes, sections=sections)

    def pair_table(self) -> list[list[str]]:
        """Return the table of the results on minimal pairs as texts, the header first; [] without pairs.

        A row has the metrics of one objective on one set of pairs, each as a mean over the seeds.
        """
        rows: dict[tuple[str, str], list[dict[str, float]]] = {}  # (objective, pairs) -> the metrics of each seed
        keys: dict[str, None] = {}  # names of all metrics, used as an ordered set
        anchor_scores = [score for score in self._scores if score.entry in _ANCHOR_NAMES]
        for score in (*anchor_scores, *self._last_scores):
            if score.measured.mode == "pairs":
                entry = _ANCHOR_NAMES.get(score.entry, score.entry)
                rows.setdefault((entry, score.task), []).append(score.measured.metrics)
                keys.update(dict.fromkeys(score.measured.metrics))
        if not keys:
            return []
        table = [["objective", "pairs", *keys]]
        for (entry, task), metrics_of_seeds in rows.items():
            means = []
            for key in keys:
                values = [metrics[key] for metrics in metrics_of_seeds if key in metrics]
                means.append(f"{statistics.fmean(values):.3f}" if values else "-")
            table.append([entry, task, *means])
        return table


def _section(title: str, remark: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", remark, "", *lines, ""]


def _describe_run(run: PlannedRun) -> dict[str, object]:
    """Return what compare.json records of a run; steps and FLOPs are those of the whole run, finished or not."""
    num_steps = run.marks[-1]
    return {
        "objective": run.entry,
        "seed": run.seed,
        "run": run.config.run_dir,
        "steps": num_steps,
        "flops": run.flops(num_steps),
        "parameters": parameter_counts(run.config.model, run.config.objective)._asdict(),
    }

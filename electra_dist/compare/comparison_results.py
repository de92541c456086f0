"""Make the results of a comparison from its scores: tables, a Markdown page, a JSON file and the verdict.

Guarantee: everything follows from the scores that are passed, the config and the plan; nothing is read from disk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.table import Table

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.comparison_config import CONTEXT_AUC, CompareConfig
from electra_dist.compare.comparison_plan import Cell, Plan
from electra_dist.compare.criterion import Verdict, judge, verdict_lines
from electra_dist.compare.measures.measure import Measure
from electra_dist.compare.score_tables import Failure, ScoreRow, console_table, markdown, summarize_rows
from electra_dist.compare.significance import (
    console_differences,
    difference_rows,
    markdown_differences,
    paired_difference,
)
from electra_dist.config.secrets import without_secrets
from electra_dist.escapes import markdown_code, markdown_text
from electra_dist.model.parameter_counts import parameter_counts


class ComparisonResults:
    """Results of a comparison, computed from the scores that exist; some runs or scores may still be missing.
    `rows` are the rows of the table of scores. `metric_of` maps each column, except the average, to its metric.
    """

    def __init__(
        self,
        *,
        compare: CompareConfig,
        plan: Plan,
        measures: Sequence[Measure],
        scores: Sequence[Score],
        title: str,
        command: str,
        criterion_origin: str,
    ) -> None:
        """Group the scores into rows, and judge the criterion; `criterion_origin`, or "", says when it was stated."""
        self._compare = compare
        self._plan = plan
        self._scores = scores
        self._title = title
        self._command = command
        self._criterion_origin = criterion_origin

        existing = {score.task for score in scores}
        self.metric_of: dict[str, str] = {measure.name: measure.metric for measure in measures}
        self._columns = [name for name in self.metric_of if name in existing]
        # The initial weights have one row, with step 0. Only tasks that are scored at all checkpoints count in the
        # average: a task with `at: ends` lacks the rows in between. The context AUC is no task.
        is_averaged = {measure.name: measure.at == "all" and measure.name != CONTEXT_AUC for measure in measures}
        self.rows: list[ScoreRow] = summarize_rows(scores, is_averaged)

        last_step_of = {(cell.entry, cell.seed): cell.marks[-1] for cell in plan.cells}
        self._last_scores = [score for score in scores if last_step_of.get((score.entry, score.seed)) == score.step]
        names = [objective.name for objective in compare.objectives]
        self._baseline = names[0] if compare.criterion is None else compare.criterion.baseline
        self._difference_rows = difference_rows(self._last_scores, names, self._baseline, self._columns)
        self._verdict: Verdict | None = None
        if compare.criterion is not None:
            self._verdict = judge(compare.criterion, self._last_scores, len(compare.seeds))

    def table(self) -> Table:
        """Return the scores as a table for the terminal: one row per objective and number of steps."""
        return console_table(self._title, self.rows, len(self._compare.seeds))

    def difference_table(self) -> Table:
        """Return the differences of the objectives' final scores to the baseline's, as a table for the terminal."""
        return console_differences(self._difference_rows, self._baseline, self._columns)

    def verdict_lines(self) -> list[str]:
        """Return lines of text: the criterion, its verdict, and when it was stated; no lines without a criterion."""
        if self._compare.criterion is None or self._verdict is None:
            return []
        return [*verdict_lines(self._compare.criterion, self._verdict), self._criterion_origin]

    def json_text(self, failures: Sequence[Failure]) -> str:
        """Return the content of compare.json: config, runs, table, single scores, differences and failures."""
        tree = {
            "command": self._command,
            "budget_flops": self._plan.budget_flops,
            "config": without_secrets(self._compare.model_dump(mode="json")),
            "runs": [_describe_run(cell) for cell in self._plan.cells],
            "table": [dataclasses.asdict(row) for row in self.rows],
            "scores": [dataclasses.asdict(score) for score in self._scores],
            "differences": self._difference_records(),
            "failures": [dataclasses.asdict(failure) for failure in failures],
        }
        if self._verdict is not None:
            tree["verdict"] = {"answer": self._verdict.answer, "passed": self._verdict.passed}
        return json.dumps(tree, indent=1) + "\n"

    def markdown_page(self, failures: Sequence[Failure]) -> str:
        """Return the content of compare.md: how the comparison was made, the tables, the verdict, and what failed."""
        seeds = ", ".join(map(str, self._compare.seeds))
        remark = (
            f"{markdown_code(self._command)}: {self._plan.budget_flops:.3g} training FLOPs a run, seeds {seeds}. "
            f"Per cent: median (lowest to highest seed)."
        )
        sections = markdown_differences(self._difference_rows, self._baseline, self._columns)
        if self._verdict is not None:
            sections += ["## Criterion", "", *(f"* {markdown_text(line)}" for line in self.verdict_lines()), ""]
        return markdown(self._title, self.rows, failures, len(self._compare.seeds), notes=[remark], sections=sections)

    def _difference_records(self) -> list[dict[str, object]]:
        records: list[dict[str, object]] = []
        for objective in self._compare.objectives:
            if objective.name == self._baseline:
                continue
            for column in self._columns:
                difference = paired_difference(self._last_scores, objective.name, self._baseline, column)
                if difference is not None:
                    records.append(dataclasses.asdict(difference))
        return records


def _describe_run(cell: Cell) -> dict[str, object]:
    """Return what compare.json records of a run; steps and FLOPs are those of the whole run, finished or not."""
    num_steps = cell.marks[-1]
    return {
        "objective": cell.entry,
        "seed": cell.seed,
        "run": cell.config.run_dir,
        "steps": num_steps,
        "flops": cell.flops(num_steps),
        "parameters": parameter_counts(cell.config.model, cell.config.objective)._asdict(),
    }

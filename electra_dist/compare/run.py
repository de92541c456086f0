"""The comparison from its first run to its picture, going on wherever it was interrupted.

Guarantee: everything that can be wrong with a config, a corpus or a task is said before the first run starts. One run
that fails, or one checkpoint that cannot be scored, ends nothing else: it is named in all results, and tried again by
the next start. Table and picture are written after each run, of what there is.

Order: seed by seed; of each the random initialisation first, then every objective: pretraining, then its checkpoints,
while up to `parallel - 1` of the next runs are at work beside it.

Cost: what its runs and scores cost; a start with nothing left to do takes the seconds of reading the tasks.

Where it stops: one machine. On a GPU the scoring process keeps its own context (some hundred MB)
on the first device while runs are at work.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from electra_dist.compare.config import RANDOM, CompareConfig
from electra_dist.compare.picture import panel_titles, write_picture
from electra_dist.compare.plan import Cell, Plan, make_plan
from electra_dist.compare.pretraining import Pretrainings, Progress, saved_steps
from electra_dist.compare.scoring import Measure, Score, Scores, open_measures
from electra_dist.compare.table import Failure, ScoreRow, console_table, markdown, score_failures, summarize_rows
from electra_dist.config_file import dump_yaml
from electra_dist.errors import UserError
from electra_dist.model.parameters import parameter_counts
from electra_dist.store.files import replacing
from electra_dist.train.inputs import check_inputs

Note = Callable[[str], None]
_RESULTS = ("compare.json", "compare.md", "compare.png")


class Comparison:
    """Everything opened and checked; `run` does what is left to do."""

    def __init__(self, compare: CompareConfig, file: Path, glue: Path | None) -> None:
        """Writes nothing but the output folder's vocabulary and the configs of its runs.

        Args:
            file: where `compare` was read.
            glue: folder of the GLUE tasks.

        Raises:
            UserError: something is wrong with a config, the corpus or a task.
        """
        self._compare, self._file, self._glue = compare, file, glue
        self.plan: Plan = make_plan(compare, file)
        self._measures: list[Measure] = open_measures(compare, file, glue, self.plan.cells[0])
        self.folder = Path(compare.output)
        for cell in self.plan.cells:
            inputs = check_inputs(cell.config, compare.ranks)
        entry = inputs.corpus.manifest.tokenizer
        vocab_file = self.folder / entry.vocab_file
        for path, data in [
            (vocab_file, inputs.corpus.store.read(entry.vocab_file)),
            *((cell.file, dump_yaml(cell.config).encode()) for cell in self.plan.cells),
        ]:
            with replacing(path) as out:
                out.write(data)
        self._scores = Scores(self.folder / "scores", vocab_file, inputs.corpus.manifest.fingerprint)
        self._failures: dict[str, Failure] = {}  # by the run's name, or the baseline's

    def run(self, progress: Progress, note: Note) -> bool:
        """All that is not there yet; says whether every run was finished and scored."""
        with Pretrainings(self.plan.cells, self._compare.ranks, self._compare.parallel) as runs:
            for number, cell in enumerate(self.plan.cells, start=1):
                name = f"[{number}/{len(self.plan.cells)}] {cell.name}"

                def report(what: str, done: int, total: int, name: str = name) -> None:
                    progress(f"{name} {what}", done, total)

                if cell.entry == self._compare.objectives[0].name:
                    self._score(RANDOM, cell, 0, report)
                failure = runs.result(cell, report)
                if failure:
                    self._failures[cell.name] = Failure(entry=cell.entry, seed=cell.seed, what=failure)
                saved = saved_steps(cell)
                for step in cell.marks:
                    if step in saved:
                        self._score(cell.entry, cell, step, report)
                self.write()
                note(f"{name}: {failure or f'{cell.marks[-1]:,} steps, scored at {len(cell.marks)}'}")
        return not self._failures

    def _score(self, entry: str, cell: Cell, step: int, progress: Progress) -> None:
        due = [measure for measure in self._measures if measure.at == "all" or step in (0, cell.marks[-1])]
        if missing := self._scores.missing(entry, cell, step, due):
            try:
                self._scores.make(entry, cell, step, missing, progress)
            except UserError as error:
                what = f"after {step:,} steps: {error}"
                self._failures[f"{entry}-seed{cell.seed} {step}"] = Failure(entry=entry, seed=cell.seed, what=what)

    def scores(self) -> list[Score]:
        """All that there are: the baseline's, then those of each objective."""
        wanted = [(RANDOM, cell, 0) for cell in self.plan.of(self._compare.objectives[0].name)]
        for entry in self._compare.objectives:
            wanted += [(entry.name, cell, step) for cell in self.plan.of(entry.name) for step in cell.marks]
        found = (self._scores.find(*each, measure) for each in wanted for measure in self._measures)
        return [score for score in found if score is not None]

    def failures(self) -> list[Failure]:
        """Everything that failed, by now."""
        return [*self._failures.values(), *score_failures(self.scores())]

    def table(self) -> Table:
        """For a terminal."""
        return console_table(self._title, self._rows(), len(self._compare.seeds))

    def write(self) -> list[Path]:
        """compare.json, compare.md and compare.png; returns their paths."""
        rows, failures = self._rows(), self.failures()
        paths = [self.folder / name for name in _RESULTS]
        tree = {
            "command": self._command,
            "budget_flops": self.plan.budget_flops,
            "config": self._compare.model_dump(mode="json"),
            "runs": [self._describe(cell) for cell in self.plan.cells],
            "table": [dataclasses.asdict(row) for row in rows],
            "scores": [dataclasses.asdict(score) for score in self.scores()],
            "failures": [dataclasses.asdict(failure) for failure in failures],
        }
        notes = [
            f"`{self._command}`: {self.plan.budget_flops:.3g} training FLOPs a run, seeds "
            f"{', '.join(map(str, self._compare.seeds))}. Per cent: median (lowest to highest seed)."
        ]
        page = markdown(self._title, rows, failures, len(self._compare.seeds), notes)
        for path, text in zip(paths, (json.dumps(tree, indent=1) + "\n", page)):
            with replacing(path) as out:
                out.write(text.encode())
        write_picture(rows, panel_titles({m.name: m.metric for m in self._measures}, rows), paths[2])
        return paths

    @property
    def _title(self) -> str:
        return f"{self._file.stem}: objectives at equal FLOPs"

    @property
    def _command(self) -> str:
        glue = f" --glue {shlex.quote(str(self._glue))}" if self._glue else ""
        return f"electra-dist compare {shlex.quote(str(self._file))}{glue}"

    def _rows(self) -> list[ScoreRow]:
        columns = {measure.name: measure.at == "all" for measure in self._measures}
        return summarize_rows(self.scores(), columns)

    def _describe(self, cell: Cell) -> dict[str, object]:
        return {
            "objective": cell.entry,
            "seed": cell.seed,
            "run": cell.config.run_dir,
            "steps": cell.marks[-1],
            "flops": cell.flops(cell.marks[-1]),
            "parameters": parameter_counts(cell.config.model, cell.config.objective)._asdict(),
        }

"""Scores a run's newest checkpoint: context AUC, minimal pairs, and probes on a treebank that was carried along.

    python benchmarks/one_gpu_parts/scores.py RUN --data carried/one_gpu

Guarantee: each score is in RUN/scores.json as soon as it is computed. A script that was interrupted computes the
missing ones only. A score counts only for the checkpoint, the data and the settings from which it was computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from one_gpu_parts.experiment import PAIRS, TREEBANK

from electra_dist.compare.comparison_config import TaskEntry
from electra_dist.compare.measures.context_measure import ContextMeasure
from electra_dist.compare.measures.language_measures import BuiltInPairsMeasure, PairFilesMeasure, TreebankMeasure
from electra_dist.compare.measures.measure import Measure, Measured
from electra_dist.config import Config
from electra_dist.errors import EXIT_USER_ERROR, UserError
from electra_dist.finetune.training_loop import Progress
from electra_dist.pretrained.load_encoder import Pretrained, load_pretrained
from electra_dist.pretrained.run_weights import load_run_weights
from electra_dist.store.atomic_files import replacing
from electra_dist.train.input_checks import open_corpus

SCORES_FILE = "scores.json"
# As in configs/compare_tiny_rtd.yaml.
_PAIRS_PER_KIND = 200
_PROBE_SENTENCES = 2000
_PROGRESS_S = 10.0  # between two lines about one measure
Json = dict[str, Any]


def open_measures(data: Path, config: Config) -> list[Measure]:
    """Return the ways to score: context AUC, built-in minimal pairs, those in DATA/pairs, probes on DATA/treebank.

    Args:
        data: folder of the carried data; what it lacks is not scored.
        config: config of the run, with its held-out corpus.

    Raises:
        UserError: a file is not valid.
    """
    measures: list[Measure] = [BuiltInPairsMeasure(_PAIRS_PER_KIND)]
    if config.data.heldout:
        heldout = open_corpus("data.heldout", config.data.heldout, config.data, config.model.vocab_size)
        measures.insert(0, ContextMeasure(heldout))
    if (data / PAIRS).exists():
        measures += [PairFilesMeasure(path, _PAIRS_PER_KIND) for path in sorted((data / PAIRS).iterdir())]
    treebank = data / TREEBANK
    if treebank.exists():
        tags = TaskEntry(how="tags", data=str(treebank), max_train=_PROBE_SENTENCES)
        heads = TaskEntry(how="heads", data=str(treebank), max_train=_PROBE_SENTENCES)
        measures += [
            TreebankMeasure("tags", treebank, "tags", tags),
            TreebankMeasure("heads", treebank, "heads", heads),
        ]
    return measures


def read_scores(run_dir: Path) -> list[Json]:
    """Return the scores in RUN/scores.json, in the order in which they were computed; [] if there is no file."""
    path = run_dir / SCORES_FILE
    return json.loads(path.read_text()) if path.exists() else []


def score_run(run_dir: Path, data: Path, console: Console) -> list[Json]:
    """Compute the scores that RUN/scores.json lacks, write each at once, and return all of them.

    A measure that cannot score this model, because its vocabulary lacks the words, is recorded with the reason.

    Args:
        run_dir: folder of a run with a checkpoint.
        data: folder of the carried data.
        console: where progress is shown.

    Raises:
        UserError: the run has no checkpoint, or a data file is not valid.
    """
    weights = load_run_weights(run_dir)
    step = weights.state.step
    known = {(score["name"], score["digest"]): score for score in read_scores(run_dir) if score["step"] == step}
    measures = open_measures(data, weights.config)
    encoder: Pretrained | None = None  # loaded when the first score is missing
    for measure in measures:
        if (measure.name, measure.digest) in known:
            continue
        encoder = encoder or load_pretrained(str(run_dir))
        console.print(f"scoring: {measure.name}")
        known[measure.name, measure.digest] = _score(measure, encoder, step, console)
        _write_scores(run_dir, _in_order(known, measures))
    return _in_order(known, measures)


def _score(measure: Measure, encoder: Pretrained, step: int, console: Console) -> Json:
    """Score an encoder, which has the weights after `step` steps, by a measure; return the entry of scores.json."""
    begin = time.monotonic()
    try:
        measured = measure.score(encoder, _progress_lines(console))
    except UserError as error:
        measured = Measured(value=None, failures=(str(error),))
    seconds = time.monotonic() - begin
    return _record(measure.name, measure.metric, measure.digest, step, measured, seconds)


def _in_order(scores: dict[tuple[str, str], Json], measures: Sequence[Measure]) -> list[Json]:
    """Return the scores by any of the measures, in the order of the measures; the keys are (name, digest)."""
    keys = [(measure.name, measure.digest) for measure in measures]
    return [scores[key] for key in keys if key in scores]


def _write_scores(run_dir: Path, scores: list[Json]) -> None:
    """Replace RUN/scores.json."""
    with replacing(run_dir / SCORES_FILE) as file:
        file.write(json.dumps(scores, indent=1).encode() + b"\n")


def _progress_lines(console: Console) -> Progress:
    """Return a progress callback that prints a line every 10 seconds; the output of a leg is not a terminal."""
    last_line = time.monotonic()

    def report(activity: str, done: int, total: int) -> None:
        """Print how many parts of an activity are done, if the last line is old enough."""
        nonlocal last_line
        if time.monotonic() - last_line >= _PROGRESS_S:
            last_line = time.monotonic()
            console.print(f"  {activity}: {done:,} of {total:,}")

    return report


def _record(name: str, metric: str, digest: str, step: int, measured: Measured, seconds: float) -> Json:
    """Return one entry of scores.json. The score and its standard error are fractions; None if they are not known."""
    return {
        "name": name,
        "metric": metric,
        "step": step,
        "score": measured.value,
        "standard_error": measured.standard_error,
        "layer": measured.layer,
        "failures": list(measured.failures),
        "details": measured.details,
        "seconds": seconds,
        "digest": digest,
    }


def main() -> None:
    """Score the run of the command line, and print a table; print a user's error as one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--data", type=Path, required=True, help="folder with pairs/ and treebank/, as far as carried")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    try:
        scores = score_run(arguments.run, arguments.data, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    table = Table("score", "metric", "%", "s.e.", "layer", title=f"{arguments.run} at step {scores[0]['step']:,}")
    for score in scores:
        table.add_row(
            score["name"], score["metric"], _percent(score["score"]), _percent(score["standard_error"]),
            "" if score["layer"] is None else str(score["layer"]),
        )  # fmt: skip
    console.print(table)
    for score in scores:
        for failure in score["failures"]:
            console.print(f"{score['name']}: {failure}")


def _percent(fraction: float | None) -> str:
    """Format a fraction as a percentage with one decimal; "-" for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


if __name__ == "__main__":
    main()

"""Commands about pretrained models: `minimal-pairs`, `compare` and `score`.

Modules that a command needs are imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from electra_dist.console import Console
from electra_dist.errors import EXIT_CRASH, StoreMissing, UserError
from electra_dist.escapes import printable
from electra_launcher.cli.command_output import open_console, progress_bar, resumable, write_json
from electra_launcher.cli.options import TowerOption, Vocab

if TYPE_CHECKING:
    from rich.table import Table

    from electra_dist.compare.comparison_runs import Plan as ComparisonPlan
    from electra_dist.scoring.minimal_pairs import PairScore
    from electra_dist.scoring.text_scores import TextScore

_BUILT_IN_PAIRS = 200  # pairs of each phenomenon that `minimal-pairs` makes by default
_STDIN = "-"


OptionalModel = Annotated[
    str | None,
    typer.Option("--model", help="a run, a Hugging Face folder, ORG/NAME on the Hub, or random:CONFIG.yaml"),
]


def minimal_pairs(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="the model, in place of --model: folder of a run or of a model", show_default=False
        ),
    ] = None,
    model: OptionalModel = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            help="minimal pairs of your own: a .jsonl file in BLiMP's format, .tsv in MultiBLiMP's, .txt in Zorro's, "
            "or a folder of such files; repeat the option for several. Default: built-in pairs on number agreement in "
            "English"
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="number of sentence pairs of each kind, always the same ones. Default: 200 of the built-in pairs, "
            "all pairs of the files",
        ),
    ] = None,
    readout: Annotated[
        Literal["token", "word"],
        typer.Option(
            help="what a masked language model does not see when it scores a token of a --file: this token alone, or "
            "the rest of its word, too, which does not favour words of several tokens; both accuracies are printed"
        ),
    ] = "token",
    tower: TowerOption = "discriminator",
    vocab: Vocab = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to which the scores are written, too; default: none")
    ] = None,
) -> None:
    """Print how often a model prefers a grammatical sentence to an ungrammatical one that differs little.

    The built-in pairs test number agreement in English, such as singular and plural verbs; --file reads others, such
    as BLiMP's. Nothing is trained. A standard error (s.e.) is that of the choice of pairs.
    """
    from electra_dist.pretrained.locate import locate_model
    from electra_dist.scoring.pair_files import read_pair_files

    spec = source if model is None else model
    if spec is None or (source is not None and model is not None):
        raise UserError("name one model: electra-dist minimal-pairs MODEL, or --model MODEL")
    spec = locate_model(spec, tower)  # A wrong name or file is found before torch is imported.
    sentence_pairs = read_pair_files(file).sample(pairs).pairs if file else None

    from electra_dist.pretrained.encoder import device_of_choice, load_pretrained
    from electra_dist.scoring.minimal_pairs import (
        remarks_on_kinds,
        remarks_on_pairs,
        score_minimal_pairs,
        score_sentence_pairs,
    )

    encoder = load_pretrained(spec, tower, vocab)
    device = device_of_choice()
    out = open_console()
    with progress_bar(Console(stderr=True)) as progress:
        if sentence_pairs is None:
            scores = score_minimal_pairs(encoder, pairs or _BUILT_IN_PAIRS, device, progress)
            remarks = remarks_on_kinds(encoder, scores)
        else:
            scores = score_sentence_pairs(encoder, sentence_pairs, device, progress, readout)
            remarks = remarks_on_pairs(encoder, sentence_pairs)
    out.print(_pairs_table(scores, encoder.name))
    for line in remarks:
        out.print(line, soft_wrap=True)
    if output:
        trees = [{key: value for key, value in score._asdict().items() if key != "hits"} for score in scores]
        write_json(output, {"model": encoder.name, "scores": trees})


def _pairs_table(scores: Sequence[PairScore], name: str) -> Table:
    """Return a table of a model's scores on minimal pairs, a row for each phenomenon; `name` is the model's."""
    from rich.table import Table

    readouts = list(scores[-1].accuracy_by_readout)
    table = Table(
        "phenomenon",
        "pairs",
        "accuracy",
        "s.e.",
        *(f"by {readout}" for readout in readouts),
        "margin",
        "example",
        title=f"{name}: minimal pairs (chance 50 %; margin in nats)",
    )
    for score in scores:
        of_readouts = [score.accuracy_by_readout[readout] for readout in readouts]
        shares = [score.accuracy, score.standard_error, *of_readouts]
        percents = [f"{100 * share:.1f}" for share in shares]
        table.add_row(score.phenomenon, str(score.pairs), *percents, f"{score.margin:.2f}", score.example)
    return table


def compare(
    file: Annotated[Path, typer.Argument(help="YAML file of the comparison, such as configs/compare_cpu.yaml")],
    glue: Annotated[
        Path | None,
        typer.Option(help="folder of the GLUE download, with CoLA/train.tsv and so on; default: `data` of each task"),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="check everything and print the runs, but start none")] = False,
) -> None:
    """Pretrain one model per objective at equal FLOPs, score their checkpoints, and write a page and tables.

    The differences to the baseline are printed with their standard errors, and the criterion of the file with its
    verdict.

    After an interrupt, run the same command again: it continues, and finished runs and scores are not repeated.

    Exit codes: 0 done, 1 a run or a checkpoint failed (each is listed), 75 interrupted, 78 invalid config or data.
    """
    from electra_dist.compare.comparison_config import CompareConfig
    from electra_dist.config.load import load_section

    config = load_section(file, CompareConfig)  # A mistake in it is found before torch is imported.
    from electra_dist.compare.comparison import Comparison

    out = open_console()
    comparison = Comparison(config, file, glue)
    if comparison.search.plan is not None:
        out.print("short runs first, which choose the learning rates that are not chosen yet:")
        out.print(_plan_table(comparison.search.plan))
    out.print(_plan_table(comparison.plan))
    if dry_run:
        return
    # SIGTERM raises KeyboardInterrupt like Ctrl-C: both stop the runs in order, so that their ranks save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with resumable("finished runs and scores are kept"), progress_bar(out) as progress:
        is_complete = comparison.run(progress, out.print)
    results = comparison.results()
    out.print(results.table())
    out.print(results.difference_table())
    for line in results.verdict_lines():
        out.print(line)
    for failure in comparison.failures():
        out.print(f"failed: {failure.entry} seed {failure.seed}: {failure.what}")
    written_files = comparison.write()
    for path in written_files:
        out.print(path)
    if not is_complete:
        raise typer.Exit(EXIT_CRASH)


def _plan_table(plan: ComparisonPlan) -> Table:
    """Return a table of a comparison's runs: steps, FLOPs, and these in per cent of the budget of a run (near 100)."""
    from rich.table import Table

    table = Table("run", "steps", "FLOPs", "of the budget", title=f"{plan.budget_flops:.4g} FLOPs a run")
    for run in plan.runs:
        num_steps = run.marks[-1]  # The marks are the steps at which the run is scored; the last one is its end.
        flops = run.flops(num_steps)
        table.add_row(run.name, f"{num_steps:,}", f"{flops:.4g}", f"{flops / plan.budget_flops:.2%}")
    return table


class TextLine(NamedTuple):
    """Text of one input line, with the numbers of the line and of its group."""

    line: int  # number of the line, from 1
    group: int  # number of its group, from 1; a group is a run of lines without a blank line between them
    text: str


def read_text_lines(data: bytes, name: str) -> list[TextLine]:
    r"""Return the texts of an input in UTF-8, one for each line that is not blank.

    A byte order mark is left out, and `\r\n` ends a line, too. Raises UserError, which gives the input's `name`, if
    there is no text or a line is not UTF-8.
    """
    texts: list[TextLine] = []
    group = 0
    previous_is_blank = True
    for number, raw_line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw_line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise UserError(f"{name}:{number}: not UTF-8; convert the file to UTF-8") from None
        if not text:
            previous_is_blank = True
            continue
        if previous_is_blank:
            group += 1
        previous_is_blank = False
        texts.append(TextLine(line=number, group=group, text=text))
    if not texts:
        raise UserError(f"{name}: no text; write one text on each line")
    return texts


def ranks(texts: Sequence[TextLine], scores: Sequence[float]) -> list[tuple[int, int]]:
    """Rank the texts of each group: the highest score first, equal scores by line.

    Returns (index in `texts`, rank from 1) of every text, group by group.
    """
    ranked: list[tuple[int, int]] = []
    for _, group in itertools.groupby(range(len(texts)), key=lambda index: texts[index].group):
        best_first = sorted(group, key=lambda index: -scores[index])
        ranked += [(index, rank) for rank, index in enumerate(best_first, start=1)]
    return ranked


def score(
    model: Annotated[
        str, typer.Option(help="a run, a Hugging Face folder, ORG/NAME on the Hub, or random:CONFIG.yaml")
    ],
    texts: Annotated[
        str, typer.Argument(metavar="FILE", help="one text on each line, UTF-8; default, and -: standard input")
    ] = _STDIN,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="also print a value for each token, below its text")
    ] = False,
    rerank: Annotated[
        bool, typer.Option("--rerank", help="sort the lines of each group, which an empty line ends, best first")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object for each text")] = False,
    tower: TowerOption = "discriminator",
) -> None:
    """Print how plausible a pretrained model finds each text of a file, as SCORE, a tab, and the text.

    Higher is more plausible. A longer text has a lower score: compare texts of about the same length.

    The score is a sum of log-probabilities over the tokens: that each token is the original one (a discriminator), or
    of each token given all others (a masked language model; Electric, up to a constant for each token). Scores of
    different models are not comparable. --tokens prints the probability that a token was replaced or, for models that
    give none, its log-probability.
    """
    from electra_dist.pretrained.locate import locate_model

    lines = read_text_lines(_read_texts(texts), "standard input" if texts == _STDIN else texts)
    located = locate_model(model, tower)  # A wrong name or file is found before torch is imported.
    from electra_dist.pretrained.encoder import device_of_choice, load_pretrained
    from electra_dist.scoring.text_scores import TextScorer

    scorer = TextScorer(load_pretrained(located, tower), device_of_choice())
    with progress_bar(Console(stderr=True)) as progress:
        scores = scorer.score([line.text for line in lines], progress)
        if not rerank:
            for line, text_score in zip(lines, scores, strict=True):
                _print_score(line, text_score, tokens, as_json)
        else:
            scores_of_lines = list(scores)
    if rerank:
        _print_ranked(lines, scores_of_lines, tokens, as_json)
    if not as_json:
        print("higher is more plausible; a longer text has a lower score", file=sys.stderr)


def _read_texts(texts: str) -> bytes:
    """Read the file `texts`, or stdin if it is "-"; raise UserError if there is no such file."""
    from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular, readable

    if texts == _STDIN:
        return sys.stdin.buffer.read()
    file = Path(texts)
    try:
        with readable(file):
            return read_regular(file, MOST_DATA_BYTES)
    except StoreMissing:
        raise UserError(f"{file}: no such file; give a file with one text on each line, or - to read them") from None


def _print_ranked(lines: Sequence[TextLine], scores: Sequence[TextScore], tokens: bool, as_json: bool) -> None:
    """Print each group of candidate texts, best text first; without JSON, empty lines separate the groups."""
    previous_group = 1
    for index, rank in ranks(lines, [text_score.score for text_score in scores]):
        line = lines[index]
        if line.group != previous_group and not as_json:
            print()
        previous_group = line.group
        _print_score(line, scores[index], tokens, as_json, rank)


def _print_score(line: TextLine, text_score: TextScore, tokens: bool, as_json: bool, rank: int | None = None) -> None:
    """Print one text with its score and, with `tokens`, a second line of token values; or all as a JSON object."""
    is_for_people = sys.stdout.isatty()  # a program gets the text itself, a terminal no control that is in it
    if as_json:
        record = {"line": line.line, "text": line.text, "score": text_score.score}
        if rank is not None:
            record |= {"group": line.group, "rank": rank}
        record |= {
            "tokens": text_score.tokens,
            "log_probs": text_score.log_probs,
            "replaced_probability": text_score.replaced_probability,
        }
        print(json.dumps(record, ensure_ascii=is_for_people), flush=True)
        return
    print(f"{text_score.score:.4f}\t{printable(line.text) if is_for_people else line.text}", flush=True)
    if tokens:
        values = text_score.replaced_probability
        if values is None:
            values = text_score.log_probs
        tokens_text = " ".join(f"{token}:{value:.3f}" for token, value in zip(text_score.tokens, values, strict=True))
        print("\t", printable(tokens_text) if is_for_people else tokens_text, sep="")

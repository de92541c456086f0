"""`electra-dist score`: score texts by a pretrained model, token by token or to re-rank candidates."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra_dist.console import Console
from electra_dist.errors import StoreMissing, UserError
from electra_dist.escapes import printable
from electra_dist.scoring.text_scores import TextLine, ranks, read_text_lines
from electra_dist.store.atomic_files import readable
from electra_dist.store.regular_files import MOST_DATA_BYTES, read_regular
from launcher.cli.finetune import Tower, TowerOption, progress_bar

if TYPE_CHECKING:  # imports torch
    from electra_dist.scoring.text_scores import TextScore

_STDIN = "-"


def score(
    model: Annotated[str, typer.Option(help="folder of a run, folder of a Hugging Face model, or random:CONFIG.yaml")],
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
    tower: TowerOption = Tower.discriminator,
) -> None:
    """Print how plausible a pretrained model finds each text of a file, as SCORE, a tab, and the text.

    The score is a sum of log-probabilities over the tokens: that each token is the original one (a discriminator), or
    of each token given all others (a masked language model; Electric, up to a constant for each token). Scores of
    different models are not comparable. --tokens prints the probability that a token was replaced or, for models that
    give none, its log-probability.
    """
    from electra_dist.pretrained.load_encoder import device_of_choice, load_pretrained
    from electra_dist.scoring.text_scores import TextScorer

    lines = _read_lines(texts)
    scorer = TextScorer(load_pretrained(model, tower.value), device_of_choice())
    with progress_bar(Console(stderr=True)) as progress:
        scores = scorer.score([line.text for line in lines], progress)
        if not rerank:
            for line, text_score in zip(lines, scores, strict=True):
                _print_score(line, text_score, tokens, as_json)
            return
        all_scores = list(scores)
    _print_ranked(lines, all_scores, tokens, as_json)


def _read_lines(texts: str) -> list[TextLine]:
    if texts == _STDIN:
        return read_text_lines(sys.stdin.buffer.read(), "standard input")
    file = Path(texts)
    try:
        with readable(file):
            data = read_regular(file, MOST_DATA_BYTES)
    except StoreMissing:
        raise UserError(f"{file}: no such file; give a file with one text on each line, or - to read them") from None
    return read_text_lines(data, str(file))


def _print_ranked(lines: Iterable[TextLine], scores: list[TextScore], tokens: bool, as_json: bool) -> None:
    """Print each group of candidate texts, best text first; without JSON, empty lines separate the groups."""
    all_lines = list(lines)
    previous_group = 1
    for index, rank in ranks(all_lines, [text_score.score for text_score in scores]):
        line = all_lines[index]
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

"""Write an artificial text on which `corpus plan` measures rates, with word frequencies like those of a language.

How: every word is drawn by its rank with the Zipf-Mandelbrot law, P(rank) ~ 1 / (rank + 2.7). Frequent words are
those of the language reference that every Python installation contains; rare words are joined from parts of these. The
tokenizer therefore meets new words all the time, as in a large corpus. In a text of few words it would only look words
up in its cache, which is several times as fast.

Limits: the text is not a language. Rates on the user's own text (`corpus plan --input`) are more accurate.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_NUM_WORDS = 60_000  # different words that may occur
_RANK_SHIFT = 2.7  # constant of the Zipf-Mandelbrot law
_WORDS_IN_SENTENCE = (6, 30)  # least number, and the number above the largest
_SENTENCES_IN_LINE = (1, 8)
_LINES_IN_DOCUMENT = (1, 24)
_BYTES_PER_WORD = 5  # lower bound of the mean, with the space; so enough words are drawn


def write_sample_text(path: Path, num_bytes: int) -> None:
    """Write documents with about `num_bytes` of text to `path`, as JSON lines with the field `text`.

    Equal arguments give equal bytes with the same versions of Python and NumPy.
    """
    draw = np.random.default_rng(1)
    words = _words(draw)
    weights = 1 / (np.arange(len(words)) + 1 + _RANK_SHIFT)
    cumulative = np.cumsum(weights / weights.sum())
    uniform = draw.random(num_bytes // _BYTES_PER_WORD)
    ranks = np.minimum(np.searchsorted(cumulative, uniform), len(words) - 1)
    drawn_words = (words[rank] for rank in ranks.tolist())
    size = 0
    with path.open("w", encoding="utf-8") as out:
        while size < num_bytes:
            num_lines = draw.integers(*_LINES_IN_DOCUMENT)
            text = "\n".join(_line(drawn_words, draw) for _ in range(num_lines))
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text)


def _line(drawn_words: Iterator[str], draw: np.random.Generator) -> str:
    sentences = []
    for _ in range(draw.integers(*_SENTENCES_IN_LINE)):
        num_words = draw.integers(*_WORDS_IN_SENTENCE)
        sentence = " ".join(itertools.islice(drawn_words, int(num_words)))
        sentences.append(f"{sentence.capitalize()}.")
    return " ".join(sentences)


def _words(draw: np.random.Generator) -> list[str]:
    """Return `_NUM_WORDS` words, the most frequent first; the rare ones are made up with the generator `draw`."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    counts: Counter[str] = Counter()
    for topic in sorted(topics):
        counts.update(re.findall(r"[a-z]+", topics[topic].lower()))
    common = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    long_words = [word for word in common if len(word) > 4]
    pairs = draw.integers(len(long_words), size=(_NUM_WORDS - len(common), 2)).tolist()
    rare = [long_words[first][:3] + long_words[second][3:] for first, second in pairs]
    return common + rare

"""Make a text to measure rates on, whose words are as unequally frequent as those of a language.

How: the rank of every word is drawn by the law of Zipf and Mandelbrot, P(rank) ~ 1 / (rank + 2.7). The frequent words
are those of the language reference that every Python installation contains; the rare ones are joined from parts of
these. A tokenizer meets new words all the time, as in a large corpus; in a text of few words it would only look them
up, several times as fast.

Limits: this is no language. Rates on a text of the user's are better.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

_NUM_WORDS = 60_000  # different words that may occur
_RANK_SHIFT = 2.7  # of the law of Zipf and Mandelbrot
_WORDS_IN_SENTENCE = (6, 30)  # least and most
_SENTENCES_IN_LINE = (1, 8)
_LINES_IN_DOCUMENT = (1, 24)
_BYTES_PER_WORD = 5  # at least, with the space


def write_sample_text(path: Path, num_bytes: int) -> None:
    """Write documents as JSON lines, about `num_bytes` of text; the same Python gives the same bytes."""
    draw = np.random.default_rng(1)
    words = _words(draw)
    shares = 1 / (np.arange(len(words)) + 1 + _RANK_SHIFT)
    bounds = np.cumsum(shares / shares.sum())
    ranks = np.minimum(np.searchsorted(bounds, draw.random(num_bytes // _BYTES_PER_WORD)), len(words) - 1)
    chosen = iter(ranks.tolist())
    size = 0
    with path.open("w", encoding="utf-8") as out:
        while size < num_bytes:
            lines = []
            for _ in range(draw.integers(*_LINES_IN_DOCUMENT)):
                sentences = []
                for _ in range(draw.integers(*_SENTENCES_IN_LINE)):
                    sentence = " ".join(words[next(chosen)] for _ in range(draw.integers(*_WORDS_IN_SENTENCE)))
                    sentences.append(f"{sentence.capitalize()}.")
                lines.append(" ".join(sentences))
            text = "\n".join(lines)
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text)


def _words(draw: np.random.Generator) -> list[str]:
    """Return all words, the most frequent first."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    counts: Counter[str] = Counter()
    for topic in sorted(topics):
        counts.update(re.findall(r"[a-z]+", topics[topic].lower()))
    common = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    long_words = [word for word in common if len(word) > 4]
    pairs = draw.integers(len(long_words), size=(_NUM_WORDS - len(common), 2)).tolist()
    rare = [long_words[first][:3] + long_words[second][3:] for first, second in pairs]
    return common + rare

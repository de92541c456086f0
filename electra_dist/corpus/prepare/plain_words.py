"""Cut text into words and sentences without a model, for the steps of a preparation.

Limits: this is for languages that separate words by spaces. A word with an apostrophe or a hyphen is one word, where
spaCy, datatrove's default, makes two or three of it, so the n-grams of the two tokenizers differ slightly. An
abbreviation ends a sentence.
"""

from __future__ import annotations

import re

from datatrove.utils.word_tokenizers import WordTokenizer

from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.word_pattern import WORD_PATTERN

_WORD = re.compile(rf"{WORD_PATTERN}(?:['\u2019-]{WORD_PATTERN})*|[^\w\s]")
# A sentence ends at a line's end, with a mark of Chinese or Japanese or, before white space, with . ! ? an ellipsis,
# or the mark of Hindi, Urdu or Arabic; closing quotes and brackets belong to it. Of several marks in a row before
# white space only the last one is matched as a mark: matching all of them would be quadratic in their number.
_SENTENCE = re.compile(
    r"[^\n]*?(?:[.!?\u2026\u0964\u06d4\u061f][\"'\u201d\u2019)\]]*(?=\s|$)"
    r"|[\u3002\uff01\uff1f]++[\"'\u201d\u2019)\]\uff09\u300d\u300f]*+)"
    r"|[^\n]+"
)


class PlainWords(WordTokenizer):
    """Tokenizer of datatrove that finds words and sentences by regular expressions.

    All instances compare equal, so that datatrove, which caches its tokenizers, keeps only one.
    """

    def __init__(self) -> None:
        super().__init__("plain")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainWords)

    def __hash__(self) -> int:
        return hash(PlainWords)

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text; each punctuation mark is a word."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences of a text without the white space around them."""
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return the positions (start, end) of each sentence in the text; the end is exclusive."""
        spans = []
        for match in _SENTENCE.finditer(text):
            sentence = match.group()
            if sentence.strip():
                start = match.start() + len(sentence) - len(sentence.lstrip())
                spans.append((start, match.start() + len(sentence.rstrip())))
        return spans


def word_tokenizer(config: PrepareConfig) -> str | PlainWords:
    """Return how datatrove's steps shall cut text into words, for their argument `language`.

    This is a `PlainWords` or, with `words: spacy` in the config, a language code.
    """
    return config.spacy_language if config.words == "spacy" else PlainWords()

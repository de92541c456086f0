"""Cut text into words and sentences without a model, for datatrove's filters and deduplication.

Guarantee: the same text gives the same words on every machine; nothing is downloaded.

Limits: only for languages that separate words by spaces. A word with an apostrophe or a hyphen is one word, where
spaCy, datatrove's default, makes two or three of it, so the n-grams of the two tokenizers differ slightly. An
abbreviation ends a sentence.
"""

from __future__ import annotations

import re

from datatrove.utils.word_tokenizers import WordTokenizer

from electra_dist.corpus.prepare.prepare_config import PrepareConfig

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")
# A sentence ends with . ! ? or an ellipsis, closing quotes and brackets included, or at the end of a line. Of several
# such marks in a row only the last one is matched as a mark: matching all of them would be quadratic in their number.
_SENTENCE = re.compile(r"[^\n]*?[.!?\u2026][\"'\u201d\u2019)\]]*(?=\s|$)|[^\n]+")


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
    """Return the value for `language` in datatrove's steps: a `PlainWords`, or a language code, which means spaCy."""
    return config.spacy_language if config.words == "spacy" else PlainWords()

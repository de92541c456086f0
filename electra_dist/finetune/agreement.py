"""Pairs of sentences that differ in one word, of which one is not English: agreement in number, from templates.

Guarantee: both sentences of a pair have the same length in tokens and differ at one position, because every word is
one entry of the model's vocabulary; a word that is not is left out. Which of the two forms of a word is the right one
is balanced by the draw of the number, so no word is wrong as such. Pairs are distinct, and a function of
(vocabulary, number, seed).

Where it stops: six phenomena, short sentences, common words. A template of which too little is left in a small
vocabulary gives fewer pairs than asked for, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np

NOUNS = (  # singular, plural
    ("boy", "boys"), ("girl", "girls"), ("king", "kings"), ("teacher", "teachers"), ("doctor", "doctors"),
    ("student", "students"), ("writer", "writers"), ("soldier", "soldiers"), ("farmer", "farmers"),
    ("friend", "friends"), ("brother", "brothers"), ("sister", "sisters"), ("mother", "mothers"),
    ("father", "fathers"), ("son", "sons"), ("daughter", "daughters"), ("officer", "officers"),
    ("lawyer", "lawyers"), ("player", "players"), ("leader", "leaders"),
)  # fmt: skip
THINGS = (
    ("book", "books"), ("house", "houses"), ("car", "cars"), ("tree", "trees"), ("picture", "pictures"),
    ("letter", "letters"), ("river", "rivers"), ("street", "streets"), ("room", "rooms"), ("door", "doors"),
    ("table", "tables"), ("horse", "horses"), ("dog", "dogs"), ("bird", "birds"), ("song", "songs"),
    ("story", "stories"), ("road", "roads"), ("ship", "ships"), ("garden", "gardens"), ("town", "towns"),
)  # fmt: skip
BE, HAVE = (("is", "are"), ("was", "were")), (("has", "have"),)
ADJECTIVES = ("old", "young", "good", "new", "small", "great", "happy", "tired", "famous", "strong")
PREPOSITIONS = ("near", "behind", "beside", "with", "from")
ACTIONS = ("saw", "helped", "knew", "loved", "found", "liked", "met", "followed")

Words = tuple[str, ...]


class Pair(NamedTuple):
    """Words of both sentences; they differ at `position`."""

    phenomenon: str
    good: Words
    bad: Words

    @property
    def position(self) -> int:
        """Number of the word that differs."""
        return next(i for i, (good, bad) in enumerate(zip(self.good, self.bad)) if good != bad)


class _NoWords(Exception):
    """The vocabulary holds none of a list."""


class _Dice:
    """Draws of words that the vocabulary holds."""

    def __init__(self, vocabulary: Container[str], seed: int) -> None:
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(seed)

    def forms(self, words: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """(singular, plural) of one word."""
        known = [forms for forms in words if all(form in self._vocabulary for form in forms)]
        return known[self._index(len(known))]

    def word(self, words: Sequence[str]) -> str:
        """One word."""
        known = [word for word in words if word in self._vocabulary]
        return known[self._index(len(known))]

    def number(self) -> int:
        """0 for singular, 1 for plural."""
        return self._index(2)

    def _index(self, size: int) -> int:
        if size == 0:
            raise _NoWords
        return int(self._generator.integers(size))


def _verb(dice: _Dice) -> tuple[Words, str, str]:
    """The old boy [is] tired."""
    n, noun, verb = dice.number(), dice.forms(NOUNS), dice.forms(BE)
    return ("the", dice.word(ADJECTIVES), noun[n], "*", dice.word(ADJECTIVES), "."), verb[n], verb[1 - n]


def _verb_across_phrase(dice: _Dice) -> tuple[Words, str, str]:
    """The boy near the houses [is] tired: the noun between has the other number."""
    n, noun, verb = dice.number(), dice.forms(NOUNS), dice.forms(BE)
    between = dice.forms(THINGS)[1 - n]
    frame = ("the", noun[n], dice.word(PREPOSITIONS), "the", between, "*", dice.word(ADJECTIVES), ".")
    return frame, verb[n], verb[1 - n]


def _verb_across_clause(dice: _Dice) -> tuple[Words, str, str]:
    """The boy who saw the houses [has] come."""
    n, noun, verb = dice.number(), dice.forms(NOUNS), dice.forms(HAVE)
    between = dice.forms(THINGS)[1 - n]
    return ("the", noun[n], "who", dice.word(ACTIONS), "the", between, "*", "come", "."), verb[n], verb[1 - n]


def _determiner(dice: _Dice) -> tuple[Words, str, str]:
    """The teacher saw this [house]: the noun must agree."""
    n, thing = dice.number(), dice.forms(THINGS)
    determiner = (("this", "that"), ("these", "those"))[n][dice.number()]
    frame = ("the", dice.forms(NOUNS)[dice.number()], dice.word(ACTIONS), determiner, "*", ".")
    return frame, thing[n], thing[1 - n]


def _quantifier(dice: _Dice) -> tuple[Words, str, str]:
    """There were many [houses] near the river."""
    n, thing = dice.number(), dice.forms(THINGS)
    quantifier = (("one", "every", "another"), ("many", "several", "two", "few"))[n]
    frame = ("they", dice.word(ACTIONS), dice.word(quantifier), "*", dice.word(PREPOSITIONS), "the")
    return (*frame, dice.forms(THINGS)[0], "."), thing[n], thing[1 - n]


def _demonstrative(dice: _Dice) -> tuple[Words, str, str]:
    """[These] old houses are small: the determiner must agree with noun and verb."""
    n, thing, verb = dice.number(), dice.forms(THINGS), dice.forms(BE)
    pair = (("this", "these"), ("that", "those"))[dice.number()]
    frame = ("*", dice.word(ADJECTIVES), thing[n], verb[n], dice.word(ADJECTIVES), ".")
    return frame, pair[n], pair[1 - n]


TEMPLATES: dict[str, Callable[[_Dice], tuple[Words, str, str]]] = {
    "subject-verb": _verb,
    "subject-verb across a phrase": _verb_across_phrase,
    "subject-verb across a clause": _verb_across_clause,
    "determiner-noun": _determiner,
    "quantifier-noun": _quantifier,
    "demonstrative": _demonstrative,
}
_DRAWS_PER_PAIR = 50


def make_pairs(vocabulary: Container[str], num_pairs: int, seed: int = 0) -> dict[str, list[Pair]]:
    """Up to `num_pairs` distinct pairs of each phenomenon, whose words are all in `vocabulary`."""
    pairs: dict[str, list[Pair]] = {}
    for number, (phenomenon, template) in enumerate(TEMPLATES.items()):
        dice = _Dice(vocabulary, seed * len(TEMPLATES) + number)
        found: dict[Pair, None] = {}
        with contextlib.suppress(_NoWords):
            for _ in range(num_pairs * _DRAWS_PER_PAIR):
                frame, good, bad = template(dice)
                pair = Pair(phenomenon, _filled(frame, good), _filled(frame, bad))
                if all(word in vocabulary for word in {*pair.good, *pair.bad}):
                    found[pair] = None
                if len(found) == num_pairs:
                    break
        pairs[phenomenon] = list(found)
    return pairs


def _filled(frame: Words, word: str) -> Words:
    return tuple(word if place == "*" else place for place in frame)

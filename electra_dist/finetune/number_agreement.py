"""Generates sentence pairs that test number agreement in English, from templates.

Guarantee: the two sentences of a pair have the same number of tokens and differ at one position, because every word
is a single entry of the model's vocabulary; words outside the vocabulary are not used. The number (singular or
plural) is drawn at random, so neither form of a word is the correct one more often. The pairs of a phenomenon are
distinct, and are a function of the vocabulary, the requested number of pairs and the seed.

Limits: six phenomena, short sentences, common words. If a small vocabulary leaves too few words for a template, that
phenomenon has fewer pairs than requested, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np

NOUNS = (  # people: (singular, plural)
    ("boy", "boys"), ("girl", "girls"), ("king", "kings"), ("teacher", "teachers"), ("doctor", "doctors"),
    ("student", "students"), ("writer", "writers"), ("soldier", "soldiers"), ("farmer", "farmers"),
    ("friend", "friends"), ("brother", "brothers"), ("sister", "sisters"), ("mother", "mothers"),
    ("father", "fathers"), ("son", "sons"), ("daughter", "daughters"), ("officer", "officers"),
    ("lawyer", "lawyers"), ("player", "players"), ("leader", "leaders"),
)  # fmt: skip
THINGS = (  # objects, animals and places: (singular, plural)
    ("book", "books"), ("house", "houses"), ("car", "cars"), ("tree", "trees"), ("picture", "pictures"),
    ("letter", "letters"), ("river", "rivers"), ("street", "streets"), ("room", "rooms"), ("door", "doors"),
    ("table", "tables"), ("horse", "horses"), ("dog", "dogs"), ("bird", "birds"), ("song", "songs"),
    ("story", "stories"), ("road", "roads"), ("ship", "ships"), ("garden", "gardens"), ("town", "towns"),
)  # fmt: skip
BE = (("is", "are"), ("was", "were"))
HAVE = (("has", "have"),)
ADJECTIVES = ("old", "young", "good", "new", "small", "great", "happy", "tired", "famous", "strong")
PREPOSITIONS = ("near", "behind", "beside", "with", "from")
ACTIONS = ("saw", "helped", "knew", "loved", "found", "liked", "met", "followed")

Words = tuple[str, ...]

_SLOT = "*"  # the position of a frame where the two sentences of a pair differ
_DRAWS_PER_PAIR = 50  # attempts per requested pair, because a template may repeat sentences


class Pair(NamedTuple):
    """Pair of a grammatical and an ungrammatical sentence, as words, which differ in one word only."""

    phenomenon: str
    good: Words
    bad: Words

    @property
    def position(self) -> int:
        """Return the index, counted from 0, of the word that differs between the two sentences."""
        return next(i for i, (good, bad) in enumerate(zip(self.good, self.bad)) if good != bad)


class _Contrast(NamedTuple):
    """Sentence with one open place, marked by `_SLOT`, and the correct and the incorrect word for that place."""

    frame: Words
    good_word: str
    bad_word: str


class _NoWords(Exception):
    """Error: the vocabulary contains none of the words from which a sentence template must choose."""


class _WordSampler:
    """Random generator that draws words from lists, limited to the words of a vocabulary."""

    def __init__(self, vocabulary: Container[str], seed: int) -> None:
        """Create a sampler that draws only words of `vocabulary`; equal seeds give equal draws."""
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(seed)

    def draw_forms(self, words: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Draw one word from a list of (singular, plural) forms, and return both forms.

        Raises:
            _NoWords: the vocabulary contains both forms of none of `words`.
        """
        known = [forms for forms in words if all(form in self._vocabulary for form in forms)]
        return known[self._draw_index(len(known))]

    def draw_word(self, words: Sequence[str]) -> str:
        """Draw one of those `words` that the vocabulary contains.

        Raises:
            _NoWords: the vocabulary contains none of `words`.
        """
        known = [word for word in words if word in self._vocabulary]
        return known[self._draw_index(len(known))]

    def draw_number(self) -> int:
        """Draw a grammatical number: 0 for singular, 1 for plural, with equal probability."""
        return self._draw_index(2)

    def _draw_index(self, size: int) -> int:
        """Draw an index into a list of `size` usable words; raise `_NoWords` if there are none."""
        if size == 0:
            raise _NoWords
        return int(self._generator.integers(size))


def _subject_verb(sampler: _WordSampler) -> _Contrast:
    """Draw a sentence such as "the old boy [is] tired.", where the verb agrees with its subject."""
    number = sampler.draw_number()
    noun = sampler.draw_forms(NOUNS)
    verb = sampler.draw_forms(BE)
    frame = ("the", sampler.draw_word(ADJECTIVES), noun[number], _SLOT, sampler.draw_word(ADJECTIVES), ".")
    return _Contrast(frame, verb[number], verb[1 - number])


def _subject_verb_across_phrase(sampler: _WordSampler) -> _Contrast:
    """Draw "the boy near the houses [is] tired.", where a noun of the other number precedes the verb."""
    number = sampler.draw_number()
    noun = sampler.draw_forms(NOUNS)
    verb = sampler.draw_forms(BE)
    distractor = sampler.draw_forms(THINGS)[1 - number]
    preposition = sampler.draw_word(PREPOSITIONS)
    adjective = sampler.draw_word(ADJECTIVES)
    frame = ("the", noun[number], preposition, "the", distractor, _SLOT, adjective, ".")
    return _Contrast(frame, verb[number], verb[1 - number])


def _subject_verb_across_clause(sampler: _WordSampler) -> _Contrast:
    """Draw "the boy who saw the houses [has] come.", where a relative clause separates subject and verb."""
    number = sampler.draw_number()
    noun = sampler.draw_forms(NOUNS)
    verb = sampler.draw_forms(HAVE)
    distractor = sampler.draw_forms(THINGS)[1 - number]
    frame = ("the", noun[number], "who", sampler.draw_word(ACTIONS), "the", distractor, _SLOT, "come", ".")
    return _Contrast(frame, verb[number], verb[1 - number])


def _determiner_noun(sampler: _WordSampler) -> _Contrast:
    """Draw "the teacher saw this [house].", where the noun agrees with this, that, these or those."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    determiners = (("this", "that"), ("these", "those"))[number]
    determiner = determiners[sampler.draw_number()]
    person_forms = sampler.draw_forms(NOUNS)
    person = person_forms[sampler.draw_number()]
    frame = ("the", person, sampler.draw_word(ACTIONS), determiner, _SLOT, ".")
    return _Contrast(frame, thing[number], thing[1 - number])


def _quantifier_noun(sampler: _WordSampler) -> _Contrast:
    """Draw "they saw many [houses] near the river.", where the noun agrees with its quantifier."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    quantifiers = (("one", "every", "another"), ("many", "several", "two", "few"))[number]
    action = sampler.draw_word(ACTIONS)
    quantifier = sampler.draw_word(quantifiers)
    preposition = sampler.draw_word(PREPOSITIONS)
    landmark, _ = sampler.draw_forms(THINGS)
    frame = ("they", action, quantifier, _SLOT, preposition, "the", landmark, ".")
    return _Contrast(frame, thing[number], thing[1 - number])


def _demonstrative(sampler: _WordSampler) -> _Contrast:
    """Draw "[these] old houses are small.", where the determiner agrees with the noun and the verb."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    verb = sampler.draw_forms(BE)
    determiners = (("this", "these"), ("that", "those"))[sampler.draw_number()]
    first_adjective = sampler.draw_word(ADJECTIVES)
    second_adjective = sampler.draw_word(ADJECTIVES)
    frame = (_SLOT, first_adjective, thing[number], verb[number], second_adjective, ".")
    return _Contrast(frame, determiners[number], determiners[1 - number])


TEMPLATES: dict[str, Callable[[_WordSampler], _Contrast]] = {
    "subject-verb": _subject_verb,
    "subject-verb across a phrase": _subject_verb_across_phrase,
    "subject-verb across a clause": _subject_verb_across_clause,
    "determiner-noun": _determiner_noun,
    "quantifier-noun": _quantifier_noun,
    "demonstrative": _demonstrative,
}


def make_pairs(vocabulary: Container[str], num_pairs: int, seed: int = 0) -> dict[str, list[Pair]]:
    """Generate distinct sentence pairs for every phenomenon of number agreement in `TEMPLATES`.

    Args:
        vocabulary: the words that sentences may use; each must be one token of the model.
        num_pairs: pairs requested for each phenomenon.
        seed: seed of the draws; equal arguments give equal pairs.

    Returns:
        Phenomenon -> pairs, in the order of `TEMPLATES`. A list is shorter than `num_pairs`, and may be empty, if the
        vocabulary has too few words for the template.
    """
    return {
        phenomenon: _draw_pairs(phenomenon, vocabulary, num_pairs, seed * len(TEMPLATES) + number)
        for number, phenomenon in enumerate(TEMPLATES)
    }


def _draw_pairs(phenomenon: str, vocabulary: Container[str], num_pairs: int, seed: int) -> list[Pair]:
    """Draw up to `num_pairs` distinct sentence pairs of one phenomenon, in the order of the draws.

    There are fewer, perhaps none, if the vocabulary has too few words for the phenomenon's template.
    """
    draw_contrast = TEMPLATES[phenomenon]
    sampler = _WordSampler(vocabulary, seed)
    pairs: dict[Pair, None] = {}  # the keys are the pairs: distinct, in the order of insertion
    for _ in range(num_pairs * _DRAWS_PER_PAIR):
        try:
            frame, good_word, bad_word = draw_contrast(sampler)
        except _NoWords:
            break
        pair = Pair(phenomenon, _fill_slot(frame, good_word), _fill_slot(frame, bad_word))
        # The fixed words of a frame ("the", "who", ".") are not drawn, so the vocabulary may lack them.
        if all(word in vocabulary for word in (*pair.good, *pair.bad)):
            pairs[pair] = None
        if len(pairs) == num_pairs:
            break
    return list(pairs)


def _fill_slot(frame: Words, word: str) -> Words:
    """Return the words of the sentence `frame` with `word` in its open place, which `_SLOT` marks."""
    return tuple(word if frame_word == _SLOT else frame_word for frame_word in frame)

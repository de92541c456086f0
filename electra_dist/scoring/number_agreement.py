"""Generate sentence pairs that test number agreement in English, from templates.

Guarantee: the two sentences of a pair have the same number of tokens and differ at one position, because every word is
a single entry of the model's vocabulary; words outside the vocabulary are not used. The number (singular or plural) is
drawn at random, so neither form of a word is correct more often than the other. The pairs of a phenomenon (a kind of
agreement, such as subject-verb) are distinct, and are a function of the vocabulary, the requested number of pairs and
the seed.

Limits: six phenomena, short sentences, common words. If a small vocabulary leaves too few words for a template, that
phenomenon has fewer pairs than requested, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

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
DEMONSTRATIVES = (("this", "these"), ("that", "those"))
SINGULAR_QUANTIFIERS = ("one", "every", "another")
PLURAL_QUANTIFIERS = ("many", "several", "two", "few")
PLURAL = 1  # index of the plural in a pair (singular, plural)

T = TypeVar("T")
Words = tuple[str, ...]

_SLOT = "*"  # marks the position in a frame where the two sentences of a pair differ
_DRAWS_PER_PAIR = 50  # attempts per requested pair, because the draws of a template repeat themselves


class Pair(NamedTuple):
    """Sentence with one gap, marked by `_SLOT`, and the grammatical and the ungrammatical word for the gap."""

    frame: Words
    good_word: str
    bad_word: str

    @property
    def good(self) -> Words:
        """Return the words of the grammatical sentence."""
        return tuple(self.good_word if word == _SLOT else word for word in self.frame)

    @property
    def bad(self) -> Words:
        """Return the words of the ungrammatical sentence."""
        return tuple(self.bad_word if word == _SLOT else word for word in self.frame)

    @property
    def position(self) -> int:
        """Return the index, counted from 0, of the word that differs between the two sentences."""
        return self.frame.index(_SLOT)


class _NoWords(Exception):
    """Error: the vocabulary contains none of the words from which a sentence template must choose."""


class _WordSampler:
    """Random generator that draws words from lists, limited to the words of a vocabulary."""

    def __init__(self, vocabulary: Container[str], seed: int) -> None:
        self._vocabulary = vocabulary
        self._generator = np.random.default_rng(seed)

    def draw_forms(self, words: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Draw a pair (singular, plural) from those in `words` of which the vocabulary has both forms."""
        return self.choose([forms for forms in words if all(form in self._vocabulary for form in forms)])

    def draw_word(self, words: Sequence[str]) -> str:
        return self.choose([word for word in words if word in self._vocabulary])

    def draw_number(self) -> int:
        return self.choose((0, 1))

    def choose(self, options: Sequence[T]) -> T:
        """Draw one of `options`, in the vocabulary or not; raise _NoWords if there are none."""
        if not options:
            raise _NoWords
        return options[int(self._generator.integers(len(options)))]


def _subject_verb(sampler: _WordSampler) -> Pair:
    """Draw a sentence with a gap for the verb, which must agree with its subject: "the old boy [is] tired"."""
    number = sampler.draw_number()
    noun = sampler.draw_forms(NOUNS)
    verb = sampler.draw_forms(BE)
    attribute = sampler.draw_word(ADJECTIVES)
    predicate = sampler.draw_word(ADJECTIVES)
    frame = ("the", attribute, noun[number], _SLOT, predicate, ".")
    return Pair(frame, verb[number], verb[1 - number])


def _subject_verb_across(
    sampler: _WordSampler,
    verbs: Sequence[tuple[str, str]],
    pronoun: Words,
    links: Words,
    endings: Words,
) -> Pair:
    """Draw a sentence with a gap for the verb after words that mislead: "the boy who saw the houses [has] come"."""
    number = sampler.draw_number()
    noun = sampler.draw_forms(NOUNS)
    verb = sampler.draw_forms(verbs)
    distractor = sampler.draw_forms(THINGS)[1 - number]
    link = sampler.draw_word(links)
    ending = sampler.draw_word(endings)
    frame = ("the", noun[number], *pronoun, link, "the", distractor, _SLOT, ending, ".")
    return Pair(frame, verb[number], verb[1 - number])


def _determiner_noun(sampler: _WordSampler) -> Pair:
    """Draw a sentence with a gap for a noun, which must agree with its determiner: "the teacher saw this [house]"."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    determiner = sampler.choose(DEMONSTRATIVES)[number]
    person = sampler.choose(sampler.draw_forms(NOUNS))
    action = sampler.draw_word(ACTIONS)
    frame = ("the", person, action, determiner, _SLOT, ".")
    return Pair(frame, thing[number], thing[1 - number])


def _quantifier_noun(sampler: _WordSampler) -> Pair:
    """Draw a sentence with a gap for a noun after a quantifier ("many"): "they saw many [houses] near the river"."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    action = sampler.draw_word(ACTIONS)
    quantifier = sampler.draw_word(PLURAL_QUANTIFIERS if number == PLURAL else SINGULAR_QUANTIFIERS)
    preposition = sampler.draw_word(PREPOSITIONS)
    landmark, _ = sampler.draw_forms(THINGS)
    frame = ("they", action, quantifier, _SLOT, preposition, "the", landmark, ".")
    return Pair(frame, thing[number], thing[1 - number])


def _demonstrative(sampler: _WordSampler) -> Pair:
    """Draw a sentence with a gap for a demonstrative, which must agree with a noun: "[these] old houses are small"."""
    number = sampler.draw_number()
    thing = sampler.draw_forms(THINGS)
    verb = sampler.draw_forms(BE)
    determiners = sampler.choose(DEMONSTRATIVES)
    first_adjective = sampler.draw_word(ADJECTIVES)
    second_adjective = sampler.draw_word(ADJECTIVES)
    frame = (_SLOT, first_adjective, thing[number], verb[number], second_adjective, ".")
    return Pair(frame, determiners[number], determiners[1 - number])


TEMPLATES: dict[str, Callable[[_WordSampler], Pair]] = {
    "subject-verb": _subject_verb,
    "subject-verb across a phrase": partial(
        _subject_verb_across, verbs=BE, pronoun=(), links=PREPOSITIONS, endings=ADJECTIVES
    ),
    "subject-verb across a clause": partial(
        _subject_verb_across, verbs=HAVE, pronoun=("who",), links=ACTIONS, endings=("come",)
    ),
    "determiner-noun": _determiner_noun,
    "quantifier-noun": _quantifier_noun,
    "demonstrative": _demonstrative,
}


def make_pairs(vocabulary: Container[str], num_pairs: int, seed: int = 0) -> dict[str, list[Pair]]:
    """Generate distinct sentence pairs for every phenomenon (kind of number agreement), in the order of `TEMPLATES`.

    Each word of `vocabulary` must be one token of the model. Each list has `num_pairs` pairs; it is shorter, and may
    be empty, if the vocabulary has too few words for the phenomenon's template.
    """
    pairs_of = {}
    for number, (phenomenon, draw_pair) in enumerate(TEMPLATES.items()):
        phenomenon_seed = seed * len(TEMPLATES) + number  # distinct for all seeds and phenomena
        pairs_of[phenomenon] = _draw_pairs(draw_pair, vocabulary, num_pairs, phenomenon_seed)
    return pairs_of


def _draw_pairs(
    draw_pair: Callable[[_WordSampler], Pair], vocabulary: Container[str], num_pairs: int, seed: int
) -> list[Pair]:
    """Draw up to `num_pairs` distinct pairs of one phenomenon whose words are all in the vocabulary."""
    sampler = _WordSampler(vocabulary, seed)
    pairs: dict[Pair, None] = {}  # used as an ordered set: only the keys matter
    for _ in range(num_pairs * _DRAWS_PER_PAIR):
        try:
            pair = draw_pair(sampler)
        except _NoWords:
            break  # the vocabulary has none of the words for a place of the template
        # The fixed words of a frame ("the", "who", ".") are not drawn, so the vocabulary may lack them.
        if all(word in vocabulary for word in (*pair.good, *pair.bad)):
            pairs[pair] = None
        if len(pairs) == num_pairs:
            break
    return list(pairs)

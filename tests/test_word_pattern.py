"""Words of any script: a mark does not cut a word, in the filters of a preparation and in BM25."""

from __future__ import annotations

import re
import time
import unicodedata

import pytest

from electra_dist.corpus.prepare.filter_steps import PlainWords
from electra_dist.finetune.task_metrics import bm25_scores
from electra_dist.word_pattern import WORD_PATTERN

TEXTS = {  # words without punctuation
    "Hindi": "हिन्दी भाषा में लिखा गया क्षत्रिय विद्यालय",
    "Bengali": "বাংলা ভাষা কি ভালো",
    "Tamil": "வணக்கம் உலகம்",
    "Arabic with vowel points": "كَتَبَ العَرَبِيَّة",
    "Persian with joiners": "می\u200cخواهم نمی\u200cدانم",
    "Thai": "แม่น้ำ เด็กๆ น้ำ",
    "decomposed accents": unicodedata.normalize("NFD", "Garçon élève mañana Ångström"),
    "Korean": "강가의 오래된",
    "English": "the old dog 3",
}


@pytest.mark.parametrize("name", TEXTS)
def test_words_between_spaces_stay_whole(name: str) -> None:
    words = TEXTS[name].split()
    assert re.findall(WORD_PATTERN, TEXTS[name]) == words
    assert PlainWords().word_tokenize(f"{TEXTS[name]}.") == [*words, "."]


def test_only_letters_digits_marks_and_joiners_are_within_a_word() -> None:
    for character in map(chr, (*range(0x20000), *range(0xE0100, 0xE0200))):
        is_within = bool(re.match(r"\w", character)) or unicodedata.category(character)[0] == "M"
        is_within |= character in "\u200c\u200d"
        assert bool(re.fullmatch(WORD_PATTERN, f"a{character}b")) == is_within, character


def test_a_search_takes_linear_time() -> None:
    start = time.process_time()
    for text in ("a" * 200_000, "\u0301" * 200_000, "a\u0301" * 100_000, "a-" * 100_000):
        PlainWords().word_tokenize(text)
    assert time.process_time() - start < 5


def test_bm25_tells_words_apart_that_differ_in_a_vowel_sign() -> None:
    [scores] = bm25_scores(["की"], ["कि घर", "की घर"])
    assert scores[0] == 0 < scores[1]

"""Byte-level BPE in fine-tuning: the tokens of single words are those of the text in which spaces separate them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_level import TEXTS, byte_level_vocabulary
from support.modern_models import modern_model, random_towers
from support.small_encoder import head_parameters
from transformers import pipeline

from electra_dist.corpus.vocabulary import train_byte_level_bpe
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.seed_folder import write_seed_folder
from electra_dist.finetune.stored_scores import Measured
from electra_dist.finetune.tagging_task import TaggingTask, tagged_rows
from electra_dist.finetune.word_files import Sentence, TaggedSentence
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring import minimal_pairs
from electra_dist.scoring.number_agreement import ADJECTIVES, BE, HAVE, NOUNS, THINGS
from electra_dist.scoring.word_probes import compute_word_states
from electra_dist.tokenizer import Vocabulary, new_tokenizer

CPU = torch.device("cpu")
VOCABULARY = byte_level_vocabulary()
SETTINGS = FinetuneConfig(max_length=128)
WORDS = ["Anna", "likes", "London", ".", "the", "dog", "\u00c9va", "\U0001f600", "o'Neill", "bird", "3,5", "New-York"]


def encoder_with(vocabulary: Vocabulary) -> Pretrained:
    """Return a small encoder of ModernBERT's kind with random weights and its head of replaced tokens."""
    model = modern_model(vocab_size=vocabulary.size)
    return Pretrained.from_state("m", random_towers(model).state_dict(), model, vocabulary, lowercase=False)


@pytest.fixture(scope="module")
def encoder() -> Pretrained:
    """The encoder whose vocabulary is VOCABULARY."""
    return encoder_with(VOCABULARY)


def sentences(number: int) -> list[list[str]]:
    """Return sentences of 2 to 8 of WORDS."""
    draw = random.Random(0)
    return [draw.choices(WORDS, k=draw.randint(2, 8)) for _ in range(number)]


words = st.one_of(
    st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=6)
)


@settings(deadline=None, max_examples=50)
@given(st.lists(words, max_size=8))
def test_the_ids_of_words_are_those_of_their_sentence(sentence: list[str]) -> None:
    ids = new_tokenizer(VOCABULARY, lowercase=False).encode_words(sentence)
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    assert list(itertools.chain.from_iterable(ids)) == stock.encode(" ".join(sentence), add_special_tokens=False).ids
    decoded = [stock.decode(ids_of_word).strip() for ids_of_word in ids]
    assert decoded == sentence


@torch.no_grad()
def test_the_pipeline_of_a_written_folder_gives_the_dev_predictions_of_named_entities(
    encoder: Pretrained, tmp_path: Path
) -> None:
    tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    lines = []
    for number, sentence in enumerate(sentences(100)):
        lines += [f"{word}\t{tags[(number + place) % 5]}" for place, word in enumerate(sentence)] + [""]
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    task = TaggingTask("ner", tmp_path)
    model = task.model(encoder, SETTINGS, seed=0)
    generator = torch.Generator().manual_seed(5)
    for parameter in head_parameters(model):
        parameter.data.normal_(0.0, 0.7, generator=generator)
    result = Measured(
        task="ner", seed=0, mode="finetune", identity="i", metric="f1", score=0.5, metrics={}, failures=(),
        train_loss=0.1, steps=1, examples=1, seconds=1.0,
    )  # fmt: skip
    outcome = task.evaluate(model.eval(), encoder, SETTINGS, lambda *_: None)
    write_seed_folder(tmp_path / "m", encoder, model, SETTINGS, result, ())

    tagger: Any = pipeline("token-classification", model=str(tmp_path / "m"), aggregation_strategy="first", device=-1)
    predicted = []
    for sentence in sentences(100):
        text = " ".join(sentence)
        groups = tagger(text)
        start = 0
        for word in sentence:
            found = [group["entity_group"] for group in groups if group["start"] <= start < group["end"]]
            predicted.append((word, found[0] if found else "O"))
            start += len(word) + 1
    file_lines = [line.split(" ") for line in outcome.predictions[0].text.splitlines() if line]
    assert predicted == [(word, tag.split("-")[-1]) for word, _, tag in file_lines]
    assert len({tag for _, tag in predicted}) == 3


def test_rows_of_tagged_words_are_the_rows_of_their_text(encoder: Pretrained) -> None:
    tagged = [TaggedSentence(tuple(sentence), ("O",) * len(sentence)) for sentence in sentences(20)]
    rows = tagged_rows([sentence.words for sentence in tagged], encoder, max_length=128)
    for row, sentence in zip(rows, tagged, strict=True):
        (ids,) = encoder.tokenizer.encode([" ".join(sentence.words)])
        assert row.ids == [encoder.special.cls, *ids, encoder.special.sep]
        shown = [VOCABULARY.shown_tokens[row.ids[place]] for place in row.places]
        for word, token in zip(sentence.words, shown, strict=True):
            assert not word.isascii() or word.startswith(token.removeprefix("##"))


@torch.no_grad()
def test_states_of_words_are_those_of_their_text(encoder: Pretrained) -> None:
    sentence = sentences(1)[0]
    treebank = Sentence(words=tuple(sentence), tags=("X",) * len(sentence), heads=(0,) * len(sentence))
    states = compute_word_states(encoder, [treebank], CPU, lambda *_: None)
    (row,) = tagged_rows([tuple(sentence)], encoder, 128)
    expected = torch.stack(encoder.backbone().eval().layer_states(torch.tensor([row.ids])))[:, 0, [0, *row.places]]
    torch.testing.assert_close(states.state_LTH, expected, atol=1e-5, rtol=1e-5)


def test_generated_pairs_have_the_spaces_between_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    nouns = [form for forms in (*NOUNS[:4], *THINGS[:4], *BE, *HAVE) for form in forms]
    known = [*nouns, *ADJECTIVES[:3], "the", "near", "behind", "who", "saw", "helped", "come", "."]
    vocabulary = train_byte_level_bpe([" ".join(known * 3), *(known * 3), *TEXTS], 800)
    encoder = encoder_with(vocabulary)
    rows: list[list[int]] = []
    original = minimal_pairs.replaced_logits

    def recorded(encoder: Pretrained, ids: list[list[int]], *arguments: Any) -> torch.Tensor:
        """Store the rows that are scored."""
        rows.extend(ids)
        return original(encoder, ids, *arguments)

    monkeypatch.setattr(minimal_pairs, "replaced_logits", recorded)
    scores = minimal_pairs.score_minimal_pairs(encoder, 5, CPU)

    assert scores[-1].pairs >= 10
    stock = tokenizers.Tokenizer.from_str(vocabulary.text)
    texts = [stock.decode(row[1:-1]) for row in rows]
    assert all(len(text.split(" ")) == len(row) - 2 for text, row in zip(texts, rows, strict=True))
    assert all(set(text.split(" ")) <= set(known) for text in texts)
    assert [encoder.tokenizer.encode([text])[0] for text in texts] == [row[1:-1] for row in rows]

"""Probes of tags and heads on made treebanks, against planted rules, Hugging Face's states and a bootstrap."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ElectraModel

from electra_dist.config import ModelConfig
from electra_dist.finetune.task_metrics import sentence_errors
from electra_dist.finetune.word_files import Sentence, Treebank
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.scoring import word_probes
from electra_dist.scoring.word_probes import WordStates, compute_word_states, probe_words
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")


def ignore_progress(activity: str, done: int, total: int) -> None:
    pass


def made_sentences(num_sentences: int, seed: int) -> list[Sentence]:
    """Return sentences such as "the old boy saw many houses", whose tags and heads follow from the words."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(num_sentences):
        words: list[str] = []
        tags: list[str] = []
        heads: list[int] = []
        noun_places = []
        for noun, determiner in ((rng.choice(["boy", "king"]), "the"), (rng.choice(["houses", "trees"]), "many")):
            phrase = [(determiner, "DET")]
            if rng.random() < 0.5:
                phrase.append((rng.choice(["old", "young", "good"]), "ADJ"))
            phrase.append((noun, "NOUN"))
            noun_place = len(words) + len(phrase)
            noun_places.append(noun_place)
            for word, tag in phrase:
                words.append(word)
                tags.append(tag)
                heads.append(noun_place)
            if not noun_places[1:]:
                words.append(rng.choice(["saw", "knew"]))
                tags.append("VERB")
                heads.append(0)
                verb_place = len(words)
        for noun_place in noun_places:
            heads[noun_place - 1] = verb_place
        sentences.append(Sentence(words=tuple(words), tags=tuple(tags), heads=tuple(heads)))
    return sentences


@pytest.fixture
def treebank() -> Treebank:
    return Treebank(train=made_sentences(120, seed=0), test=made_sentences(40, seed=1), sha256="made")


def test_the_state_of_a_word_is_that_of_its_first_piece_in_hugging_faces_model(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The word "xy" has two pieces, so the word after it has another place in the row than in the sentence."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()  # the weights of the fixture `encoder`
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")
    hf_encoder = ElectraModel.from_pretrained(tmp_path / "hf").eval()
    sentences = [
        Sentence(words=("boy",), tags=("X",), heads=(0,)),
        Sentence(words=("the", "xy", "boy"), tags=("X",) * 3, heads=(0, 1, 1)),
        Sentence(words=("boy",) * 100, tags=("X",) * 100, heads=(0,) * 100),  # too long for 64 positions
    ]
    row = [encoder.special.cls, *encoder.tokenizer.encode(["the xy boy"])[0], encoder.special.sep]
    assert len(row) == 6
    with torch.no_grad():
        hf_states = hf_encoder(torch.tensor([row]), output_hidden_states=True).hidden_states

    states = compute_word_states(encoder, sentences, CPU, ignore_progress)

    assert states.sentences == sentences[:2]
    for layer, hf_state in enumerate(hf_states):
        expected = hf_state[0, [0, 1, 2, 4]]  # [CLS], "the", the first piece of "xy", "boy"
        torch.testing.assert_close(states.of_sentence(layer, 1), expected, atol=1e-5, rtol=1e-4)


def test_planted_rules_are_found_twice_the_same_and_random_tags_are_not(
    encoder: Pretrained, treebank: Treebank
) -> None:
    rng = random.Random(2)
    random_tags = [
        sentence._replace(tags=tuple(rng.choice(["A", "B"]) for _ in sentence.words)) for sentence in treebank.test
    ]

    tags = probe_words(encoder, treebank, "tags", CPU)
    heads = probe_words(encoder, treebank, "heads", CPU)
    tags_of_noise = probe_words(encoder, treebank._replace(test=random_tags), "tags", CPU)

    assert tags.score == 1.0  # the tag follows from the word
    assert heads.score > 0.9
    # The share of words whose head is the next word, the best rule that ignores the words, is far below.
    next_word = [head == place + 1 for sentence in treebank.test for place, head in enumerate(sentence.heads, start=1)]
    assert heads.score > np.mean(next_word) + 0.3
    assert heads == probe_words(encoder, treebank, "heads", CPU)  # bit for bit
    assert len(heads.layer_scores) == len(heads.held_out_scores) == encoder.tower.num_layers + 1
    assert heads.score == heads.layer_scores[heads.layer]
    num_words = sum(len(sentence.words) for sentence in treebank.test)
    assert heads.score * num_words == pytest.approx(round(heads.score * num_words))  # a share of all test words
    assert tags_of_noise.score == 0.0  # tags that the training data lack are never predicted
    assert tags_of_noise.layer == tags.layer  # the test sentences decide nothing
    assert tags_of_noise.held_out_scores == tags.held_out_scores


def test_the_head_probe_finds_the_maximum_of_a_planted_bilinear_form(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are random; the head of a word is the place with the largest x_i^T B x_j for a planted B, in NumPy."""
    width = encoder.tower.hidden_size
    planted = np.random.default_rng(0).normal(size=(width, 3)) @ np.random.default_rng(1).normal(size=(3, width))

    def planted_states(seed: int, num_sentences: int) -> WordStates:
        rng = np.random.default_rng(seed)
        state = rng.normal(size=(num_sentences, 7, width))
        score = np.einsum("nih,hk,njk->nij", state, planted, state)
        score[:, np.arange(7), np.arange(7)] = -np.inf
        heads = score.argmax(-1)
        sentences = [Sentence(words=("w",) * 6, tags=("X",) * 6, heads=tuple(head[1:].tolist())) for head in heads]
        flat = torch.tensor(state, dtype=torch.float32).reshape(1, -1, width)
        return WordStates(sentences=sentences, first_T=[7 * number for number in range(num_sentences)], state_LTH=flat)

    states_of = {1500: planted_states(2, 1500), 200: planted_states(3, 200)}  # keyed by the number of sentences
    monkeypatch.setattr(word_probes, "compute_word_states", lambda _, sentences, *rest: states_of[len(sentences)])
    made = Treebank(train=states_of[1500].sentences, test=states_of[200].sentences, sha256="")

    result = probe_words(encoder, made, "heads", CPU)

    assert result.score > 0.7  # chance is 1/6


def test_the_standard_error_is_that_of_a_bootstrap_over_sentences() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(3, 20, size=300)
    share = rng.beta(4, 2, size=300)  # sentences differ, so words are not independent
    right = rng.binomial(words, share)
    counts = list(zip(right.tolist(), words.tolist()))
    resampled = []
    for _ in range(2000):
        rows = rng.integers(300, size=300)
        resampled.append(right[rows].sum() / words[rows].sum())

    standard_error, items = sentence_errors(counts)

    assert standard_error == pytest.approx(np.std(resampled), rel=0.06)
    assert np.std(items.resamples) == pytest.approx(np.std(resampled), rel=0.2)  # of 200 resamples

"""Pairs are what they promise, and a model is scored by what it says about the word that differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import ElectraForMaskedLM

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.finetune import minimal_pairs
from electra_dist.finetune.minimal_pairs import kept_log_probs, pseudo_log_likelihood, score_minimal_pairs
from electra_dist.finetune.number_agreement import NOUNS, TEMPLATES, THINGS, make_pairs
from electra_dist.model.initial_weights import build_towers
from electra_dist.model.row_layout import SpecialIds, derive
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.pretrained.hf_conversion import export_generator
from electra_dist.pretrained.load_encoder import Pretrained, load_pretrained
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
IDS = [[2, 60, 61, 3, 70, 71, 72, 3], [2, 62, 74, 75, 3]]
SINGULAR = {"is", "was", "has", "this", "that", *(noun for noun, _ in (*NOUNS, *THINGS))}
PLURAL = {"are", "were", "have", "these", "those", *(noun for _, noun in (*NOUNS, *THINGS))}


class Everything:
    def __contains__(self, word: object) -> bool:
        return True


def test_pairs_differ_in_the_number_of_one_word_and_are_distinct() -> None:
    found = make_pairs(Everything(), 150)
    assert list(found) == list(TEMPLATES)
    for pairs in found.values():
        assert len(pairs) == len(set(pairs)) == 150
        plural = 0
        for pair in pairs:
            differing = [i for i, (a, b) in enumerate(zip(pair.good, pair.bad, strict=True)) if a != b]
            assert differing == [pair.position]
            words = {pair.good[pair.position], pair.bad[pair.position]}
            assert len(words & SINGULAR) == len(words & PLURAL) == 1
            plural += pair.good[pair.position] in PLURAL
        assert 0.3 < plural / 150 < 0.7  # neither form is right as such


def test_the_right_form_agrees_with_its_subject_or_its_determiner() -> None:
    found = make_pairs(Everything(), 100)
    for name in ("subject-verb", "subject-verb across a phrase", "subject-verb across a clause"):
        for pair in found[name]:
            subject = next(word for word in pair.good if word in {form for forms in NOUNS for form in forms})
            assert (subject in PLURAL) == (pair.good[pair.position] in PLURAL)
    for pair in (*found["determiner-noun"], *found["quantifier-noun"]):
        one = pair.good[pair.position - 1] in ("this", "that", "one", "every", "another")
        assert one == (pair.good[pair.position] in SINGULAR)
    for pair in found["demonstrative"]:
        assert (pair.good[0] in PLURAL) == (pair.good[2] in PLURAL) == (pair.good[3] in PLURAL)


def test_pairs_repeat_for_a_seed_and_keep_to_the_vocabulary() -> None:
    assert make_pairs(Everything(), 20, seed=1) == make_pairs(Everything(), 20, seed=1)
    assert make_pairs(Everything(), 20, seed=1) != make_pairs(Everything(), 20, seed=2)
    words = {"the", "old", "good", "boy", "boys", "is", "are", "."}
    found = make_pairs(words, 30)
    assert {word for pairs in found.values() for pair in pairs for word in pair.good} <= words
    assert found["determiner-noun"] == []
    assert 0 < len(found["subject-verb"]) <= 30


def test_the_form_that_looks_more_replaced_is_taken_for_the_wrong_one(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def knows_all(model: object, ids: list, positions: list, *rest: object) -> torch.Tensor:
        asked.extend((row[position], len(row)) for row, position in zip(ids, positions))
        return torch.arange(len(ids)).float() % 2  # good sentences come first: 0, then 1 for the bad one

    monkeypatch.setattr(minimal_pairs, "replaced_logits", knows_all)
    scores = score_minimal_pairs(encoder, 10, CPU)
    assert [score.accuracy for score in scores] == [1.0] * len(scores)
    words = {encoder.vocabulary.tokens[word] for word, _ in asked}
    assert words <= SINGULAR | PLURAL
    assert scores[-1].pairs == sum(score.pairs for score in scores[:-1]) == len(asked) // 2

    monkeypatch.setattr(minimal_pairs, "replaced_logits", lambda model, ids, *rest: torch.zeros(len(ids)))
    assert score_minimal_pairs(encoder, 10, CPU)[-1].accuracy == 0.0  # a tie is a miss


def test_a_tower_that_never_saw_masks_is_asked_what_it_learnt(model: ModelConfig, vocabulary: Vocabulary) -> None:
    """All-Tokens MLM's own loss of a text without replacements is minus what `kept_log_probs` says of its tokens."""
    quiet = model.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    objective = ObjectiveConfig(name="all_tokens_mlm", mlm_weight=0.0)
    special = SpecialIds.from_tokens(vocabulary.special)
    module = build_objective(quiet, objective, special, seed=5)
    assert isinstance(module, CorruptingObjective)
    with torch.no_grad():
        module.towers.copy_gate.bias.fill_(-2.0)
        ids = torch.tensor([[2, 60, 61, 62, 63, 3], [2, 70, 71, 72, 73, 3]])
        given = StepInput(ids, torch.arange(2), 0, 1, 0.0, 1.0)
        unchanged = module.corrupt(module.batch(given))._replace(
            corrupted_BS=ids, label_BS=torch.zeros_like(ids).bool()
        )
        module.corrupt = lambda batch: unchanged  # type: ignore[method-assign]
        loss = module(given).loss
    encoder = Pretrained.from_state("run", module.state_dict(), quiet, vocabulary, True, reads_masks=False)
    rows = [row for row in ids.tolist() for _ in row]
    found = kept_log_probs(encoder, rows, [*range(6)] * 2, CPU)
    assert found.sum().item() == pytest.approx(-loss.item(), rel=1e-5)
    no_gate = {name: value for name, value in encoder.state.items() if "copy_gate" not in name}
    softmax_only = kept_log_probs(dataclasses.replace(encoder, state=no_gate), rows, [*range(6)] * 2, CPU)
    assert (softmax_only < found).all()


def test_each_objective_is_asked_in_its_own_way(encoder: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("replaced_logits", "pseudo_log_likelihood", "kept_log_probs"):
        monkeypatch.setattr(
            minimal_pairs, name, lambda _, ids, *rest, name=name: (asked.append(name), torch.zeros(len(ids)))[1]
        )
    for objective, reads_masks in (("rtd", False), ("mlm", True), ("all_tokens_mlm", False), ("replace_mlm", False)):
        state = build_towers(encoder.model, 1, ObjectiveConfig(name=objective)).state_dict()  # type: ignore[arg-type]
        towers = Pretrained.from_state("x", state, encoder.model, encoder.vocabulary, True, reads_masks=reads_masks)
        score_minimal_pairs(towers, 5, CPU)
    assert asked == ["replaced_logits", "pseudo_log_likelihood", "kept_log_probs", "kept_log_probs"]


def test_a_random_model_is_near_chance_and_one_without_a_head_is_refused(encoder: Pretrained) -> None:
    scores = score_minimal_pairs(encoder, 60, CPU)
    assert 0.35 < scores[-1].accuracy < 0.65
    headless = {name: value for name, value in encoder.state.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match="without its pretraining head"):
        score_minimal_pairs(dataclasses.replace(encoder, state=headless), 5, CPU)


def test_the_pseudo_log_likelihood_masks_each_word_in_turn(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    state = build_towers(model, 3).state_dict()
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocabulary.text)
    export_generator(state, model, encoder.special, vocab, True, tmp_path / "hf")
    loaded = load_pretrained(str(tmp_path / "hf"))
    theirs = ElectraForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    expected = []
    for row in IDS:
        total = 0.0
        for position in range(1, len(row) - 1):
            ids = torch.tensor([row])
            types = derive(ids, loaded.special).token_type_BS
            ids[0, position] = loaded.special.mask
            with torch.no_grad():
                logits = theirs(ids, token_type_ids=types).logits[0, position]
            total += logits.log_softmax(-1)[row[position]].item()
        expected.append(total)
    # A masked [SEP] inside a row would change its token types, so pairs of texts are not what this scores.
    found = pseudo_log_likelihood(loaded, IDS[1:], CPU)
    assert found.tolist() == pytest.approx(expected[1:], abs=1e-4)
    run = Pretrained.from_state("run", state, model, vocabulary, True, tower="generator")
    assert torch.equal(pseudo_log_likelihood(run, IDS[1:], CPU), found)

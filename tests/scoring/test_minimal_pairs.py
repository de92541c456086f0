"""Minimal pairs differ in the number of one word; the head of a model's objective scores the sentences of a pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from transformers import ElectraForMaskedLM

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.model.attention import derive
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.scoring import minimal_pairs
from electra_dist.scoring.minimal_pairs import (
    remarks_on_kinds,
    score_minimal_pairs,
)
from electra_dist.scoring.number_agreement import NOUNS, TEMPLATES, THINGS, make_pairs
from electra_dist.scoring.token_scores import kept_log_prob_function, sentence_log_probs
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
SINGULAR = {"is", "was", "has", "this", "that", *(singular for singular, _ in (*NOUNS, *THINGS))}
PLURAL = {"are", "were", "have", "these", "those", *(plural for _, plural in (*NOUNS, *THINGS))}
PERSON_WORDS = {form for forms in NOUNS for form in forms}
SINGULAR_DETERMINERS = ("this", "that", "one", "every", "another")


class EveryWord:
    """Vocabulary that contains every word."""

    def __contains__(self, word: object) -> bool:
        return True


def test_pairs_are_distinct_and_differ_in_the_number_of_one_word() -> None:
    num_pairs = 150

    pairs_of = make_pairs(EveryWord(), num_pairs)

    assert list(pairs_of) == list(TEMPLATES)
    for pairs in pairs_of.values():
        assert len(pairs) == num_pairs
        assert len(set(pairs)) == num_pairs
        num_plural = 0
        for pair in pairs:
            differing = []
            for index, (good_word, bad_word) in enumerate(zip(pair.good, pair.bad, strict=True)):
                if good_word != bad_word:
                    differing.append(index)
            assert differing == [pair.position]
            forms = {pair.good[pair.position], pair.bad[pair.position]}
            assert len(forms & SINGULAR) == 1
            assert len(forms & PLURAL) == 1
            if pair.good[pair.position] in PLURAL:
                num_plural += 1
        # Neither form is right much more often than the other, so always choosing one is near chance.
        assert 0.3 < num_plural / num_pairs < 0.7


def test_the_right_form_agrees_with_its_subject_its_determiner_or_its_noun_and_verb() -> None:
    pairs_of = make_pairs(EveryWord(), 100)

    for phenomenon in ("subject-verb", "subject-verb across a phrase", "subject-verb across a clause"):
        for pair in pairs_of[phenomenon]:
            subject = next(word for word in pair.good if word in PERSON_WORDS)
            verb = pair.good[pair.position]
            assert (subject in PLURAL) == (verb in PLURAL)
    for pair in (*pairs_of["determiner-noun"], *pairs_of["quantifier-noun"]):
        determiner = pair.good[pair.position - 1]
        noun = pair.good[pair.position]
        assert (determiner in SINGULAR_DETERMINERS) == (noun in SINGULAR)
    for pair in pairs_of["demonstrative"]:
        determiner, _, noun, verb, *_ = pair.good
        assert (determiner in PLURAL) == (noun in PLURAL)
        assert (noun in PLURAL) == (verb in PLURAL)


def test_pairs_depend_on_the_seed_only_and_have_no_word_outside_the_vocabulary() -> None:
    assert make_pairs(EveryWord(), 20, seed=1) == make_pairs(EveryWord(), 20, seed=1)
    assert make_pairs(EveryWord(), 20, seed=1) != make_pairs(EveryWord(), 20, seed=2)

    small_vocabulary = {"the", "old", "good", "boy", "boys", "is", "are", "."}
    pairs_of = make_pairs(small_vocabulary, 30)
    used_words = {word for pairs in pairs_of.values() for pair in pairs for word in pair.good}
    assert used_words <= small_vocabulary
    assert pairs_of["determiner-noun"] == []
    assert 0 < len(pairs_of["subject-verb"]) <= 30


def test_a_pair_is_right_if_the_ungrammatical_word_has_the_higher_logit_for_replaced_and_a_tie_is_wrong(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_ids: list[int] = []  # the token at the scored position of each sentence

    def perfect_logits(model: object, rows: list, positions: list, *rest: object) -> torch.Tensor:
        for row, position in zip(rows, positions):
            scored_ids.append(row[position])
        return torch.arange(len(rows)).float() % 2  # sentences alternate: 0 for a good one, 1 for a bad one

    def equal_logits(model: object, rows: list, *rest: object) -> torch.Tensor:
        return torch.zeros(len(rows))

    monkeypatch.setattr(minimal_pairs, "replaced_logits", perfect_logits)
    scores = score_minimal_pairs(encoder, 10, CPU)
    monkeypatch.setattr(minimal_pairs, "replaced_logits", equal_logits)
    scores_of_ties = score_minimal_pairs(encoder, 10, CPU)

    assert [score.accuracy for score in scores] == [1.0] * len(scores)
    scored_words = {encoder.vocabulary.tokens[token_id] for token_id in scored_ids}
    assert scored_words <= SINGULAR | PLURAL
    *phenomenon_scores, total_score = scores
    assert total_score.pairs == sum(score.pairs for score in phenomenon_scores)
    assert total_score.pairs == len(scored_ids) // 2
    assert scores_of_ties[-1].accuracy == 0.0


def test_all_tokens_mlm_scores_a_word_by_its_own_probability_of_the_word_with_the_copy_gate(
    model: ModelConfig, vocabulary: Vocabulary
) -> None:
    """The independent truth is the loss of the objective on the same text, when its generator replaces no token.

    That loss is minus the sum of log p(this token is the original one) over all tokens.
    """
    without_dropout = model.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    objective = ObjectiveConfig(name="all_tokens_mlm", mlm_weight=0.0)
    special = SpecialIds.from_tokens(vocabulary.special)
    module = build_objective(without_dropout, objective, special, seed=5)
    assert isinstance(module, CorruptingObjective)
    ids = torch.tensor([[2, 60, 61, 62, 63, 3], [2, 70, 71, 72, 73, 3]])
    with torch.no_grad():
        module.towers.copy_gate.bias.fill_(-2.0)
        step_input = StepInput(ids, torch.arange(len(ids)), 0, 1, 0.0, 1.0)
        corrupted = module.corrupt(module.batch(step_input))
        nothing_replaced = corrupted._replace(corrupted_BS=ids, label_BS=torch.zeros_like(ids).bool())
        module.corrupt = lambda batch: nothing_replaced  # type: ignore[method-assign]
        loss = module(step_input).loss

    encoder = Pretrained.from_state("run", module.state_dict(), without_dropout, vocabulary, True, reads_masks=False)
    without_gate_state = {name: value for name, value in encoder.state.items() if "copy_gate" not in name}
    encoder_without_gate = dataclasses.replace(encoder, state=without_gate_state)
    with torch.no_grad():
        log_probs = kept_log_prob_function(encoder, CPU)(ids)
        log_probs_without_gate = kept_log_prob_function(encoder_without_gate, CPU)(ids)

    assert log_probs.sum().item() == pytest.approx(-loss.item(), rel=1e-5)
    assert (log_probs_without_gate < log_probs).all()


def test_each_objective_is_scored_with_the_function_for_its_head(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def recorder(name: str) -> Callable[..., torch.Tensor]:
        """Return a scoring function that records its call and gives every sentence the score 0."""

        def scores(encoder: Pretrained, rows: list, *rest: object) -> torch.Tensor:
            called.append(name)
            return torch.zeros(len(rows))

        return scores

    for name in ("replaced_logits", "sentence_log_probs", "score_places"):
        monkeypatch.setattr(minimal_pairs, name, recorder(name))

    for objective, reads_masks in (("rtd", False), ("mlm", True), ("all_tokens_mlm", False), ("replace_mlm", False)):
        state = build_towers(encoder.model, 1, ObjectiveConfig(name=objective)).state_dict()  # type: ignore[arg-type]
        pretrained = Pretrained.from_state(
            "x", state, encoder.model, encoder.vocabulary, True, reads_masks=reads_masks
        )
        score_minimal_pairs(pretrained, 5, CPU)

    assert called == ["replaced_logits", "sentence_log_probs", "score_places", "score_places"]


def test_a_random_model_is_near_chance_and_a_model_without_its_head_is_refused(encoder: Pretrained) -> None:
    without_head = {name: value for name, value in encoder.state.items() if not name.startswith("head.")}
    headless_encoder = dataclasses.replace(encoder, state=without_head)

    scores = score_minimal_pairs(encoder, 60, CPU)

    assert 0.35 < scores[-1].accuracy < 0.65
    assert remarks_on_kinds(encoder, scores) == []
    others = [score for score in scores if score.phenomenon != "determiner-noun"]
    assert [line.rpartition(": ")[2] for line in remarks_on_kinds(encoder, others)] == ["determiner-noun"]
    with pytest.raises(UserError, match="no pretraining head of the kind needed"):
        score_minimal_pairs(headless_encoder, 5, CPU)


def test_the_pseudo_log_likelihood_is_the_sum_of_each_words_log_probability_when_it_is_masked(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The independent truth is Hugging Face's model of the exported generator, one masked word at a time.

    The row has one text: in a row of two texts, masking the [SEP] between them would change the token types.
    """
    row = [2, 62, 74, 75, 3]  # [CLS], three words, [SEP]
    state = build_towers(model, 3).state_dict()
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocabulary.text)
    export_tower(state, model, "generator", Vocabulary.read(vocab), True, tmp_path / "hf")
    loaded = load_pretrained(str(tmp_path / "hf"))
    hf_generator = ElectraForMaskedLM.from_pretrained(tmp_path / "hf").eval()

    expected = 0.0
    for position in range(1, len(row) - 1):
        ids = torch.tensor([row])
        token_types = derive(ids, loaded.special).token_type_BS
        ids[0, position] = loaded.special.mask
        with torch.no_grad():
            logits = hf_generator(ids, token_type_ids=token_types).logits[0, position]
        expected += logits.log_softmax(-1)[row[position]].item()

    of_export = sentence_log_probs(loaded, [row], CPU)
    generator_of_run = Pretrained.from_state("run", state, model, vocabulary, True, tower="generator")
    of_run = sentence_log_probs(generator_of_run, [row], CPU)

    assert of_export.tolist() == pytest.approx([expected], abs=1e-4)
    assert torch.equal(of_run, of_export)

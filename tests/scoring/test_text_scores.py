"""Scores of texts and tokens, against Hugging Face's models and against the objectives that trained the heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, ElectraForPreTraining

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.pretrained.export import export_towers
from electra_dist.pretrained.hf_folders import PretrainingRecord, write_pretraining_record
from electra_dist.scoring.minimal_pairs import score_sentence_pairs
from electra_dist.scoring.pair_files import SentencePair
from electra_dist.scoring.text_scores import TextScorer, cut_windows
from electra_dist.scoring.token_scores import kept_log_prob_function, sentence_log_probs
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
TEXTS = ["the boy is tired.", "these dogs", "many women saw the old bird near one boy", "x"]


def export(model: ModelConfig, vocabulary: Vocabulary, objective: ObjectiveConfig, folder: Path) -> dict[str, Path]:
    """Export random towers of an objective, with the record of their pretraining, and return the folders."""
    (folder / "vocab.txt").write_text(vocabulary.text)
    state = build_towers(model, 3, objective).state_dict()
    folders = export_towers(state, model, Vocabulary.read(folder / "vocab.txt"), True, folder)
    for tower, tower_folder in folders.items():
        record = PretrainingRecord(
            objective=objective.name,
            tower=tower,  # type: ignore[arg-type]
            seq_len=32,
            steps=(10,),
            rows=160,
            corpus_fingerprint="0" * 64,
            electra_dist="0.1.0",
        )
        write_pretraining_record(tower_folder, record)
    return folders


def test_a_discriminator_gives_each_token_the_probability_that_hugging_faces_model_gives(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    folder = export(model, vocabulary, ObjectiveConfig(), tmp_path)["discriminator"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf_model = ElectraForPreTraining.from_pretrained(folder).eval()

    for scorer in (TextScorer(encoder, CPU), TextScorer(load_pretrained(str(folder)), CPU)):
        for text, text_score in zip(TEXTS, scorer.score(TEXTS), strict=True):
            with torch.no_grad():
                logits = hf_model(**tokenizer(text, return_tensors="pt")).logits[0, 1:-1].double()
            assert text_score.text == text
            assert text_score.tokens == tokenizer.tokenize(text)
            assert text_score.replaced_probability == pytest.approx(logits.sigmoid().tolist(), abs=1e-5)
            expected = torch.log1p(-logits.sigmoid()).sum().item()
            assert text_score.score == pytest.approx(expected, abs=1e-4)


def test_a_text_scores_as_a_sentence_of_a_minimal_pair(encoder: Pretrained, model: ModelConfig) -> None:
    """Discriminator, generator and a model that restores tokens; the better sentence of a pair is the same one."""
    state = build_towers(model, 3).state_dict()
    replace_state = build_towers(model, 3, ObjectiveConfig(name="replace_mlm")).state_dict()
    generator = Pretrained.from_state("generator", state, model, encoder.vocabulary, True, "generator")
    restoring = Pretrained.from_state("restoring", replace_state, model, encoder.vocabulary, True, reads_masks=False)
    special = encoder.special
    rows = [[special.cls, *ids, special.sep] for ids in encoder.tokenizer.encode(TEXTS)]
    for pretrained in (encoder, generator, restoring):
        scores = [text_score.score for text_score in TextScorer(pretrained, CPU).score(TEXTS)]
        assert scores == pytest.approx(sentence_log_probs(pretrained, rows, CPU).tolist(), rel=1e-6)
        pair = SentencePair(kind="any", good=TEXTS[0], bad=TEXTS[1])
        accuracy = score_sentence_pairs(pretrained, [pair], CPU)[0].accuracy
        assert accuracy == float(scores[0] > scores[1])


def test_only_models_that_detect_replaced_tokens_give_their_probability(
    encoder: Pretrained, model: ModelConfig
) -> None:
    state = build_towers(model, 3).state_dict()
    generator = Pretrained.from_state("generator", state, model, encoder.vocabulary, True, "generator")
    electric = dataclasses.replace(encoder, gives_energies=True)
    for pretrained in (generator, electric):
        scorer = TextScorer(pretrained, CPU)
        assert [text_score.replaced_probability for text_score in scorer.score(TEXTS)] == [None] * len(TEXTS)
        with pytest.raises(UserError, match="gives no probability that a token was replaced"):
            scorer.check_detects_replaced()
    TextScorer(encoder, CPU).check_detects_replaced()


def test_electric_scores_a_text_by_minus_the_sum_of_its_energies(
    model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The independent truth is the objective: its outputs on given tokens are energies (`Objective.score_shown`)."""
    without_dropout = model.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    objective = ObjectiveConfig(name="electric")
    special = SpecialIds.from_tokens(vocabulary.special)
    module = build_objective(without_dropout, objective, special, seed=3).eval()
    folder = export(model, vocabulary, objective, tmp_path)["discriminator"]  # of the same weights
    encoder = load_pretrained(str(folder))

    for text, text_score in zip(TEXTS, TextScorer(encoder, CPU).score(TEXTS), strict=True):
        [ids] = encoder.tokenizer.encode([text])
        row = torch.tensor([[special.cls, *ids, special.sep]])
        with torch.no_grad():
            energies = module(StepInput(row, torch.arange(1), 0, 1, 1.0, 1.0, shown_BS=row)).rtd_logit_BS[0, 1:-1]
        assert text_score.log_probs == pytest.approx((-energies).tolist(), abs=1e-5)
        assert text_score.score == pytest.approx(-energies.double().sum().item(), abs=1e-4)


def test_an_exported_model_that_never_saw_mask_is_scored_without_it(
    model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """Without the record of its pretraining, an export of `replace_mlm` looks like a masked language model."""
    folder = export(model, vocabulary, ObjectiveConfig(name="replace_mlm"), tmp_path)["discriminator"]
    encoder = load_pretrained(str(folder))
    special = encoder.special

    [text_score] = TextScorer(encoder, CPU).score(TEXTS[:1])

    row = [special.cls, *encoder.tokenizer.encode(TEXTS[:1])[0], special.sep]
    with torch.no_grad():
        expected = kept_log_prob_function(encoder, CPU)(torch.tensor([row]))[0, 1:-1]
    assert text_score.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
    (folder / "pretraining.json").unlink()
    assert load_pretrained(str(folder)).reads_masks
    (folder / "pretraining.json").write_text("{}")
    with pytest.raises(UserError, match=r"pretraining\.json: damaged"):
        load_pretrained(str(folder))


@given(num_tokens=st.integers(0, 400), window_tokens=st.integers(2, 90))
def test_windows_score_every_token_once_and_give_it_context_on_both_sides(num_tokens: int, window_tokens: int) -> None:
    windows = cut_windows(num_tokens, window_tokens)

    scored = [position for window in windows for position in range(window.first, window.last)]
    assert scored == list(range(num_tokens))
    for window in windows:
        assert 0 <= window.start <= window.first < window.last <= window.end <= num_tokens
        assert window.end - window.start == min(num_tokens, window_tokens)
        context = window_tokens // 4
        assert window.start == 0 or window.first - window.start >= context
        assert window.end == num_tokens or window.end - window.last >= context


def test_a_text_longer_than_the_rows_of_training_is_scored_in_windows_of_them(encoder: Pretrained) -> None:
    """The model has 64 positions and was trained on rows of 20 tokens, so a window has 18."""
    short = dataclasses.replace(encoder, trained_length=20)
    long_text = " ".join(["the boy is tired", "these dogs saw"] * 6)  # 42 tokens
    special = encoder.special
    [ids] = encoder.tokenizer.encode([long_text])
    assert len(ids) == 42

    [text_score] = TextScorer(short, CPU).score([long_text])

    expected = []
    for window in cut_windows(42, 18):
        row = [special.cls, *ids[window.start : window.end], special.sep]
        for position in range(window.first, window.last):
            in_row = 1 + position - window.start
            expected.append(-torch.nn.functional.softplus(_logit(encoder, row, in_row)).item())
    assert text_score.log_probs == pytest.approx(expected, abs=1e-5)
    [in_one_window] = TextScorer(encoder, CPU).score([long_text])
    assert in_one_window.log_probs != pytest.approx(expected, abs=1e-5)
    [longer_than_all_positions] = TextScorer(encoder, CPU).score([f"{long_text} {long_text}"])
    assert len(longer_than_all_positions.log_probs) == 84


def _logit(encoder: Pretrained, row: list[int], position: int) -> torch.Tensor:
    """Return the discriminator's logit at one position of a row, from its backbone and its head's weights."""
    head = encoder.head_state()
    with torch.no_grad():
        state_H = encoder.backbone().eval()(torch.tensor([row]))[0, position]
        hidden_H = torch.nn.functional.gelu(head["dense.weight"] @ state_H + head["dense.bias"])
        return (head["out.weight"] @ hidden_H + head["out.bias"])[0]


def test_many_texts_are_scored_in_portions_with_the_same_result(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXTS[number % len(TEXTS)] for number in range(30)] + [""]
    at_once = list(TextScorer(encoder, CPU).score(texts))
    monkeypatch.setattr("electra_dist.scoring.text_scores._TOKENS_AT_ONCE", 10)
    calls: list[tuple[str, int, int]] = []

    in_portions = list(TextScorer(encoder, CPU).score(texts, lambda *call: calls.append(call)))

    assert len(calls) > 5
    assert calls[-1] == ("score", 31, 31)
    assert [score.text for score in in_portions] == texts
    for one, other in zip(at_once, in_portions, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert in_portions[-1].score == 0.0
    assert in_portions[-1].tokens == []


def test_a_model_without_its_head_is_refused(encoder: Pretrained) -> None:
    without_head = {name: weight for name, weight in encoder.state.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match="no pretraining head of the kind needed"):
        TextScorer(dataclasses.replace(encoder, state=without_head), CPU)

"""Probes read the states of every layer and choose the layer without the development data."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ElectraModel

from electra_dist.config import ModelConfig
from electra_dist.finetune.finetune_and_probe import pooled, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.stored_scores import best_layer
from electra_dist.finetune.task_metrics import metric_with_error
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import padded
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.scoring.number_agreement import ADJECTIVES, NOUNS, THINGS
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
SETTINGS = FinetuneConfig.model_validate({"max_length": 16})
SPEC = TextSpec(name="first", text_a="text", text_b=None, label="label")


def write_task(folder: Path, inverted: bool) -> TextTask:
    """Write texts of five words, labelled by whether the first is a person; `inverted`: wrongly for development."""
    folder.mkdir()
    rng = random.Random(1)
    words = [singular for singular, _ in (*NOUNS, *THINGS)]
    people = {singular for singular, _ in NOUNS}
    for stem, num_texts in (("train", 200), ("dev", 80)):
        lines = ["text\tlabel"]
        for _ in range(num_texts):
            text = [rng.choice(words), rng.choice(ADJECTIVES), rng.choice(words), "near", rng.choice(words)]
            is_person = text[0] in people
            if inverted and stem == "dev":
                is_person = not is_person
            lines.append(f"{' '.join(text)}\t{'person' if is_person else 'thing'}")
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    return TextTask(SPEC, folder)


@pytest.fixture
def hf_encoder(encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path) -> ElectraModel:
    """Hugging Face's model with the weights of `encoder`."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()  # the weights of the fixture `encoder`
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")
    return ElectraModel.from_pretrained(tmp_path / "hf").eval()


def test_the_states_of_all_layers_and_their_means_are_those_of_hugging_faces_model(
    encoder: Pretrained, hf_encoder: ElectraModel
) -> None:
    ids = padded([[2, 62, 74, 75, 80, 3], [2, 90, 3]], encoder.special.pad)
    is_token = ids != encoder.special.pad
    backbone = encoder.backbone().eval()

    with torch.no_grad():
        states = backbone.layer_states(ids)
        hf_output = hf_encoder(ids, attention_mask=is_token.long(), output_hidden_states=True)

    assert len(states) == encoder.tower.num_layers + 1
    for state, hf_state in zip(states, hf_output.hidden_states, strict=True):
        torch.testing.assert_close(state[is_token], hf_state[is_token], atol=1e-5, rtol=1e-4)
        features = pooled(state, is_token)
        expected_of_short_row = torch.cat([hf_state[1, 0], hf_state[1, :3].mean(0)])
        torch.testing.assert_close(features[1], expected_of_short_row, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(states[-1], backbone(ids))  # the hooks are gone, and change nothing


def test_the_layer_is_chosen_on_the_training_data_and_the_score_is_that_of_the_development_data_there(
    encoder: Pretrained, tmp_path: Path
) -> None:
    """Wrong development labels turn the scores round, and change neither the layer nor the held-out scores."""
    right = probe_task(encoder, write_task(tmp_path / "right", inverted=False), SETTINGS, CPU)
    wrong = probe_task(encoder, write_task(tmp_path / "wrong", inverted=True), SETTINGS, CPU)

    assert right.held_out_scores == wrong.held_out_scores
    assert right.layer == wrong.layer == int(np.argmax(right.held_out_scores))
    assert len(right.layer_scores) == encoder.tower.num_layers + 1
    assert right.score == right.layer_scores[right.layer]
    assert wrong.layer_scores == pytest.approx([1.0 - score for score in right.layer_scores])
    assert right.score > 0.6
    assert right.standard_error == pytest.approx(np.sqrt(right.score * (1 - right.score) / 80))


def test_the_best_layer_is_the_lowest_of_equally_good_ones_and_the_last_one_without_held_out_data() -> None:
    assert best_layer([0.5, 0.8, 0.8, 0.7]) == 1
    assert best_layer([None, None, None]) == 2


def test_the_standard_errors_are_those_of_formulas_and_of_a_bootstrap_in_numpy() -> None:
    """For two labels, Matthews correlation is the correlation of the label numbers; the data have no ties in rank."""
    rng = np.random.default_rng(0)
    true = rng.integers(2, size=400)
    predicted = np.where(rng.random(400) < 0.8, true, 1 - true)
    value = rng.normal(size=400)
    predicted_value = value + rng.normal(size=400)
    correlations = []
    rank_correlations = []
    for _ in range(1000):
        rows = rng.integers(400, size=400)
        correlations.append(np.corrcoef(true[rows], predicted[rows])[0, 1])
        ranks = [np.unique(values[rows], return_inverse=True)[1] for values in (value, predicted_value)]
        rank_correlations.append(np.corrcoef(*ranks)[0, 1])

    accuracy = float((predicted == true).mean())
    expected = np.sqrt(accuracy * (1 - accuracy) / 400)
    assert metric_with_error(predicted, true, 2, "accuracy")[0] == pytest.approx(expected)
    assert metric_with_error(predicted, true, 2, "mcc")[0] == pytest.approx(np.std(correlations), rel=0.15)
    assert metric_with_error(predicted_value, value, 0, "spearman")[0] == pytest.approx(
        np.std(rank_correlations), rel=0.15
    )

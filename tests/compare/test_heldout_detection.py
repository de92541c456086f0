"""Held-out detection: samples and AUC by Hugging Face's models and scikit-learn, and which objectives have a score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import roc_auc_score
from support.float64_truth import shaken
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.compare.comparison import Comparison
from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.heldout_measures import DetectionMeasure
from electra_dist.config import ObjectiveConfig
from electra_dist.config.load import load_config, load_section
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import read_manifest
from electra_dist.errors import UserError
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_towers
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary

MakeComparison = Callable[..., Path]


@pytest.fixture
def measure(tiny_corpus: Path) -> DetectionMeasure:
    """The measure on the held-out rows of the corpus of numbered words."""
    store = open_store(f"{tiny_corpus}/heldout")
    return DetectionMeasure(Corpora.of(store, read_manifest(store)))


def logits_of(network: Any, row: np.ndarray, special: list[int]) -> torch.Tensor:
    """Return the output of a model of Hugging Face's for each token of a row, which gets one example at a time."""
    _, cls, sep, _ = special
    outputs = []
    for example in np.split(row, np.flatnonzero(row == cls)[1:]):
        ids = torch.tensor(example)[None]
        is_end = ids == sep
        types = (is_end.cumsum(1) > is_end.int()).long()  # 1 for the second text
        with torch.no_grad():
            outputs.append(network(input_ids=ids, token_type_ids=types).logits[0])
    return torch.cat(outputs)


def test_samples_and_auc_are_those_of_hugging_faces_models(
    measure: DetectionMeasure, make_comparison: MakeComparison, tiny_corpus: Path, tmp_path: Path
) -> None:
    """The truth: a token is sampled where the probabilities, added up in the order of the ids, pass the draw."""
    config = load_config(make_comparison().parent / "base.yaml")
    vocabulary = Vocabulary.read(tiny_corpus / "vocab.txt")
    model = config.model.with_vocabulary_of(vocabulary.size)
    state = shaken(build_towers(model, 3, ObjectiveConfig())).state_dict()
    folders = export_towers(state, model, vocabulary, True, tmp_path / "exported")
    filler = ElectraForMaskedLM.from_pretrained(folders["generator"]).eval()
    detector = ElectraForPreTraining.from_pretrained(folders["discriminator"]).eval()
    special = [vocabulary.special[token] for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    mask = vocabulary.special["[MASK]"]
    scores: list[float] = []
    labels: list[bool] = []
    for original, positions, draws in zip(measure._rows, measure._masked, measure._draws, strict=True):
        assert len(positions) == max(1, round(0.15 * sum(token not in special for token in original)))
        shown = np.array(original)
        shown[positions] = mask
        logits = logits_of(filler, shown, special)[positions].double()
        logits[:, special] = -torch.inf
        for position, draw, probability in zip(positions, draws, logits.softmax(-1).numpy(), strict=True):
            shown[position] = np.flatnonzero(probability.cumsum() > draw)[0]
        is_compared = ~np.isin(original, special)
        scores += logits_of(detector, shown, special)[is_compared].tolist()
        labels += (shown != original)[is_compared].tolist()

    towers = {
        tower: Pretrained.from_state("tiny", state, model, vocabulary, True, tower)  # type: ignore[arg-type]
        for tower in ("discriminator", "generator")
    }
    measured = measure.score(towers["discriminator"], lambda: towers["generator"], lambda *_: None)

    assert 0.1 < np.mean(labels) < 0.16
    assert measured.score == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)
    assert measured.standard_error is not None
    assert measured.items is not None
    assert measured.standard_error == pytest.approx(np.std(measured.items.resamples), rel=0.3)


@pytest.mark.parametrize(
    ("objective", "has_score"),
    [
        ({}, True),
        ({"name": "adversarial"}, True),
        ({"discriminator_mlm_weight": 1.0}, True),
        ({"name": "mlm"}, False),
        ({"name": "all_tokens_mlm"}, False),
        ({"name": "electric"}, False),  # its two one-way towers give no distribution for a masked position alone
        ({"generator": "unigram"}, False),
    ],
)
def test_only_a_discriminator_with_a_generator_that_learns_has_a_score(
    measure: DetectionMeasure, objective: dict[str, object], has_score: bool
) -> None:
    assert measure.applies_to(ObjectiveConfig.model_validate(objective)) == has_score


def test_a_comparison_that_cannot_score_detection_says_so(make_comparison: MakeComparison) -> None:
    criterion = {"statement": "x", "arm": "rtd", "baseline": "mlm", "metrics": ["detection"]}
    without_column = make_comparison(seeds=[1, 2], criterion=criterion)
    with pytest.raises(UserError, match="no column `detection`"):
        load_section(without_column, CompareConfig)
    file = make_comparison(seeds=[1, 2], criterion=criterion, detection=True)
    with pytest.raises(UserError, match=r"criterion\.metrics: mlm has no score `detection`, because it does not"):
        Comparison(load_section(file, CompareConfig), file, None)
    file = make_comparison(detection=True)
    base_file = file.parent / "base.yaml"
    base = yaml.safe_load(base_file.read_text())
    del base["data"]["heldout"]
    base_file.write_text(yaml.safe_dump(base))
    with pytest.raises(UserError, match=r"detection needs held-out rows; set `data\.heldout` in base\.yaml"):
        Comparison(load_section(file, CompareConfig), file, None)
    assert not (file.parent / "out").exists()

"""The context AUC of any encoder: by an oracle, by token frequency, and by Hugging Face's masked language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from transformers import ElectraForMaskedLM

from electra_dist.compare import heldout_measures
from electra_dist.compare.heldout_measures import ContextMeasure
from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import read_manifest
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_towers
from electra_dist.scoring.token_scores import build_token_scorer, score_places
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
Places = Sequence[tuple[int, int]]


@pytest.fixture
def heldout(tiny_corpus: Path) -> Corpora:
    """The held-out rows of the corpus of numbered words."""
    store = open_store(f"{tiny_corpus}/heldout")
    return Corpora.of(store, read_manifest(store))


def original_rows(heldout: Corpora) -> np.ndarray:
    """Return all rows of the held-out corpus as they were before tokens were replaced."""
    return np.concatenate(list(heldout_measures.first_blocks(heldout, heldout.num_rows)))


def test_an_oracle_gets_one_and_a_score_of_the_token_alone_gets_half(
    heldout: Corpora, encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_RS = original_rows(heldout)
    count_of = Counter(rows_RS.reshape(-1).tolist())

    def by_origin(_: Pretrained, ids: list[list[int]], places: Places, *rest: object) -> torch.Tensor:
        is_original = [ids[row][at] == rows_RS[row % len(rows_RS), at] for row, at in places]
        return torch.tensor(is_original, dtype=torch.float32)

    def by_frequency(_: Pretrained, ids: list[list[int]], places: Places, *rest: object) -> torch.Tensor:
        return torch.tensor([float(count_of[ids[row][at]]) for row, at in places])

    measure = ContextMeasure(heldout)
    monkeypatch.setattr(heldout_measures, "score_places", by_origin)
    assert measure.score(encoder, lambda: encoder, print).score == 1.0
    monkeypatch.setattr(heldout_measures, "score_places", by_frequency)
    measured = measure.score(encoder, lambda: encoder, print)
    assert measured.score == pytest.approx(0.5, abs=1e-12)
    assert measured.standard_error is not None
    assert measured.standard_error > 0


def test_equal_corpora_have_equal_digests_and_other_rows_another(heldout: Corpora, tiny_corpus: Path) -> None:
    store = open_store(str(tiny_corpus))
    other = Corpora.of(store, read_manifest(store))
    assert ContextMeasure(heldout).digest == ContextMeasure(heldout).digest
    assert ContextMeasure(heldout).digest != ContextMeasure(other).digest


def test_a_masked_language_model_scores_a_place_as_hugging_faces_model_does(
    model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_text(vocabulary.text)
    state = build_towers(model, 3, ObjectiveConfig()).state_dict()
    special = SpecialIds.from_tokens(vocabulary.special)
    folder = export_towers(state, model, Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path)["generator"]
    hf_model = ElectraForMaskedLM.from_pretrained(folder).eval()
    generator = Pretrained.from_state("generator", state, model, vocabulary, True, "generator")
    ids = [[special.cls, 7, 8, 9, special.sep], [special.cls, 9, 7, special.sep]]
    places = [(0, 2), (1, 1), (0, 3)]
    expected = []
    for row, position in places:
        masked = torch.tensor([ids[row]])
        masked[0, position] = special.mask
        with torch.no_grad():
            logp_V = hf_model(masked).logits[0, position].double().log_softmax(-1)
        expected.append(logp_V[ids[row][position]].item())
    assert score_places(generator, ids, places, CPU).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_discriminator_scores_places_as_it_scores_whole_rows(encoder: Pretrained) -> None:
    special = encoder.special
    ids = [[special.cls, 7, 8, 9, special.sep], [special.cls, 9, 7, special.sep]]
    whole = build_token_scorer(encoder, CPU)(ids, lambda *_: None)
    assert score_places(encoder, ids, [(1, 2), (0, 1)], CPU).tolist() == [whole[1][1].item(), whole[0][0].item()]

"""An encoder from every source is the one that was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import ElectraForPreTraining

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.errors import UserError
from electra_dist.finetune.minimal_pairs import pseudo_log_likelihood, replaced_logits
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.initial_weights import build_towers
from electra_dist.model.row_layout import attention_bias, derive
from electra_dist.pretrained.hf_conversion import export_discriminator
from electra_dist.pretrained.load_encoder import Pretrained, load_pretrained
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
IDS = [[2, 60, 61, 3, 70, 71, 72, 3], [2, 62, 74, 75, 3]]


def write_vocab(vocabulary: Vocabulary, folder: Path) -> Path:
    file = folder / "vocab.txt"
    file.write_text(vocabulary.text)
    return file


def test_a_hugging_face_discriminator_gives_the_logits_that_transformers_gives(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    state = build_towers(model, 3).state_dict()
    vocab = write_vocab(vocabulary, tmp_path)
    export_discriminator(state, model, encoder.special, vocab, True, tmp_path / "hf")
    loaded = load_pretrained(str(tmp_path / "hf"))
    assert loaded.digest == encoder.digest
    theirs = ElectraForPreTraining.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor(IDS[:1])
    with torch.no_grad():
        logits = theirs(ids, token_type_ids=derive(ids, loaded.special).token_type_BS).logits[0]
    for position in (0, 3, 6):
        found = replaced_logits(loaded, IDS[:1], [position], CPU)
        assert found.item() == pytest.approx(logits[position].item(), abs=1e-5)


@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes", "all"])
def test_every_way_of_sharing_gives_the_discriminator_that_was_trained(
    model: ModelConfig, vocabulary: Vocabulary, sharing: str
) -> None:
    update: dict[str, object] = {"sharing": sharing, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if sharing == "all":
        update["generator"] = model.discriminator
    if sharing == "none":
        update["generator_embedding_size"] = 20
    model = model.model_copy(update=update)
    towers = build_towers(model, 5, ObjectiveConfig())
    with torch.no_grad():
        for parameter in towers.parameters():  # differences start at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    ids = torch.tensor(IDS[:1])
    loaded = Pretrained.from_state("run", towers.state_dict(), model, vocabulary, True)
    layout = derive(ids, loaded.special)
    embedded = towers.embed_discriminator(ids, layout)
    expected = towers.discriminator(embedded, attention_bias(layout, embedded.dtype), DropoutKeys.off(ids))
    torch.testing.assert_close(loaded.backbone()(ids), expected)
    generator = Pretrained.from_state("run", towers.state_dict(), model, vocabulary, True, "generator")
    embedded = towers.embed(ids, layout)
    expected = towers.generator(embedded, attention_bias(layout, embedded.dtype), DropoutKeys.off(ids))
    torch.testing.assert_close(generator.backbone()(ids), expected)


def test_a_model_that_predicts_tokens_brings_its_token_head(model: ModelConfig, vocabulary: Vocabulary) -> None:
    state = build_towers(model, 5, ObjectiveConfig(name="mlm")).state_dict()
    loaded = Pretrained.from_state("run", state, model, vocabulary, True)
    assert "layer_norm.weight" in loaded.head_state()
    assert pseudo_log_likelihood(loaded, IDS, CPU).max() < 0
    with pytest.raises(UserError, match="no bidirectional generator"):
        Pretrained.from_state("run", state, model, vocabulary, True, "generator")


def test_padding_and_dropout_of_other_rows_change_nothing(encoder: Pretrained) -> None:
    backbone = encoder.backbone(hidden_dropout=0.3).eval()
    alone = backbone(torch.tensor(IDS[1:]))
    together = backbone(torch.tensor([IDS[0], [*IDS[1], 0, 0, 0]]))
    torch.testing.assert_close(together[1, :5], alone[0])


def test_what_is_no_model_is_one_line(tmp_path: Path, encoder: Pretrained, model: ModelConfig) -> None:
    with pytest.raises(UserError, match="neither a run"):
        load_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="not an ELECTRA model"):
        load_pretrained(str(tmp_path))
    small = Vocabulary("\n".join(encoder.vocabulary.tokens[:50]), "small")
    with pytest.raises(UserError, match="the vocabulary has 50 entries"):
        Pretrained.from_state("x", build_towers(model, 3).state_dict(), model, small, True)

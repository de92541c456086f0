"""ELECTRA-Small, Base and Large: exported to Hugging Face, run there, and imported again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from transformers import AutoModelForPreTraining, AutoTokenizer, pipeline

from electra_dist.config import ModelConfig
from electra_dist.config.load import load_config
from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.export import export_towers
from electra_dist.pretrained.weights import load_tower_folders
from electra_dist.tokenizer import Vocabulary

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB_SIZE = 30522
SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)  # where BERT's uncased vocabulary has them
FIRST_WORD_ID = 1000
WORDS = ["the", "cat", "sat", "on", "mat", "."]
TEXT = "the cat [MASK] on the mat."
MASK_POSITION = 3  # in the row of TEXT: [CLS] the cat [MASK] on the mat . [SEP]


def towers_without_values(model: ModelConfig) -> ElectraTowers:
    """Return towers with uninitialised parameters, which takes much less time than the real initialisation."""
    with torch.device("meta"):
        towers = ElectraTowers(model)
    return towers.to_empty(device="cpu")


def random_towers(model: ModelConfig) -> ElectraTowers:
    """Return towers none of whose parameters has its default value, so that a parameter that is left out shows."""
    towers = towers_without_values(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            is_norm_weight = "norm" in name and name.endswith("weight")
            middle = 1.0 if is_norm_weight else 0.0
            parameter.uniform_(middle - 0.03, middle + 0.03, generator=generator)
        padding_rows = towers.embeddings.word.weight[model.vocab_size :]
        padding_rows.zero_()
    return towers.eval()


def write_vocabulary(folder: Path) -> Path:
    """Write a vocab.txt with the special tokens, WORDS and unused entries, and return its path."""
    tokens = [f"[unused{i}]" for i in range(VOCAB_SIZE)]
    tokens[SPECIAL.pad] = "[PAD]"
    tokens[SPECIAL.unk] = "[UNK]"
    tokens[SPECIAL.cls] = "[CLS]"
    tokens[SPECIAL.sep] = "[SEP]"
    tokens[SPECIAL.mask] = "[MASK]"
    tokens[FIRST_WORD_ID : FIRST_WORD_ID + len(WORDS)] = WORDS
    file = folder / "vocab.txt"
    file.write_text("\n".join(tokens) + "\n")
    return file


@pytest.mark.parametrize(
    "name", ["small", *(pytest.param(size, marks=pytest.mark.sample) for size in ("base_size", "large_25pct_mask"))]
)
def test_exported_towers_compute_the_same_in_hugging_face_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Logits of both towers, the fill-mask pipeline's answer and the states of AutoModel are those of the towers."""
    model = load_config(CONFIGS / f"{name}.yaml").model
    towers = random_towers(model)

    folders = export_towers(towers.state_dict(), model, Vocabulary.read(write_vocabulary(tmp_path)), True, tmp_path)

    ids = AutoTokenizer.from_pretrained(folders["discriminator"])(TEXT, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 9)

    # The logits of our towers.
    layout = derive(ids, SPECIAL)
    mask = SdpaMask(attention_bias(layout, torch.float32))
    word_table = towers.embeddings.word.weight[: model.vocab_size]
    with torch.no_grad():
        embedded = towers.embeddings(ids, layout)
        states = towers.discriminator(embedded, mask, DropoutKeys.off(ids))
        detection_logits = towers.discriminator_head.logits(states)
        generator_states = towers.generator(embedded, mask, DropoutKeys.off(ids))
        token_logits = towers.generator_head.transform(generator_states) @ word_table.T + towers.generator_head.bias

        # The logits of Hugging Face's models.
        hf_discriminator = AutoModelForPreTraining.from_pretrained(folders["discriminator"]).eval()
        fill_mask = pipeline("fill-mask", model=str(folders["generator"]), device="cpu")
        assert (hf_discriminator(ids).logits - detection_logits).abs().max() <= 1e-5
        assert detection_logits.std() > 0.01  # they are not all alike
        assert (fill_mask.model(ids).logits - token_logits).abs().max() <= 1e-5

    best_answer = fill_mask(TEXT)[0]
    probability, token = token_logits[0, MASK_POSITION].softmax(-1).max(-1)
    assert best_answer["token"] == token
    assert best_answer["score"] == pytest.approx(probability.item(), rel=1e-4)

    # The pipeline opens the folder with AutoModel. Large would take the same path with 1.3 GB more to read.
    if name != "large_25pct_mask":
        hf_states = pipeline("feature-extraction", model=str(folders["discriminator"]), device="cpu")(TEXT)
        assert (torch.tensor(hf_states) - states).abs().max() <= 1e-5

    del hf_discriminator, fill_mask  # frees memory
    imported = towers_without_values(model)
    notes = load_tower_folders(imported, folders["discriminator"], folders["generator"])
    assert notes == ["optimizer: a Hugging Face folder holds no moments; they start at zero"]
    exported_state = towers.state_dict()
    for key, tensor in imported.state_dict().items():
        assert torch.equal(tensor, exported_state[key]), key

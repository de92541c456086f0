"""Small, Base and Large as released: out to Hugging Face, its answers, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, pipeline

from electra_dist.config_file import load_config
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import SpecialIds, attention_bias, derive
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf_conversion import export_towers
from electra_dist.pretrained.load_towers import load_pretrained

CONFIGS = Path(__file__).parents[2] / "configs"
SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)  # where BERT's uncased vocabulary has them
WORDS = ["the", "cat", "sat", "on", "mat", "."]
TEXT = "the cat [MASK] on the mat."


def random_towers(model: Any) -> ElectraTowers:
    """Every parameter off its default; much faster than the real initialisation."""
    with torch.device("meta"):
        towers = ElectraTowers(model)
    towers.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.uniform_(middle - 0.03, middle + 0.03, generator=generator)
        towers.embeddings.word.weight[model.vocab_size :] = 0.0
    return towers.eval()


def vocabulary(folder: Path, size: int) -> Path:
    names = [f"[unused{i}]" for i in range(size)]
    names[0], names[100:104] = "[PAD]", ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names[1000 : 1000 + len(WORDS)] = WORDS
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    return folder / "vocab.txt"


@pytest.mark.parametrize("name", ["small", "base_size", "large_25pct_mask"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = load_config(CONFIGS / f"{name}.yaml").model
    towers = random_towers(model)
    folders = export_towers(towers.state_dict(), model, SPECIAL, vocabulary(tmp_path, 30522), True, tmp_path)
    ids = AutoTokenizer.from_pretrained(folders["discriminator"])(TEXT, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 9)

    layout = derive(ids, SPECIAL)
    bias, table = attention_bias(layout, torch.float32), towers.embeddings.word.weight[: model.vocab_size]
    with torch.no_grad():
        embedded = towers.embed(ids, layout)
        states = towers.discriminator(embedded, bias, DropoutKeys.off(ids))
        detected = towers.discriminator_head.logits(states)
        slots = towers.generator_head.transform(towers.generator(embedded, bias, DropoutKeys.off(ids)))
        predicted = slots @ table.T + towers.generator_head.bias

        theirs = AutoModelForPreTraining.from_pretrained(folders["discriminator"]).eval()
        assert (theirs(ids).logits - detected).abs().max() <= 1e-5
        assert detected.std() > 0.01
        filler = pipeline("fill-mask", model=str(folders["generator"]), device="cpu")
        assert (filler.model(ids).logits - predicted).abs().max() <= 1e-5

    answer = filler(TEXT)
    probability, token = predicted[0, 3].softmax(-1).max(-1)
    assert answer[0]["token"] == token
    assert answer[0]["score"] == pytest.approx(probability.item(), rel=1e-4)

    if name != "large_25pct_mask":  # the same path with 1.3 GB more to read
        features = pipeline("feature-extraction", model=str(folders["discriminator"]), device="cpu")(TEXT)
        assert (torch.tensor(features) - states).abs().max() <= 1e-5  # by AutoModel

    del theirs, filler
    with torch.device("meta"):
        again = ElectraTowers(model)
    again.to_empty(device="cpu")
    notes = load_pretrained(again, folders["discriminator"], folders["generator"])
    assert notes == ["optimizer: a Hugging Face folder holds no moments; they start at zero"]
    ours = towers.state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in again.state_dict().items())

"""Towers of the architecture `modern` as Hugging Face folders: written, opened by stock classes, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.modern_models import (
    SPECIAL,
    VOCAB_SIZE,
    hugging_face_config,
    modern_model,
    our_logits,
    random_towers,
)
from transformers import (
    AutoModel,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    pipeline,
)

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.model.attention import derive
from electra_dist.model.towers import ElectraTowers, build_towers
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.pretrained.export import export_tower, export_towers
from electra_dist.pretrained.weights import load_tower_folders
from electra_dist.tokenizer import Vocabulary


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """Write a vocab.txt with the special tokens and w0, w1 and so on; return its path."""
    file = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB_SIZE - 5))]
    file.write_text("\n".join(tokens) + "\n")
    return file


def exported(towers: ElectraTowers, vocab: Path) -> Path:
    """Return the folder with the exports of both towers."""
    folder = vocab.parent / "export"
    export_towers(towers.state_dict(), towers.model, Vocabulary.read(vocab), True, folder)
    return folder


def example_ids() -> torch.Tensor:
    """Return two rows of one example each, longer than a window; the second row is padded."""
    ids = torch.randint(5, VOCAB_SIZE, (2, 70), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = SPECIAL.cls
    ids[0, -1] = SPECIAL.sep
    ids[1, 40] = SPECIAL.sep
    ids[1, 41:] = SPECIAL.pad
    return ids


def test_stock_classes_open_the_folders_and_give_the_logits_of_the_towers(vocab: Path) -> None:
    towers = random_towers(modern_model())
    folder = exported(towers, vocab)
    ids = example_ids()
    real = derive(ids, SPECIAL).is_real_BS
    ours = our_logits(towers, ids)
    inputs = {"input_ids": ids, "attention_mask": real.long()}

    for model_class, name, expected in (
        (ModernBertForTokenClassification, "discriminator", ours.replaced[..., None]),
        (ModernBertForMaskedLM, "generator", ours.tokens),
    ):
        model, report = model_class.from_pretrained(folder / name, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        with torch.no_grad():
            assert (model.eval()(**inputs).logits - expected)[real].abs().max() <= 1e-5


def test_auto_model_fill_mask_and_a_task_of_three_classes_work_on_the_folders(vocab: Path) -> None:
    folder = exported(random_towers(modern_model()), vocab)

    filled = pipeline("fill-mask", model=str(folder / "generator"))("w1 w2 [MASK] w5")
    assert len(filled) == 5 and filled[0]["sequence"].startswith("w1 w2 ")
    assert type(AutoModel.from_pretrained(folder / "discriminator")).__name__ == "ModernBertModel"
    task = ModernBertForSequenceClassification.from_pretrained(
        folder / "discriminator", num_labels=3, ignore_mismatched_sizes=True
    )
    loss = task(input_ids=example_ids(), labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert task.model.layers[1].mlp.Wi.weight.grad.abs().max() > 0


NARROW = {"hidden_size": 16, "num_layers": 2, "num_heads": 1, "intermediate_size": 24}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="shared-tables"),
        pytest.param({"sharing": "all", "generator_layers": 4}, id="shared-layers"),
        pytest.param({"sharing": "none", "generator_embedding_size": 16, "generator": NARROW}, id="narrow-generator"),
    ],
)
def test_weights_exported_and_read_again_are_equal_bit_for_bit(fields: dict[str, Any], vocab: Path) -> None:
    model = modern_model(**fields)
    towers = random_towers(model)
    folder = exported(towers, vocab)
    again = build_towers(model, seed=1)

    notes = load_tower_folders(again, folder / "discriminator", folder / "generator")

    expected = towers.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert notes == ["optimizer: a Hugging Face folder holds no moments; they start at zero"]


def test_a_released_masked_language_model_becomes_discriminator_and_generator(tmp_path: Path) -> None:
    """A folder that transformers has saved can be read, with the names and settings of its own version."""
    model = modern_model(layers=4, generator_layers=4)
    torch.manual_seed(5)
    theirs = ModernBertForMaskedLM(hugging_face_config(model, model.generator)).eval()
    theirs.save_pretrained(tmp_path / "released")
    towers = build_towers(model, seed=1).eval()

    notes = load_tower_folders(towers, tmp_path / "released", tmp_path / "released")

    assert [note.partition(":")[0] for note in notes] == ["discriminator_head", "optimizer"]
    ids = example_ids()
    real = derive(ids, SPECIAL).is_real_BS
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=real.long()).logits
    assert (our_logits(towers, ids).tokens - expected)[real].abs().max() <= 1e-5


def test_a_model_without_a_head_is_read(tmp_path: Path) -> None:
    model = modern_model()
    theirs = AutoModel.from_config(hugging_face_config(model, model.discriminator))
    theirs.save_pretrained(tmp_path / "bare")
    towers = build_towers(model, seed=1)

    load_tower_folders(towers, tmp_path / "bare", None)

    weight = towers.state_dict()["discriminator.layers.2.attention.qkv.weight"]
    assert torch.equal(weight, theirs.state_dict()["layers.2.attn.Wqkv.weight"])


def test_a_generator_narrower_than_its_tables_is_not_exported_and_the_discriminator_is(vocab: Path) -> None:
    towers = random_towers(modern_model(generator=NARROW))

    folder = exported(towers, vocab)

    assert (folder / "discriminator" / "model.safetensors").exists()
    assert not (folder / "generator").exists()
    with pytest.raises(UserError, match="layers of the generator are 16 wide and its token table is 32 wide") as error:
        export_tower(
            towers.state_dict(), towers.model, "generator", Vocabulary.read(vocab), True, folder / "generator"
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_bias": True}, "norm_bias is True, but only False is supported"),
        ({"local_attention": 64}, "local_attention is 64, but the config's discriminator has 16"),
        ({"global_attn_every_n_layers": 2}, "global_attn_every_n_layers is 2, but the config's discriminator has 3"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6"),
        ({"layer_types": ["sliding_attention"] * 4}, "not evenly spaced from the first layer on"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type of full_attention is yarn"),
        ({"model_type": "electra"}, "model_type is electra, but the config's discriminator has modernbert"),
    ],
)
def test_a_folder_of_another_function_is_refused_in_one_line(
    change: dict[str, Any], message: str, vocab: Path
) -> None:
    towers = random_towers(modern_model())
    folder = exported(towers, vocab) / "discriminator"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))

    with pytest.raises(UserError, match=message) as error:
        load_tower_folders(build_towers(towers.model, seed=1), folder, None)
    assert "\n" not in str(error.value)


def test_incomplete_weights_are_refused(vocab: Path) -> None:
    towers = random_towers(modern_model(layers=3))
    folder = exported(towers, vocab) / "discriminator"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 4}))

    with pytest.raises(UserError, match=r"lack 'model\.layers\.3\.attn_norm\.weight'"):
        load_tower_folders(build_towers(modern_model(layers=4), seed=1), folder, None)


@pytest.mark.parametrize("tower", ["discriminator", "generator"])
def test_one_tower_is_read_for_fine_tuning_from_an_export_and_from_a_folder_of_transformers(
    tower: Any, vocab: Path, tmp_path: Path
) -> None:
    model = modern_model(global_rope_theta=5e4, local_rope_theta=2e3, global_every=2)
    towers = random_towers(model)
    folder = exported(towers, vocab) / tower
    theirs = AutoModel.from_pretrained(folder)
    ids = example_ids()
    real = derive(ids, SPECIAL).is_real_BS
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=real.long()).last_hidden_state
    by_class = ModernBertForMaskedLM if tower == "generator" else ModernBertForTokenClassification
    by_class.from_pretrained(folder).save_pretrained(tmp_path / "saved")  # with the settings of its own version
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((folder / name).read_bytes())

    for source in (folder, tmp_path / "saved"):
        loaded = load_pretrained(str(source))

        head = "generator_head" if tower == "generator" else "discriminator_head"
        assert set(loaded.head_state()) == {name for name, _ in getattr(towers, head).named_parameters()}
        states = loaded.backbone().eval()(ids).detach()
        assert (states - expected)[real].abs().max() <= 1e-5


def test_a_folder_of_another_kind_of_model_is_refused(vocab: Path) -> None:
    folder = exported(random_towers(modern_model()), vocab) / "discriminator"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "roberta"}))
    with pytest.raises(UserError, match="neither an ELECTRA model with absolute positions nor a ModernBERT"):
        load_pretrained(str(folder))


def test_positions_beyond_those_of_the_folder_are_accepted_because_there_is_no_table(vocab: Path) -> None:
    folder = exported(random_towers(modern_model(max_positions=64)), vocab)
    longer: ModelConfig = modern_model(max_positions=4096, global_rope_theta=1e6)

    assert load_tower_folders(build_towers(longer, seed=1), folder / "discriminator", None)

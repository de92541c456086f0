"""Weights to and from Hugging Face's names, and the exported folders as Hugging Face's Auto classes open them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.small_models import SIZES
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import RowLayout, attention_bias, derive
from electra_dist.pretrained.hf_conversion import (
    export_discriminator,
    export_generator,
    from_hf_discriminator,
    from_hf_generator,
    to_hf_discriminator,
    to_hf_generator,
)
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "cafe", ".", "café"]


def whole(layout: RowLayout) -> tuple[torch.Tensor, DropoutKeys]:
    """What an encoder takes beside the embeddings."""
    return attention_bias(layout, torch.float32), DropoutKeys.off(layout.is_real_BS)


@pytest.fixture
def exported(tmp_path: Path, make_config: Callable[..., Any], make_towers: Callable[..., Any], special: Any) -> Any:
    model = make_config(32, 64, 16)
    towers = make_towers(model)
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(WORDS + [f"w{i}" for i in range(model.vocab_size - len(WORDS))]) + "\n", "utf-8")
    for export, name in ((export_discriminator, "discriminator"), (export_generator, "generator")):
        export(towers.state_dict(), model, special, vocab, True, tmp_path / name)
    return tmp_path, model, towers


def test_discriminator_folder(exported: Any, special: Any) -> None:
    folder, _, towers = exported
    tokenizer = AutoTokenizer.from_pretrained(folder / "discriminator")
    batch = tokenizer(["The cat sat."], ["cafés cats"], return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert tokens == ["[CLS]", "the", "cat", "sat", ".", "[SEP]", "cafe", "##s", "cat", "##s", "[SEP]"]
    assert batch["token_type_ids"].tolist() == [[0] * 6 + [1] * 5]

    layout = derive(batch["input_ids"], special)
    with torch.no_grad():
        hidden = towers.discriminator(
            towers.embed(batch["input_ids"], layout),
            attention_bias(layout, torch.float32),
            DropoutKeys.off(layout.is_real_BS),
        )
        logits = towers.discriminator_head(hidden, hidden[..., 0] > 0, layout.is_real_BS, backend="reference").logits_T
        plain = AutoModel.from_pretrained(folder / "discriminator").eval()
        full = AutoModelForPreTraining.from_pretrained(folder / "discriminator").eval()
        assert (plain(**batch).last_hidden_state - hidden).abs().max() <= 1e-5
        assert (full(**batch).logits[0] - logits).abs().max() <= 1e-5


def test_generator_folder(exported: Any, special: Any) -> None:
    folder, model, towers = exported
    hf, report = AutoModelForMaskedLM.from_pretrained(folder / "generator", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.tensor([[2, 5, 6, 4, 7, 3]])
    layout = derive(ids, special)
    with torch.no_grad():
        hidden = towers.generator(
            towers.embed(ids, layout), attention_bias(layout, torch.float32), DropoutKeys.off(layout.is_real_BS)
        )
        table = towers.embeddings.word.weight[: model.vocab_size]
        logits = towers.generator_head.transform(hidden) @ table.T + towers.generator_head.bias
        assert (hf.eval()(input_ids=ids).logits - logits).abs().max() <= 1e-5


def test_a_text_that_spells_a_special_token(exported: Any) -> None:
    """Users expect `[MASK]` in a prompt to be the mask: Hugging Face's way, unlike the corpus's."""
    tokenizer = AutoTokenizer.from_pretrained(exported[0] / "generator")
    assert tokenizer("the [MASK] sat")["input_ids"] == [2, 5, 4, 7, 3]
    assert tokenizer.model_max_length == 48


@pytest.mark.parametrize("lowercase", [True, False])
def test_text_ids_equal_the_corpuss(
    lowercase: bool, tmp_path: Path, make_config: Callable[..., Any], make_towers: Callable[..., Any], special: Any
) -> None:
    model = make_config()
    vocab = tmp_path / "vocab.txt"
    words = [*WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrtuvwxyz"), "The", "水"]
    vocab.write_text("\n".join(words + [f"[unused{i}]" for i in range(model.vocab_size - len(words))]) + "\n", "utf-8")
    export_discriminator(make_towers(model).state_dict(), model, special, vocab, lowercase, tmp_path / "out")
    lines = ["The Cafés' cats sat.", "x\u200by\x00z\ttab", "水水 naïve", "a" * 100 + " " + "b" * 101, "", "[unused3]"]
    ours = WordPieceTokenizer(Vocabulary.read(vocab), lowercase).encode(lines)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")(lines, add_special_tokens=False)["input_ids"]
    assert ours == theirs
    assert special.unk in ours[2] or lowercase


def test_files_are_complete_and_fp32(exported: Any) -> None:
    folder, model, _ = exported
    config = json.loads((folder / "discriminator" / "config.json").read_text())
    assert config["architectures"] == ["ElectraForPreTraining"]
    assert (config["embedding_size"], config["hidden_size"], config["vocab_size"]) == (32, 64, 300)
    tensors = load_file(folder / "discriminator" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert tensors["electra.embeddings.word_embeddings.weight"].shape == (model.vocab_size, 32)


@pytest.mark.parametrize("size", SIZES)
def test_import_inverts_export(
    size: tuple[int, int, int, int], make_config: Callable[..., Any], make_towers: Callable[..., Any]
) -> None:
    model = make_config(*size)
    state = make_towers(model).state_dict()
    state["embeddings.word.weight"][model.vocab_size :] = 0.0
    back = from_hf_discriminator(to_hf_discriminator(state, model), model)
    back |= from_hf_generator(to_hf_generator(state, model), model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    prefixed = {f"towers.{name}": tensor for name, tensor in state.items()}
    again = to_hf_discriminator(prefixed, model)
    assert all(torch.equal(tensor, again[name]) for name, tensor in to_hf_discriminator(state, model).items())

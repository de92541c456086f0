"""Weights under Hugging Face's names and back, and exported folders as Hugging Face's Auto classes open them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from safetensors.torch import load_file
from support.small_models import SIZES
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from electra_dist.config import ModelConfig
from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.export import export_tower
from electra_dist.pretrained.hf import from_hf, to_hf
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "cafe", ".", "café"]


class Exported(NamedTuple):
    """Towers, and the Hugging Face folders to which they have been exported."""

    discriminator_dir: Path
    generator_dir: Path
    model: ModelConfig
    towers: ElectraTowers


@pytest.fixture
def exported(
    tmp_path: Path, make_config: Callable[..., Any], make_towers: Callable[..., Any], special: SpecialIds
) -> Exported:
    """Small towers and their folders; the vocabulary has WORDS and, up to its size of 300, w0, w1, ..."""
    model = make_config(32, 64, 16)
    towers = make_towers(model)
    vocab = tmp_path / "vocab.txt"
    filling = [f"w{i}" for i in range(model.vocab_size - len(WORDS))]
    vocab.write_text("\n".join(WORDS + filling) + "\n", "utf-8")
    discriminator_dir = tmp_path / "discriminator"
    generator_dir = tmp_path / "generator"
    export_tower(towers.state_dict(), model, "discriminator", Vocabulary.read(vocab), True, discriminator_dir)
    export_tower(towers.state_dict(), model, "generator", Vocabulary.read(vocab), True, generator_dir)
    return Exported(discriminator_dir, generator_dir, model, towers)


def test_an_exported_discriminator_has_the_states_and_logits_of_the_tower(
    exported: Exported, special: SpecialIds
) -> None:
    towers = exported.towers
    tokenizer = AutoTokenizer.from_pretrained(exported.discriminator_dir)

    # Two texts in one row: the exported tokenizer lowercases, strips accents and gives the second text the type 1.
    batch = tokenizer(["The cat sat."], ["cafés cats"], return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert tokens == ["[CLS]", "the", "cat", "sat", ".", "[SEP]", "cafe", "##s", "cat", "##s", "[SEP]"]
    assert batch["token_type_ids"].tolist() == [[0] * 6 + [1] * 5]

    layout = derive(batch["input_ids"], special)
    with torch.no_grad():
        embedded = towers.embeddings(batch["input_ids"], layout)
        mask = SdpaMask(attention_bias(layout, torch.float32))
        states = towers.discriminator(embedded, mask, DropoutKeys.off(layout.is_real_BS))
        is_replaced = states[..., 0] > 0  # any labels; the logits do not depend on them
        head_output = towers.discriminator_head(states, is_replaced, layout.is_real_BS, backend="reference")

        hf_encoder = AutoModel.from_pretrained(exported.discriminator_dir).eval()
        hf_discriminator = AutoModelForPreTraining.from_pretrained(exported.discriminator_dir).eval()
        assert (hf_encoder(**batch).last_hidden_state - states).abs().max() <= 1e-5
        assert (hf_discriminator(**batch).logits[0] - head_output.logits_T).abs().max() <= 1e-5


def test_an_exported_generator_has_all_weights_and_the_logits_of_the_tower(
    exported: Exported, special: SpecialIds
) -> None:
    towers = exported.towers
    ids = torch.tensor([[2, 5, 6, 4, 7, 3]])  # [CLS] the cat [MASK] sat [SEP]

    hf_generator, report = AutoModelForMaskedLM.from_pretrained(exported.generator_dir, output_loading_info=True)

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    layout = derive(ids, special)
    with torch.no_grad():
        embedded = towers.embeddings(ids, layout)
        mask = SdpaMask(attention_bias(layout, torch.float32))
        states = towers.generator(embedded, mask, DropoutKeys.off(layout.is_real_BS))
        word_table = towers.embeddings.word.weight[: exported.model.vocab_size]
        logits = towers.generator_head.transform(states) @ word_table.T + towers.generator_head.bias
        assert (hf_generator.eval()(input_ids=ids).logits - logits).abs().max() <= 1e-5


def test_the_exported_tokenizer_reads_mask_in_a_prompt_as_the_mask_token(exported: Exported) -> None:
    """Users of Hugging Face expect this; the tokenizer of the corpus reads the same characters as plain text."""
    tokenizer = AutoTokenizer.from_pretrained(exported.generator_dir)

    assert tokenizer("the [MASK] sat")["input_ids"] == [2, 5, 4, 7, 3]
    assert tokenizer.model_max_length == 48  # positions of the model


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_exported_tokenizer_gives_plain_text_the_ids_of_the_corpus_tokenizer(
    lowercase: bool,
    tmp_path: Path,
    make_config: Callable[..., Any],
    make_towers: Callable[..., Any],
    special: SpecialIds,
) -> None:
    model = make_config()
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrtuvwxyz")]  # "##s" is in WORDS
    words = [*WORDS, *letters, "The", "水"]
    unused = [f"[unused{i}]" for i in range(model.vocab_size - len(words))]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(words + unused) + "\n", "utf-8")
    export_tower(
        make_towers(model).state_dict(), model, "discriminator", Vocabulary.read(vocab), lowercase, tmp_path / "out"
    )
    texts = [
        "The Cafés' cats sat.",
        "x\u200by\x00z\ttab",  # a zero-width space, a NUL and a tab
        "水水 naïve",
        "a" * 100 + " " + "b" * 101,  # a word of the largest length, and one that is too long
        "",
        "[unused3]",
    ]

    corpus_ids = WordPieceTokenizer(Vocabulary.read(vocab).ids, lowercase).encode(texts)
    exported_ids = AutoTokenizer.from_pretrained(tmp_path / "out")(texts, add_special_tokens=False)["input_ids"]

    assert corpus_ids == exported_ids
    if not lowercase:  # the accent stays, and the vocabulary has no "ï"
        assert special.unk in corpus_ids[2]


def test_exported_files_have_the_architecture_and_sizes_of_the_model_and_fp32_weights(exported: Exported) -> None:
    config = json.loads((exported.discriminator_dir / "config.json").read_text())
    tensors = load_file(exported.discriminator_dir / "model.safetensors")

    assert config["architectures"] == ["ElectraForPreTraining"]
    assert config["embedding_size"] == 32
    assert config["hidden_size"] == 64
    assert config["vocab_size"] == 300
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, name
    assert tensors["electra.embeddings.word_embeddings.weight"].shape == (exported.model.vocab_size, 32)


@pytest.mark.parametrize("size", SIZES)
def test_weights_converted_to_hugging_face_and_back_are_equal_bit_for_bit(
    size: tuple[int, int, int, int], make_config: Callable[..., Any], make_towers: Callable[..., Any]
) -> None:
    """The names may have the prefix `towers.`, as in the state of a whole objective."""
    model = make_config(*size)
    state = make_towers(model).state_dict()
    state["embeddings.word.weight"][model.vocab_size :] = 0.0  # rows that pad the table, which are not exported

    hf_discriminator = to_hf(state, model, "discriminator")
    restored = from_hf(hf_discriminator, model, "discriminator")
    restored |= from_hf(to_hf(state, model, "generator"), model, "generator")

    assert restored.keys() == state.keys()
    for name in state:
        assert torch.equal(restored[name], state[name]), name

    prefixed_state = {f"towers.{name}": tensor for name, tensor in state.items()}
    from_prefixed = to_hf(prefixed_state, model, "discriminator")
    for name, tensor in hf_discriminator.items():
        assert torch.equal(tensor, from_prefixed[name]), name

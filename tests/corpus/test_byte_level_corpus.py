"""Check corpora of a byte-level tokenizer.json: their rows hold the text, and exported models have the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from electra_launcher.cli.main import app
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_level import TEXTS, byte_level_vocabulary
from support.modern_models import modern_model, random_towers
from transformers import AutoModelForTokenClassification, AutoTokenizer
from typer.testing import CliRunner

from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.vocabulary import train_byte_level_bpe
from electra_dist.data.manifest import read_corpus_vocabulary, read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import UserError
from electra_dist.pretrained.encoder import load_pretrained
from electra_dist.pretrained.export import export_towers
from electra_dist.pretrained.weights import check_vocabulary
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary, new_tokenizer

VOCABULARY = byte_level_vocabulary()


def test_the_rows_of_a_corpus_hold_the_text(
    jsonl_file: Callable[..., Path], build_request: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    texts = [text.replace("dog", "[SEP] [MASK]") for text in TEXTS * 4]
    request = build_request(jsonl_file(texts), vocabulary=VOCABULARY, tokenizer="bpe")

    build_corpus(request)

    store = open_store(str(tmp_path / "corpus"), None)
    manifest = read_manifest(store)
    assert manifest.tokenizer.sha256 == VOCABULARY.sha256
    assert manifest.tokenizer.special == VOCABULARY.special
    assert (manifest.dtype, manifest.tokenizer.lowercase) == ("uint16", False)
    assert read_corpus_vocabulary(store, manifest.tokenizer).text == VOCABULARY.text
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    decoded = ""
    for entry in manifest.shards:
        shard = Shard(tmp_path / "corpus" / entry.name, manifest.seq_len, manifest.numpy_dtype)
        for row in shard.rows(np.arange(shard.num_rows)).tolist():
            assert VOCABULARY.special["[MASK]"] not in row
            added = {VOCABULARY.special[token] for token in ("[PAD]", "[CLS]", "[SEP]")}
            decoded += stock.decode([token for token in row if token not in added], skip_special_tokens=False)
        shard.close()
    assert len(decoded) == sum(len(text) for text in texts)  # each line end has become a space
    assert decoded.count("saw") == sum(text.count("saw") for text in texts)


def decoded_rows(corpus: Path) -> list[str]:
    """Return the text of each row, decoded by the library, without the tokens that a build has added."""
    manifest = read_manifest(open_store(str(corpus), None))
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    added = {VOCABULARY.special[token] for token in ("[PAD]", "[CLS]", "[SEP]")}
    texts = []
    for entry in manifest.shards:
        shard = Shard(corpus / entry.name, manifest.seq_len, manifest.numpy_dtype)
        for row in shard.rows(np.arange(shard.num_rows)).tolist():
            texts.append(stock.decode([token for token in row if token not in added], skip_special_tokens=False))
        shard.close()
    return texts


def test_decoded_rows_are_the_texts_with_spaces_as_line_ends(
    jsonl_file: Callable[..., Path], build_request: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    texts = [
        *TEXTS,
        "The quick fox jumps over the\nlazy dog",
        "a\n\nparagraph\n\n\nand another",
        "\n\tcode:\n    if x:\n        y = 1",
        "trailing space \n\u00c4rger\n\U0001f600 \u4e2d\u6587\nend",
    ]
    request = build_request(
        jsonl_file(texts), vocabulary=VOCABULARY, tokenizer="bpe", seq_len=256, packing="none", short_target_prob=0.0
    )
    build_corpus(request)
    assert sorted(decoded_rows(tmp_path / "corpus")) == sorted(text.replace("\n", " ") for text in texts)


def test_a_text_is_found_at_the_beginning_of_a_document_and_after_other_text(
    jsonl_file: Callable[..., Path], build_request: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    texts = ["lazy dogs sleep", "over the lazy dogs sleep", "over the\nlazy dogs\nsleep", "the crazy dogs sleep"]
    build_corpus(build_request(jsonl_file(texts), vocabulary=VOCABULARY, tokenizer="bpe", packing="none"))
    found = CliRunner().invoke(app, ["corpus", "find", str(tmp_path / "corpus"), "lazy dogs sleep", "--json"])
    assert found.exit_code == 0, found.output
    numbers = [row["row"] for row in json.loads(found.stdout)["rows"]]
    rows = decoded_rows(tmp_path / "corpus")
    assert sorted(rows[number] for number in numbers) == sorted(text.replace("\n", " ") for text in texts[:3])


lines = st.lists(st.one_of(st.sampled_from(["the dog", "", "  ", " a", "b ", "\t"]), st.text(max_size=5)), max_size=8)


@settings(deadline=None, max_examples=100)
@given(lines)
def test_lines_of_a_text_together_are_the_text_with_spaces_as_line_ends(lines: list[str]) -> None:
    text = "\n".join(line for line in lines if len(line.splitlines()) <= 1).replace("\r", "")
    tokenizer = new_tokenizer(VOCABULARY, lowercase=False)
    split = tokenizer.split_lines(text)
    ids = [token for line in tokenizer.encode(split) for token in line]
    stock = tokenizers.Tokenizer.from_str(VOCABULARY.text)
    expected = " ".join(text.splitlines())
    decoded = stock.decode(ids, skip_special_tokens=False)
    assert decoded == expected[: len(decoded)]
    assert not expected[len(decoded) :].strip()
    assert all(line.strip() for line in split)


def test_lines_of_word_pieces_stay_as_they_are() -> None:
    tokens = {token: number for number, token in enumerate([*SPECIAL_TOKENS, "a", "b", "[", "]"])}
    vocabulary = Vocabulary(tokenizers.BertWordPieceTokenizer(tokens, strip_accents=False).to_str(), "tokenizer.json")
    assert new_tokenizer(vocabulary, lowercase=False).split_lines("a\nb a") == ["a", "b a"]


def test_the_commands_train_a_tokenizer_and_refuse_one_of_the_other_kind(
    jsonl_file: Callable[..., Path], vocab_file: Path, tmp_path: Path
) -> None:
    text = jsonl_file(TEXTS)
    output = tmp_path / "tokenizer.json"
    trained = CliRunner().invoke(
        app,
        ["corpus", "vocab", "--input", str(text), "--output", str(output), "--size", "300", "--tokenizer", "bpe"],
    )
    assert trained.exit_code == 0, trained.output
    assert Vocabulary.read(output).text == VOCABULARY.text

    config = tmp_path / "config.yaml"
    demo = Path(__file__).parents[2] / "configs" / "demo_cpu_bert.yaml"
    config.write_text(f"extends: {demo}\ncorpus: {{tokenizer: bpe}}\n")
    command = ["corpus", "build", "--input", str(text), "--output", str(tmp_path / "c"), "--config", str(config)]
    refused = CliRunner().invoke(app, [*command, "--vocab", str(vocab_file)])
    assert isinstance(refused.exception, UserError)
    assert "is a WordPiece vocabulary, but corpus.tokenizer is bpe" in str(refused.exception)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Folder of an exported discriminator with random weights, whose tokenizer is byte-level BPE."""
    towers = random_towers(modern_model(vocab_size=VOCABULARY.size))
    folders = export_towers(towers.state_dict(), towers.model, VOCABULARY, False, tmp_path / "export")
    return folders["discriminator"]


def test_an_export_has_the_tokenizer_and_is_read_with_it(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (4, 0)
    assert not (exported / "vocab.txt").exists()
    encoder = load_pretrained(str(exported))
    for text in TEXTS:
        line = text.replace("\n", " ")
        (ids,) = encoder.tokenizer.encode([line])
        assert tokenizer(line)["input_ids"] == [2, *ids, 3]
    model = AutoModelForTokenClassification.from_pretrained(exported).eval()
    with torch.no_grad():
        assert model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.isfinite().all()


def test_weights_of_a_model_with_another_tokenizer_are_refused_for_a_corpus(exported: Path) -> None:
    check_vocabulary("train.init_from", exported, VOCABULARY)
    other = train_byte_level_bpe(TEXTS[:2], VOCABULARY.size)
    with pytest.raises(UserError, match=r"tokenizer\.json is not the vocabulary of data\.corpus"):
        check_vocabulary("train.init_from", exported, other)

"""Vocabularies and corpora of eight scripts: counts and ids are those of transformers' own tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from electra_launcher.cli.main import app
from support.real_runs import write_tiny_config
from transformers import AutoTokenizer, BertTokenizerFast
from typer.testing import CliRunner

from electra_dist.config import ModelConfig
from electra_dist.corpus.build_report import read_report
from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.data.manifest import read_corpus_vocabulary, read_manifest
from electra_dist.data.shard import Shard
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.export import export_towers
from electra_dist.pretrained.hugging_face_tokenizer import read_hugging_face_vocabulary
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, new_tokenizer

WORDS = {  # script -> (words, whether they are separated by spaces)
    "accents": ("Garçon élève naïve cœur Straße Übermut mañana Ångström Œuvre déjà", True),
    "chinese": ("河岸 旧房子 老狗 看见 一只鸟 孩子们 知道 许多 树木 下雨 明天 学校", False),
    "devanagari": ("नदी पुराना घर कुत्ता चिड़िया बच्चे पेड़ देखता हैं विद्यालय क्षत्रिय", True),
    "arabic": ("النهر البيت القديم الكلب الطائر الأطفال يعرفون أشجارًا مدرسة كَتَبَ", True),
    "finnish": (
        "epäjärjestelmällisyydestäänkään talossammekin juoksentelisinkohan lentokonesuihkumoottori joki koira",
        True,
    ),
    "cyrillic": ("Река Старый дом собака птица дети ёлка деревья школа знают Йод", True),
    "thai": ("แม่น้ำ บ้านเก่า สุนัข นก เด็กๆ ต้นไม้ โรงเรียน น้ำ", False),
    "korean": ("강가의 오래된 집에서 개가 새를 보았다 아이들은 나무를 안다 학교", True),
}


def made_texts(script: str, number: int = 60) -> list[str]:
    """Return texts of random words of a script, with punctuation and digits."""
    rng = random.Random(script)
    words, has_spaces = WORDS[script]
    separator = " " if has_spaces else ""
    ends = {"chinese": "\u3002", "devanagari": "\u0964", "arabic": "\u061f"}
    return [
        separator.join(rng.choices(words.split(), k=rng.randint(4, 12)))
        + f" {rng.randint(1, 99)}"
        + ends.get(script, ".")
        for _ in range(number)
    ]


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def row_texts(corpus: Path, vocabulary: Vocabulary) -> Iterator[list[int]]:
    """Yield the ids of each row without [CLS], [SEP] and [PAD]."""
    manifest = read_manifest(open_store(str(corpus), None))
    ends = {vocabulary.special[token] for token in ("[PAD]", "[CLS]", "[SEP]")}
    for entry in manifest.shards:
        shard = Shard(corpus / entry.name, manifest.seq_len, manifest.numpy_dtype)
        for row in shard.rows(np.arange(shard.num_rows)).tolist():
            yield [number for number in row if number not in ends]
        shard.close()


RULES = {  # options of `corpus vocab` -> rules of transformers' tokenizer
    "--cased": {"do_lower_case": False, "strip_accents": None},
    "": {"do_lower_case": True, "strip_accents": None},
    "--keep-accents": {"do_lower_case": True, "strip_accents": False},
}


@pytest.mark.parametrize("option", RULES)
@pytest.mark.parametrize("script", WORDS)
def test_a_corpus_has_the_tokens_of_transformers_and_an_export_the_tokenizer(
    tmp_path: Path, script: str, option: str
) -> None:
    rules = RULES[option]
    is_json = option == "--keep-accents"
    texts = made_texts(script)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {
        "corpus.lowercase": option != "--cased",
        "corpus.tokenizer": "bpe" if is_json else "wordpiece",
        "corpus.heldout_fraction": 0.0,
        "model.vocab_size": 400,
    }
    write_tiny_config(tmp_path / "c.yaml", tmp_path / "run", str(tmp_path / "corpus"), **settings)
    vocab, corpus = tmp_path / "vocabulary", tmp_path / "corpus"

    said = run("corpus", "vocab", "--input", tmp_path / "text", "--output", vocab, "--size", 400, *option.split())
    run(
        *("corpus", "build", "--input", tmp_path / "text", "--vocab", vocab, "--output", corpus),
        *("--config", tmp_path / "c.yaml"),
    )

    tokens_file = tmp_path / "vocab.txt"
    tokens_file.write_text("\n".join(Vocabulary.read(vocab).tokens) + "\n")
    theirs = BertTokenizerFast(vocab=str(tokens_file), **rules)
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokens = sum(map(len, expected))
    unknown = sum(ids.count(theirs.unk_token_id) for ids in expected)
    vocabulary = read_corpus_vocabulary(
        open_store(str(corpus), None), read_manifest(open_store(str(corpus), None)).tokenizer
    )
    ours = new_tokenizer(vocabulary, rules["do_lower_case"])
    assert ours.encode(texts) == expected
    report = read_report(open_store(str(corpus), None))
    assert report is not None
    (source,) = report.sources.values()
    assert (source.tokens, source.unk_tokens) == (tokens, unknown)
    assert sorted(number for ids in expected for number in ids) == sorted(
        number for ids in row_texts(corpus, vocabulary) for number in ids
    )
    num_words = sum(len(text.split()) for text in texts)
    (line,) = re.findall(r"text: ([\d.]+) pieces per word, ([\d.]+)% \[UNK\]", said)
    assert line == (f"{tokens / num_words:.2f}", f"{100 * unknown / tokens:.2f}")
    losses = re.findall(r"lower-casing removes (?:the )?(accents|\d+% of the characters)", said)
    has_marks = script in ("devanagari", "thai", "arabic")
    has_accents = script in ("accents", "finnish", "cyrillic")
    assert [loss == "accents" for loss in losses] == (
        [has_accents] if option == "" and has_marks | has_accents else []
    )
    assert ("is a tokenizer.json" in said and "--set corpus.tokenizer=bpe" in said) == is_json

    tower = {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "intermediate_size": 16}
    model = ModelConfig.model_validate(
        {"vocab_size": vocabulary.size, "embedding_size": 16, "discriminator": tower, "generator": tower}
    )
    weights = build_towers(model, 1).state_dict()
    folders = export_towers(weights, model, vocabulary, rules["do_lower_case"], tmp_path / "export")
    for folder in folders.values():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == expected
        normalizer = json.loads((folder / "tokenizer.json").read_text())["normalizer"]
        assert (normalizer["lowercase"], normalizer["strip_accents"]) == (
            rules["do_lower_case"],
            rules["strip_accents"],
        )
        if not is_json:
            tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
            assert tokenizer_config["do_lower_case"] is rules["do_lower_case"]
        assert read_hugging_face_vocabulary(folder)[0].tokens == vocabulary.tokens


def test_accents_are_named_from_one_word_in_a_hundred_by_vocab_and_by_a_build_that_trains(tmp_path: Path) -> None:
    words = ["the dog saw a small bird by the river"] * 30
    file = tmp_path / "a.jsonl"
    write_tiny_config(
        tmp_path / "c.yaml", tmp_path / "run", "c", **{"corpus.heldout_fraction": 0.0, "model.vocab_size": 100}
    )
    build = ("corpus", "build", "--input", file, "--config", tmp_path / "c.yaml", "--output")
    vocab = ("corpus", "vocab", "--input", file, "--size", 100, "--output", tmp_path / "vocab.txt")

    for number, is_named in ((2, False), (6, True)):
        texts = [*words, *["für"] * number]  # of 270 words
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        said = f"lower-casing removes the accents and other marks of {number / (270 + number):.0%} of the words"
        assert (said in run(*vocab)) == is_named
        built = " ".join(run(*build, tmp_path / f"corpus-{number}").split())
        assert (said in built) == is_named
    assert said not in run(*build, tmp_path / "cased", "--set", "corpus.lowercase=false")


def test_characters_of_chinese_text_are_kept_until_they_cover_it() -> None:
    """3,000 characters, each as often as the next: with 1,000 of them, two thirds of the text would be [UNK]."""
    characters = [chr(0x4E00 + number) for number in range(3000)]
    texts = ["".join(characters[start : start + 100]) for start in range(0, 3000, 100)]

    large = train_vocabulary(lambda: iter(texts), 30_000, lowercase=True)
    small = train_vocabulary(lambda: iter(texts), 5_000, lowercase=True)

    assert sum(token in set(large.tokens) for token in characters) == 2999  # they cover 99.95 % of the text
    assert sum(token in set(small.tokens) for token in characters) == 1250

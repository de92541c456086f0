"""Minimal pairs of files in BLiMP's and Zorro's format, scored by whole sentences, against Hugging Face's model."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pandas
import pytest
import tokenizers
import torch
from electra_launcher.cli.main import app
from support.byte_level import byte_level_vocabulary
from support.real_runs import write_tiny_config
from transformers import ElectraForMaskedLM, ElectraForPreTraining
from typer.testing import CliRunner

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.scoring import minimal_pairs
from electra_dist.scoring.minimal_pairs import score_sentence_pairs
from electra_dist.scoring.pair_files import SentencePair, read_pair_files
from electra_dist.scoring.token_scores import pseudo_log_likelihoods, sentence_log_probs
from electra_dist.tokenizer import Vocabulary, new_tokenizer

CPU = torch.device("cpu")
BLIMP_LINES = [
    {"sentence_good": "The boy is old.", "sentence_bad": "The boy are old.", "UID": "agreement", "field": "syntax"},
    {"sentence_good": "Many boys come.", "sentence_bad": "Many boy come.", "linguistics_term": "quantifiers"},
    {"sentence_good": "This boy saw.", "sentence_bad": "These boy saw."},
]
ZORRO_TEXT = "the boys is tired .\nthe boy is tired .\nthese book .\nthese books .\n"  # the ungrammatical one first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file of each format, and a file of another kind, which is not read."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    (pairs / "made.jsonl").write_text("".join(json.dumps(record) + "\n" for record in BLIMP_LINES))
    (pairs / "agreement_in_number.txt").write_text(ZORRO_TEXT)
    (pairs / "LICENSE").write_text("free")
    return pairs


def test_both_formats_are_read_with_the_kind_and_the_grammatical_sentence_of_each_pair(folder: Path) -> None:
    of_folder = read_pair_files([folder])

    assert of_folder.pairs == [
        SentencePair("agreement_in_number", good="the boy is tired .", bad="the boys is tired ."),
        SentencePair("agreement_in_number", good="these books .", bad="these book ."),
        SentencePair("agreement", good="The boy is old.", bad="The boy are old."),
        SentencePair("quantifiers", good="Many boys come.", bad="Many boy come."),
        SentencePair("made", good="This boy saw.", bad="These boy saw."),
    ]
    assert read_pair_files([folder / "made.jsonl"]).pairs == of_folder.pairs[2:]
    assert read_pair_files([folder / "made.jsonl"]).sha256 != of_folder.sha256


def test_a_table_of_multiblimp_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "sen": [
                "Sie sagt: \u201eja\u201c.",
                'Das "alte" Haus steht.',
                "\u0432\u043e\u0434\u0430 \u0442\u0435\u0447\u0451\u0442",
            ],
            "wrong_sen": [
                "Sie sagen.",
                'Das "alte" Haus stehen.',
                "\u0432\u043e\u0434\u0430 \u0442\u0435\u043a\u0443\u0442",
            ],
            "phenomenon": ["SV-#", "SV-#", ""],
            "child": [1, 2, 3],
        }
    )
    frame.to_csv(tmp_path / "rus.tsv", sep="\t")

    pairs = read_pair_files([tmp_path]).pairs

    rows = pandas.read_csv(tmp_path / "rus.tsv", sep="\t", keep_default_na=False)
    assert pairs == [
        SentencePair(row.phenomenon or "rus", good=row.sen, bad=row.wrong_sen) for row in rows.itertuples()
    ]
    for content, message in (
        ("sen\tbad\na\tb\n", "no column `wrong_sen`; minimal pairs have sen and wrong_sen, this table has sen, bad"),
        ("sen\twrong_sen\na b\t \n", r"rus\.tsv:2: an empty sentence"),
        ("\n", r"rus\.tsv: no sentences"),
    ):
        (tmp_path / "rus.tsv").write_text(content)
        with pytest.raises(UserError, match=message):
            read_pair_files([tmp_path])


def test_a_sample_has_the_same_pairs_every_time_and_at_most_the_number_of_each_kind() -> None:
    pairs = [SentencePair(kind, f"good {number}", "bad") for number in range(50) for kind in ("a", "b")]
    files = read_pair_files([]).sample(None)._replace(pairs=pairs)

    sample = files.sample(20).pairs

    assert sample == files.sample(20).pairs
    assert sample != pairs[:40]
    assert [pair.kind for pair in sample].count("a") == [pair.kind for pair in sample].count("b") == 20
    assert sorted(sample, key=pairs.index) == sample
    assert files.sample(None).pairs == files.sample(60).pairs == pairs


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "one\ntwo\nthree\n", r"a.txt:3: an odd number of lines"),
        ("a.txt", "one\n\ntwo\n", r"a.txt:2: a blank line"),
        ("a.txt", "\n", r"a.txt: no sentences"),
        ("a.jsonl", '{"sentence_good": "x"}\n', r"a.jsonl:1: no sentence in `sentence_bad`"),
        ("a.jsonl", "[1]\n", r"a.jsonl:1: not a JSON object"),
        ("a.csv", "x\n", r"a.csv: not a file of minimal pairs; use a .jsonl"),
    ],
)
def test_a_line_that_belongs_to_no_pair_is_an_error_with_its_number(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(UserError, match=message):
        read_pair_files([tmp_path / name])
    with pytest.raises(UserError, match="no such file or folder"):
        read_pair_files([tmp_path / "missing"])


def test_a_discriminator_scores_a_sentence_by_the_log_probabilities_that_its_tokens_are_original(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The independent truth is Hugging Face's model of the exported discriminator, one sentence at a time."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()  # the weights of the fixture `encoder`
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")
    hf_discriminator = ElectraForPreTraining.from_pretrained(tmp_path / "hf").eval()
    cls, sep = encoder.special.cls, encoder.special.sep
    rows = [[cls, 62, 74, 75, sep], [cls, 62, 74, 75, 80, 81, 82, 83, 84, 85, 86, sep], [cls, 90, sep]]

    expected = []
    for row in rows:
        with torch.no_grad():
            replaced_logits = hf_discriminator(torch.tensor([row])).logits[0]
        original = 1.0 - replaced_logits.double().sigmoid()
        expected.append(original[1:-1].log().sum().item())

    assert sentence_log_probs(encoder, rows, CPU).tolist() == pytest.approx(expected, abs=1e-4)


def test_equal_copies_of_two_sentences_are_read_once_and_give_each_its_own_score(
    model: ModelConfig, vocabulary: Vocabulary
) -> None:
    state = build_towers(model, 3).state_dict()
    generator = Pretrained.from_state("run", state, model, vocabulary, True, tower="generator")
    good, bad = [2, 62, 74, 75, 3], [2, 62, 80, 75, 3]
    totals: set[int] = set()

    def note_total(_: str, __: int, total: int) -> None:
        totals.add(total)

    both = sentence_log_probs(generator, [good, bad], CPU, note_total)

    assert totals == {5}  # of six copies, those in which 74 and 80 are masked are equal
    alone = [sentence_log_probs(generator, [row], CPU).item() for row in (good, bad)]
    assert both.tolist() == pytest.approx(alone, abs=1e-5)
    assert alone[0] != pytest.approx(alone[1], abs=1e-3)


def test_the_rest_of_a_word_is_masked_with_the_scored_token_in_the_second_sum(
    model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The independent truth is Hugging Face's model; the words are [5 ##6 ##7], [8] and [9 ##6]."""
    tokens = vocabulary.tokens.copy()
    tokens[36], tokens[37] = "##six", "##seven"
    pieces = Vocabulary("\n".join(tokens), "pieces")
    state = build_towers(model, 3).state_dict()
    export_tower(state, model, "generator", pieces, True, tmp_path / "hf")
    hf_generator = ElectraForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    generator = Pretrained.from_state("run", state, model, pieces, True, tower="generator")
    special = generator.special
    row = [special.cls, 35, 36, 37, 38, 39, 36, special.sep]
    masked_places = {1: [1, 2, 3], 2: [2, 3], 3: [3], 4: [4], 5: [5, 6], 6: [6]}

    def log_prob(position: int, places: list[int]) -> float:
        masked = torch.tensor([row])
        masked[0, places] = special.mask
        with torch.no_grad():
            return float(hf_generator(masked).logits[0, position].double().log_softmax(-1)[row[position]])

    continues_word = [[False, True, True, False, False, True], [False]]
    by_token, by_word = pseudo_log_likelihoods(generator, [row, row[:2] + row[-1:]], continues_word, CPU)

    assert by_token[0].item() == pytest.approx(sum(log_prob(place, [place]) for place in masked_places), abs=1e-3)
    assert by_word[0].item() == pytest.approx(sum(log_prob(*item) for item in masked_places.items()), abs=1e-3)
    assert by_token[1] == by_word[1]  # a row of one token


WORDS_WITH_MARKS = [
    "हिन्दी भाषा",
    'It costs 5€, the "quoted" (word) isn\'t well-known',
    "nai\u0308ve café",
    "Привет, мир!",
]


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_words_of_wordpiece_are_those_that_the_library_numbers(
    lowercase: bool,
) -> None:
    characters = sorted(set(unicodedata.normalize("NFD", "".join(WORDS_WITH_MARKS)).replace(" ", "") + "éïitcp"))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{one}" for one in characters)]
    library = tokenizers.BertWordPieceTokenizer(
        {token: number for number, token in enumerate(tokens)}, lowercase=lowercase
    )

    continued = new_tokenizer(Vocabulary("\n".join(tokens), "marks"), lowercase).continues_word(WORDS_WITH_MARKS)

    assert continued == [library_continues(library, line) for line in WORDS_WITH_MARKS]


def test_the_words_of_bpe_are_those_that_the_library_numbers_so_that_a_quote_is_no_part_of_the_word_in_it() -> None:
    vocabulary = byte_level_vocabulary()
    library = tokenizers.Tokenizer.from_str(vocabulary.text)

    continued = new_tokenizer(vocabulary, False).continues_word(WORDS_WITH_MARKS)

    assert continued == [library_continues(library, line) for line in WORDS_WITH_MARKS]
    assert any(map(any, continued))


def library_continues(library: Any, line: str) -> list[bool]:
    words = library.encode(line, add_special_tokens=False).word_ids
    return [place > 0 and word == words[place - 1] for place, word in enumerate(words)]


def test_accuracy_and_standard_error_of_each_kind_and_of_all_pairs(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind `a` has 3 hits among 4 pairs, kind `b` 1 among 2; a tie is a miss."""
    pairs = [SentencePair(kind, "the boy is old", "the boy are old") for kind in "abaaba"]
    gains = torch.tensor([1.0, 0.0, 1.0, -1.0, 1.0, 1.0])
    scores_of_sentences = torch.stack([gains, torch.zeros(6)], 1).flatten()
    monkeypatch.setattr(minimal_pairs, "sentence_log_probs", lambda *_: scores_of_sentences)

    score_a, score_b, total = score_sentence_pairs(encoder, pairs, CPU)

    assert (score_a.phenomenon, score_a.pairs, score_a.accuracy) == ("a", 4, 0.75)
    assert (score_b.phenomenon, score_b.pairs, score_b.accuracy) == ("b", 2, 0.5)
    assert score_a.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert (total.phenomenon, total.pairs) == (minimal_pairs.ALL, 6)
    assert total.accuracy == pytest.approx(4 / 6)
    # The mean of the kinds, weighted by their pairs: sqrt((4/6)^2 se_a^2 + (2/6)^2 se_b^2).
    weighted = math.hypot(4 / 6 * score_a.standard_error, 2 / 6 * score_b.standard_error)
    assert total.standard_error == pytest.approx(weighted)


def test_a_sentence_that_is_longer_than_the_models_positions_is_refused(encoder: Pretrained) -> None:
    long_sentence = "the boy " * encoder.model.max_positions

    with pytest.raises(UserError, match="the model has 64 positions"):
        score_sentence_pairs(encoder, [SentencePair("a", "the boy", long_sentence)], CPU)


def test_pairs_whose_sentences_have_the_same_tokens_are_remarked_on(encoder: Pretrained) -> None:
    pairs = [SentencePair("a", "the boy", "the boys"), SentencePair("a", "The b\u00f3y is", "the boy is")]

    assert minimal_pairs.remarks_on_pairs(encoder, pairs[:1]) == []
    assert minimal_pairs.remarks_on_pairs(encoder, pairs) == [
        f"{encoder.name}: both sentences of 1 of 2 pairs have the same tokens, and count as wrong; first: "
        "The b\u00f3y is / the boy is"
    ]


def test_the_command_scores_the_pairs_of_files_and_refuses_two_models(tiny_corpus: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / "run.yaml", tmp_path / "run", str(tiny_corpus))
    pairs = tmp_path / "order.txt"
    pairs.write_text("w1 w2 w3\nw3 w2 w1\n" * 6)
    arguments = ["minimal-pairs", f"random:{config}", "--file", str(pairs), "--output", str(tmp_path / "scores.json")]

    done = CliRunner().invoke(app, [*arguments, "--pairs", "5"])
    two_models = CliRunner().invoke(app, [*arguments, "--model", "runs/other"])

    assert done.exit_code == 0, done.output
    by_kind = {score["phenomenon"]: score for score in json.loads((tmp_path / "scores.json").read_text())["scores"]}
    assert by_kind["order"]["pairs"] == by_kind["all"]["pairs"] == 5
    assert by_kind["order"]["accuracy"] in (0.0, 1.0)  # the same pair five times
    assert "s.e." in done.output
    assert isinstance(two_models.exception, UserError)

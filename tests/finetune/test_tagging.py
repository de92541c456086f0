"""Tagging: files, rows, spans of BIO tags against cases by hand, and a task that is learnt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.tagging_task import TaggingTask, are_bio_tags, entity_metrics, spans_of, tagged_rows
from electra_dist.finetune.word_files import TaggedSentence, find_tagged_file, read_tagged_file
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained

CPU = torch.device("cpu")
FAST = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=6, batch=16, max_length=24)


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("I-PER I-PER O I-LOC I-PER", [("PER", 0, 1), ("LOC", 3, 3), ("PER", 4, 4)]),  # IOB1, or invalid BIO
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),
        ("S-PER S-PER B-LOC I-LOC E-LOC I-LOC", [("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 4), ("LOC", 5, 5)]),
        ("U-PER L-PER B-LOC L-LOC", [("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 1)]),
        ("O O", []),
    ],
)
def test_spans_of_tags_are_those_of_the_evaluation_of_conll(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert spans_of(tags.split()) == spans


def test_precision_recall_and_f1_count_whole_spans_over_all_sentences() -> None:
    """Of three true and four predicted spans, two agree in both ends and in the type."""
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "O"]]
    predicted = [["B-PER", "I-PER", "O", "B-ORG"], ["B-LOC", "B-ORG", "O"]]

    metrics = entity_metrics(true, predicted)

    assert metrics == {"f1": pytest.approx(4 / 7), "precision": 2 / 4, "recall": pytest.approx(2 / 3)}
    assert entity_metrics([["O"]], [["O"]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0}
    assert are_bio_tags(["O", "B-PER", "I-PER"])
    assert not are_bio_tags(["NOUN", "O"])
    assert not are_bio_tags(["O"])
    assert not are_bio_tags(["B", "O"])


def test_columns_are_separated_by_tabs_or_spaces_and_the_first_and_the_last_count(tmp_path: Path) -> None:
    """Lines of CoNLL-2003 with a document mark, a Windows line end and no line feed at the end."""
    (tmp_path / "train.txt").write_text(
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\r\nrejects VBZ B-VP O\n\n\nNew York\tX\tB-LOC\n#\tO"
    )

    sentences = read_tagged_file(tmp_path / "train.txt")

    assert sentences == [
        TaggedSentence(("EU", "rejects"), ("B-ORG", "O")),
        TaggedSentence(("New York", "#"), ("B-LOC", "O")),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dev.txt", b"the O\n\nalone\n", r"dev\.txt:3: `alone` has no tag; write the word, a tab and its tag"),
        ("dev.txt", b"\n\n", r"dev\.txt: no sentences"),
        ("dev.conll", b"\xff O\n", r"dev\.conll:1: not UTF-8 \(byte 0; in all 1 line\)"),
        ("other.txt", b"the O\n", r"train\.txt: all words are one sentence, .* write an empty line after each"),
        ("train.txt", b"a O\n\nb B-X\n", r"train\.txt: 2 examples are too few .*; put a dev file beside it, or raise"),
        ("dev.txt", b"the NOUN\n", r"do not mark named entities as B-TYPE.*use --task tagging"),
    ],
)
def test_a_wrong_file_is_an_error_of_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "train.txt").write_text("the O\nking B-PER\n")
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UserError, match=message) as caught:
        TaggingTask("ner", tmp_path)

    assert "\n" not in str(caught.value)


def test_two_files_for_one_split_are_an_error(tmp_path: Path) -> None:
    for name in ("dev.txt", "valid.txt"):
        (tmp_path / name).write_text("the O\n")

    with pytest.raises(UserError, match=r"dev\.txt and valid\.txt"):
        find_tagged_file(tmp_path, "dev")


def test_a_long_sentence_is_cut_between_words_and_every_word_is_predicted_once(
    encoder: Pretrained, tmp_path: Path
) -> None:
    """ "xyz" has three pieces and a control character none, so it becomes [UNK]; rows have room for 6 pieces."""
    special = encoder.special
    words = ("the", "xyz", "dog", "xyz", "\u200b", "saw", "abcdefghij", "bird")
    (pieces_of_word,) = encoder.tokenizer.encode(["xyz"])
    assert len(pieces_of_word) == 3

    rows = tagged_rows([words], encoder, max_length=8)

    the, dog, saw, bird = (encoder.tokenizer.encode([word])[0][0] for word in ("the", "dog", "saw", "bird"))
    assert rows[0].ids == [special.cls, the, *pieces_of_word, dog, special.sep]
    assert rows[0].places == [1, 2, 5]
    assert rows[1].ids == [special.cls, *pieces_of_word, special.unk, saw, special.sep]
    assert rows[1].places == [1, 4, 5]
    assert rows[2].ids == [special.cls, *encoder.tokenizer.encode(["abcdefghij"])[0][:6], special.sep]
    assert rows[3].ids == [special.cls, bird, special.sep]
    # The targets are at the first pieces, in the order of the words.
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.txt").write_text("".join(f"{word}\tT{index}\n" for index, word in enumerate(words)))
    task = TaggingTask("tagging", tmp_path)
    examples = task.examples(encoder, FAST.model_copy(update={"max_length": 8}))
    targets = [[task.tags[tag] for tag in row.tolist() if tag >= 0] for row in examples.target_NK]
    assert targets == [["T0", "T1", "T2"], ["T3", "T4", "T5"], ["T6"], ["T7"]]
    assert examples.target_NK[0].nonzero().numel() > 0
    assert [place for place, tag in enumerate(examples.target_NK[0].tolist()) if tag >= 0] == [1, 2, 5]


def test_the_loss_is_the_mean_over_words_and_ignores_other_pieces_and_padding(
    encoder: Pretrained, tmp_path: Path
) -> None:
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.txt").write_text("the a\nxyz b\n\ndog c\n")
    task = TaggingTask("tagging", tmp_path)
    model = task.model(encoder, FAST, seed=0).eval()
    examples = task.examples(encoder, FAST)
    ids = torch.tensor([row + [encoder.special.pad] * (8 - len(row)) for row in examples.ids])

    loss = model(ids, examples.target_NK, DropoutKeys.off(ids))

    logp = model.predict(ids).double().log_softmax(-1)
    words = [(0, 1, 0), (0, 2, 1), (1, 1, 2)]  # (row, place of the first piece, tag)
    assert loss.item() == pytest.approx(-sum(logp[word].item() for word in words) / 3, abs=1e-6)


def write_noun_phrases(folder: Path, suffix: str) -> None:
    """Write sentences whose tags follow from the words: B-ANIMAL for "old dog" begins at "old"."""
    rng = random.Random(3)
    for stem, num_sentences in (("train", 150), ("dev", 40)):
        blocks = []
        for _ in range(num_sentences):
            tagged = []
            for _ in range(3):
                tagged.append((rng.choice(["the", "near", "saw"]), "O"))
                animal = rng.choice(["dog", "bird", "horse"])
                tagged += [("old", "B-ANIMAL"), (animal, "I-ANIMAL")] if rng.random() < 0.5 else [(animal, "B-ANIMAL")]
            blocks.append(tagged)
        if suffix == ".conllu":
            text = "\n".join(
                "".join(f"{n}\t{w}\t_\t{t}\t_\t_\t{0 if n == 1 else 1}\t_\t_\t_\n" for n, (w, t) in enumerate(b, 1))
                for b in blocks
            )
        else:
            text = "\n".join("".join(f"{word} {tag}\n" for word, tag in block) for block in blocks)
        (folder / f"{stem}{suffix}").write_text(text)


def test_entities_whose_tags_depend_on_the_word_before_are_learnt(encoder: Pretrained, tmp_path: Path) -> None:
    write_noun_phrases(tmp_path, ".txt")

    result = finetune_task(encoder, TaggingTask("ner", tmp_path), FAST, 0, CPU)

    assert result.metric == "f1"
    assert result.score is not None
    assert result.score > 0.9
    assert set(result.metrics) == {"accuracy", "f1", "precision", "recall"}
    with pytest.raises(UserError, match="ner has no linear probe"):
        probe_task(encoder, TaggingTask("ner", tmp_path), FAST, CPU)


def test_parts_of_speech_are_read_from_a_treebank_and_scored_by_accuracy(encoder: Pretrained, tmp_path: Path) -> None:
    write_noun_phrases(tmp_path, ".conllu")
    (tmp_path / "dev.conllu").rename(tmp_path / "en_made-ud-dev.conllu")
    task = TaggingTask("tagging", tmp_path)

    almost_no_lr = finetune_task(encoder, task, FAST.model_copy(update={"lr": 1e-12, "epochs": 0.1}), 0, CPU)
    perfect = task.score([sentence.tags for sentence in task.dev])
    constant = task.score([("O",) * len(sentence.words) for sentence in task.dev])

    assert almost_no_lr.metric == "accuracy"
    assert perfect.metrics["accuracy"] == 1.0
    assert perfect.failures == ()
    num_o = sum(tag == "O" for sentence in task.dev for tag in sentence.tags)
    num_words = sum(len(sentence.tags) for sentence in task.dev)
    assert constant.metrics["accuracy"] == pytest.approx(num_o / num_words)
    assert constant.failures == (f"degenerate: all {num_words} predictions are `O`",)

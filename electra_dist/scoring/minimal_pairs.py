"""Measure minimal-pair accuracy: how often a model prefers the grammatical sentence of a pair.

The pairs are those of `number_agreement.py`, such as "the boy is tired" and "the boy are tired", or those of files,
such as BLiMP's. The grammatical sentence must score strictly higher; a tie counts as a miss.
Nothing is trained, so the result describes the model as it came from pretraining. Chance is 50 %.

How: the score of a sentence depends on the head with which the encoder was pretrained; `token_scores.py` computes it.
- A masked language model: the pseudo-log-likelihood of the sentence, with each token masked in turn. On pairs of
  files, the readout "word" masks the rest of the token's word, too; "token" masks the token alone.
- A discriminator, or a model that restores replaced tokens: on pairs of files, the sum over all tokens of the sentence
  of log P(this token is the original one). On pairs of `number_agreement.py`, whose sentences differ in one word, the
  logit or the log-probability of that word alone.
- The discriminator of Electric: the same with minus its energies in place of log P.

Every line of a file belongs to a pair; a line that does not is an error with its number, so no pair is left out
silently. The digest covers the bytes of all files. The suffix decides the format.
- `.jsonl` (BLiMP, https://github.com/alexwarstadt/blimp): one JSON object per line with the sentences `sentence_good`
  and `sentence_bad`. The kind of a pair is its `UID`, without one its `linguistics_term`, without both the name of the
  file.
- `.tsv` (MultiBLiMP, https://github.com/jumelet/multiblimp): a table with the columns `sen` and `wrong_sen`, quoted as
  pandas writes it. The kind of a pair is its `phenomenon`, without one the name of the file.
- `.txt` (Zorro, https://github.com/phueb/Zorro): pairs of lines, first the ungrammatical sentence, then the
  grammatical one. The kind of a pair is the name of the file.

A standard error is that of the choice of pairs: sqrt(p (1 - p) / n) for n pairs of one kind, and over all pairs the
same with the kinds as strata.

Cost: 200 pairs of each of six phenomena are 2,400 short sentences for a discriminator and some 17,000 for an MLM. All
67,000 pairs of BLiMP are 134,000 sentences for a discriminator, and about ten times as many for an MLM.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.training_loop import Progress, quiet
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.number_agreement import Pair, make_pairs
from electra_dist.scoring.token_scores import (
    TokenScorer,
    kept_log_probs,
    predicts_tokens,
    pseudo_log_likelihood,
    pseudo_log_likelihoods,
    replaced_logits,
    row_sums,
    sentence_log_probs,
)
from electra_dist.store.atomic_files import MOST_DATA_BYTES, read_regular
from electra_dist.tables import parse_json_line, read_table, split_lines

_SUFFIXES = (".jsonl", ".tsv", ".txt")


class SentencePair(NamedTuple):
    """Grammatical and ungrammatical sentence that differ little, and the kind of grammar that the pair tests."""

    kind: str  # such as "adjunct_island"
    good: str
    bad: str


class PairFiles(NamedTuple):
    """Minimal pairs that were read from files, in the order of the files, and a digest of these files."""

    pairs: list[SentencePair]
    sha256: str  # of the names and the bytes of all files

    def sample(self, per_kind: int | None) -> PairFiles:
        """Return a fixed random sample of at most `per_kind` pairs (None: all) of each kind, in the files' order."""
        if per_kind is None:
            return self
        rows_of: dict[str, list[int]] = {}
        for row, pair in enumerate(self.pairs):
            rows_of.setdefault(pair.kind, []).append(row)
        kept_rows: list[int] = []
        for rows in rows_of.values():
            order = np.random.default_rng(seed=0).permutation(len(rows))
            kept_rows += [rows[index] for index in order[:per_kind]]
        return self._replace(pairs=[self.pairs[row] for row in sorted(kept_rows)])


def read_pair_files(paths: Sequence[Path]) -> PairFiles:
    """Read minimal pairs from files and folders; of a folder, all .jsonl, .tsv and .txt files are read, by name.

    If a line belongs to no pair, UserError names the file and the line.
    """
    digest = hashlib.sha256()
    pairs: list[SentencePair] = []
    for file in _files(paths):
        raw = read_regular(file, MOST_DATA_BYTES)
        digest.update(f"{file.name} {len(raw)}\n".encode())
        digest.update(raw)
        lines = split_lines(raw, file)
        while lines and not lines[-1].strip():
            lines.pop()
        if not lines:
            raise UserError(f"{file}: no sentences; add at least one pair, or remove the file")
        if file.suffix.lower() == ".jsonl":
            pairs += [_pair_of_object(file, number, line) for number, line in enumerate(lines, start=1)]
        elif file.suffix.lower() == ".tsv":
            pairs += _pairs_of_table(file)
        else:
            pairs += _pairs_of_lines(file, lines)
    return PairFiles(pairs=pairs, sha256=digest.hexdigest())


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return `paths` with each folder replaced by its files of pairs, sorted by name; raise UserError for others."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files_of_folder = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
            if not files_of_folder:
                raise UserError(f"{path}: no .jsonl, .tsv or .txt file in this folder; name a folder of minimal pairs")
            files += files_of_folder
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder of minimal pairs; correct the path")
        elif path.suffix.lower() not in _SUFFIXES:
            raise UserError(
                f"{path}: not a file of minimal pairs; use a .jsonl file in BLiMP's format, a .tsv file in "
                f"MultiBLiMP's or a .txt file in Zorro's"
            )
        else:
            files.append(path)
    return files


def _pair_of_object(file: Path, number: int, line: str) -> SentencePair:
    """Parse line `number` of a .jsonl file as a pair; if it names no kind of pair, the file's name is the kind."""
    json_line = parse_json_line(file, number, line)
    record = json_line.record
    for key in ("sentence_good", "sentence_bad"):
        if record.get(key) is None or not json_line.text(key).strip():
            raise UserError(f"{file}:{number}: no sentence in `{key}`; add the key with its sentence")
    kind_keys = [key for key in ("UID", "linguistics_term") if record.get(key) not in (None, "")]
    kind = json_line.name(kind_keys[0]) if kind_keys else file.stem
    return SentencePair(kind=kind, good=record["sentence_good"], bad=record["sentence_bad"])


def _pairs_of_table(file: Path) -> list[SentencePair]:
    """Read the pairs of a .tsv file; where a line names no `phenomenon`, the file's name is the kind of the pair."""
    table = read_table(file, "\t")
    pairs = []
    for column in ("sen", "wrong_sen"):
        if column not in table.columns:
            raise UserError(
                f"{file}: no column `{column}`; minimal pairs have sen and wrong_sen, this table "
                f"has {', '.join(table.columns)}"
            )
    for _, line in table.lines():
        good, bad = line.text("sen"), line.text("wrong_sen")
        if not good.strip() or not bad.strip():
            raise UserError(f"{line.place}: an empty sentence; write it, or remove the line")
        pairs.append(SentencePair(line.record.get("phenomenon") or file.stem, good, bad))
    return pairs


def _pairs_of_lines(file: Path, lines: Sequence[str]) -> list[SentencePair]:
    """Return the pairs of a .txt file, in which each ungrammatical sentence is followed by its grammatical one."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{file}:{number}: a blank line; remove it, because the lines are read in pairs")
    if len(lines) % 2 == 1:
        raise UserError(
            f"{file}:{len(lines)}: an odd number of lines; each ungrammatical sentence needs the grammatical one in "
            f"the line after it"
        )
    pairs = []
    for bad, good in zip(lines[0::2], lines[1::2]):
        pairs.append(SentencePair(kind=file.stem, good=good, bad=bad))
    return pairs


ALL = "all"  # name of the score over all phenomena


class PairScore(NamedTuple):
    """Accuracy, a fraction, on the pairs of one phenomenon (such as subject-verb agreement), or on `ALL` pairs."""

    phenomenon: str
    pairs: int  # number of pairs
    accuracy: float
    example: str  # a sentence with both forms, as in "the boy is/*are tired ."; empty for `ALL`
    standard_error: float  # of the accuracy, over the choice of pairs
    margin: float  # mean over the pairs of the grammatical sentence's score minus the other's, in nats
    hits: tuple[bool, ...]  # for each pair, whether the grammatical sentence scores higher; empty for `ALL`
    # Accuracy by each readout, for a masked language model on pairs of files; otherwise empty.
    accuracy_by_readout: dict[str, float]


Readout = Literal["token", "word"]  # what a masked language model does not see when it scores a token of a word


class _SingleTokens:
    """Container of all words that are a single token of a model, both at the beginning of a text and after a space."""

    def __init__(self, encoder: Pretrained) -> None:
        self._encoder = encoder
        self._is_single: dict[object, bool] = {}  # the words that were looked up before

    def __contains__(self, word: object) -> bool:
        if word not in self._is_single:
            ids_of_words = self._encoder.tokenizer.encode_words([str(word), str(word)])
            is_known = [self._encoder.special.unk] not in ids_of_words
            self._is_single[word] = is_known and all(len(ids) == 1 for ids in ids_of_words)
        return self._is_single[word]


def score_minimal_pairs(
    encoder: Pretrained, num_pairs: int, device: torch.device, progress: Progress = quiet, seed: int = 0
) -> list[PairScore]:
    """Return how often an encoder prefers the grammatical sentence of pairs made by `number_agreement.make_pairs`.

    `num_pairs` are made for each phenomenon (kind of agreement), or fewer if the vocabulary is small. There is one
    score for each phenomenon with at least one pair, then one for all pairs, named `ALL`. Raises UserError if the
    model has no pretraining head, or if its vocabulary lacks the words to form any pair.
    """
    pairs_of = make_pairs(_SingleTokens(encoder), num_pairs, seed)  # phenomenon -> its pairs
    all_pairs = [pair for phenomenon_pairs in pairs_of.values() for pair in phenomenon_pairs]
    if not all_pairs:
        raise UserError(
            f"{encoder.name}: the vocabulary has too few of the templates' English words to form a sentence pair; "
            f"use a model with an English vocabulary"
        )
    scores = _sentence_scores(encoder, all_pairs, device, progress)
    phenomena = [pair.phenomenon for pair in all_pairs]
    examples = {name: _example(pairs[0]) for name, pairs in pairs_of.items() if pairs}
    return _pair_scores(phenomena, scores, examples)


def score_sentence_pairs(
    encoder: Pretrained,
    pairs: Sequence[SentencePair],
    device: torch.device,
    progress: Progress = quiet,
    readout: Readout = "token",
    scorer: TokenScorer | None = None,
) -> list[PairScore]:
    """Return how often an encoder prefers the grammatical sentence of given pairs (at least one), such as BLiMP's.

    There is one score for each kind of pair, in the order in which the kinds first occur, then one for all pairs,
    named `ALL`. `readout` has an effect on masked language models only. `scorer` scores the tokens in place of
    the encoder, whose tokenizer is used. Raises UserError if the model has no pretraining head, or if a sentence has
    more tokens than the model has positions.
    """
    ids = _encode_sentences(encoder, pairs)
    examples: dict[str, str] = {}
    for pair in pairs:
        examples.setdefault(pair.kind, f"{pair.good} / *{pair.bad}")
    kinds = [pair.kind for pair in pairs]
    if scorer is not None:
        return _pair_scores(kinds, row_sums(scorer(ids, progress)), examples)
    if not (predicts_tokens(encoder) and encoder.reads_masks):
        return _pair_scores(kinds, sentence_log_probs(encoder, ids, device, progress), examples)
    token_sums, word_sums = pseudo_log_likelihoods(encoder, ids, device, progress)
    scores_by_token = _pair_scores(kinds, token_sums, examples)
    scores_by_word = _pair_scores(kinds, word_sums, examples)
    scores = []
    for by_token, by_word in zip(scores_by_token, scores_by_word, strict=True):
        chosen = by_word if readout == "word" else by_token
        accuracies = {"token": by_token.accuracy, "word": by_word.accuracy}
        scores.append(chosen._replace(accuracy_by_readout=accuracies))
    return scores


def remarks_on_pairs(encoder: Pretrained, pairs: Sequence[SentencePair]) -> list[str]:
    """Return a line if both sentences of some pairs have the same tokens, for example because case is dropped."""
    rows = _encode_sentences(encoder, pairs)
    equal = [pair for pair, good, bad in zip(pairs, rows[0::2], rows[1::2], strict=True) if good == bad]
    if not equal:
        return []
    return [
        f"{encoder.name}: both sentences of {len(equal):,} of {len(pairs):,} pairs have the same tokens, and count as "
        f"wrong; first: {equal[0].good} / {equal[0].bad}"
    ]


def _encode_sentences(encoder: Pretrained, pairs: Sequence[SentencePair]) -> list[list[int]]:
    """Return two rows of token ids for each pair: the grammatical sentence, then the ungrammatical one."""
    special = encoder.special
    sentences = []
    for pair in pairs:
        sentences += [pair.good, pair.bad]
    rows = []
    for sentence, token_ids in zip(sentences, encoder.tokenizer.encode(sentences), strict=True):
        row = [special.cls, *token_ids, special.sep]
        if len(row) > encoder.model.max_positions:
            raise UserError(
                f"{encoder.name}: a sentence has {len(row)} tokens, but the model has {encoder.model.max_positions} "
                f"positions: `{sentence}`; remove its pair from the file"
            )
        rows.append(row)
    return rows


def _pair_scores(kinds: Sequence[str], scores: torch.Tensor, examples: dict[str, str]) -> list[PairScore]:
    """Return for each kind of pair, then for all, how often the grammatical sentence has the higher score.

    `kinds` has the kind of each pair. `scores` has two numbers for each: first the grammatical sentence's. `examples`
    maps each kind to one of its pairs as text.
    """
    margins = (scores[0::2].double() - scores[1::2].double()).tolist()
    margins_of: dict[str, list[float]] = {kind: [] for kind in examples}
    for kind, margin in zip(kinds, margins, strict=True):
        margins_of[kind].append(margin)

    results = []
    num_hits = 0
    variance_of_hits = 0.0  # of the number of hits among all pairs, with the kinds as strata
    for kind, margins_of_kind in margins_of.items():
        hits = tuple(margin > 0.0 for margin in margins_of_kind)  # a tie counts as a miss
        num_hits += sum(hits)
        accuracy = sum(hits) / len(hits)
        variance = accuracy * (1.0 - accuracy)  # of a single pair
        results.append(
            PairScore(
                phenomenon=kind,
                pairs=len(hits),
                accuracy=accuracy,
                example=examples[kind],
                standard_error=math.sqrt(variance / len(hits)),
                margin=statistics.fmean(margins_of_kind),
                hits=hits,
                accuracy_by_readout={},
            )
        )
        variance_of_hits += variance * len(hits)
    results.append(
        PairScore(
            phenomenon=ALL,
            pairs=len(margins),
            accuracy=num_hits / len(margins),
            example="",
            standard_error=math.sqrt(variance_of_hits) / len(margins),
            margin=statistics.fmean(margins),
            hits=(),
            accuracy_by_readout={},
        )
    )
    return results


def _sentence_scores(
    encoder: Pretrained, pairs: Sequence[Pair], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Score both sentences of each pair, fp32 [2 * pairs], first the grammatical one; plausible ones score high."""
    special = encoder.special
    ids = []
    positions = []  # for each row, the index of the word that differs
    for pair in pairs:
        for sentence in (pair.good, pair.bad):
            word_ids = encoder.tokenizer.encode_words(sentence)  # one id for each word
            ids.append([special.cls, *itertools.chain.from_iterable(word_ids), special.sep])
            positions.append(1 + pair.position)  # [CLS] shifts every word by one

    if not predicts_tokens(encoder):
        return -replaced_logits(encoder, ids, positions, device, progress)
    if encoder.reads_masks:
        return pseudo_log_likelihood(encoder, ids, device, progress)
    # Replace MLM or All-Tokens MLM: the model never saw [MASK] in training, so it reads the sentence as it stands.
    return kept_log_probs(encoder, ids, positions, device, progress)


def _example(pair: Pair) -> str:
    """Format a pair as one sentence with a star at the ungrammatical form, as in "the boy is/*are tired ."."""
    position = pair.position
    words = list(pair.good)
    words[position] = f"{pair.good[position]}/*{pair.bad[position]}"
    return " ".join(words)

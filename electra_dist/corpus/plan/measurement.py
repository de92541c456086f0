"""Measure what each step of a build costs on this machine, once for each input and settings, for `corpus plan`.

Guarantee: rates are kept in the user's cache folder and are measured again if the input files, the settings of the
build or the machine are others.

How: the sample is the smallest input files. Without input files it is an artificial text with word frequencies like
those of a language: every word is drawn by its rank with the Zipf-Mandelbrot law, P(rank) ~ 1 / (rank + 2.7). Frequent
words are those of the language reference that every Python installation contains; rare words are joined from parts of
these. The tokenizer therefore meets new words all the time, as in a large corpus. In a text of few words it would only
look words up in its cache, which is several times as fast.

Limits: the artificial text is not a language. Rates on the user's own text (`corpus plan --input`) are more accurate.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from electra_dist.config import Config
from electra_dist.console import Console
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import InputFile, search_inputs
from electra_dist.corpus.inputs.text_readers import TextStream
from electra_dist.corpus.plan import corpus_rates
from electra_dist.corpus.plan.corpus_rates import (
    CorpusRates,
    PrepareRate,
    measure_preparation,
    measure_rates,
    read_rates,
    smallest_files,
)
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.vocabulary import train_vocabulary
from electra_dist.errors import UserError, missing_packages
from electra_dist.run.environment_record import cpu
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import canonical_json
from electra_dist.store.user_cache import user_cache_folder
from electra_dist.tokenizer import SPECIAL_TOKENS, Vocabulary

_ARTIFICIAL_TEXT = "made text, in which words are as unequally frequent as in English"
_VOCABULARY_DOCUMENTS = 100  # documents of the sample on which a vocabulary is trained if none is given
_NUM_WORDS = 60_000  # different words that may occur
_RANK_SHIFT = 2.7  # constant of the Zipf-Mandelbrot law
_WORDS_IN_SENTENCE = (6, 30)  # least number, and the number above the largest
_SENTENCES_IN_LINE = (1, 8)
_LINES_IN_DOCUMENT = (1, 24)
_BYTES_PER_WORD = 5  # lower bound of the mean, with the space; so enough words are drawn


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of the CPU time that each step of a corpus build takes, with its own settings and input files."""

    config: Config
    files: list[InputFile]  # [] if the plan is for a number of tokens only
    vocab: Path | None  # vocab.txt or tokenizer.json; None: a vocabulary is trained on the sample
    text_field: str
    preparation: PrepareConfig | None  # of `corpus prepare`, whose stages are then measured, too

    def stored_or_measured(self, console: Console, *, again: bool) -> CorpusRates:
        """Return the rates that an earlier call has stored for this input, settings and machine, or measure them.

        With `again`, rates are always measured. New rates are stored for later calls.
        """
        path = user_cache_folder() / f"corpus-rates-{self._digest()}.json"
        if path.exists() and not again:
            try:
                return read_rates(path)
            except UserError as error:
                console.print(f"{error}; measured again")
        console.print(f"measuring the steps of a build for some seconds; the rates are kept in {path}")
        rates = self._measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:
            out.write((rates.model_dump_json(indent=1) + "\n").encode())
        return rates

    def _request(self, files: Sequence[InputFile], vocabulary: Vocabulary) -> BuildRequest:
        return BuildRequest(
            inputs=files,
            vocabulary=vocabulary,
            output="unused",
            seq_len=self.config.data.seq_len,
            seed=self.config.seed,
            corpus=self.config.corpus,
            text_field=self.text_field,
        )

    def planned_request(self) -> BuildRequest:
        """Return a request with the settings of the build, for a plan, which uses no inputs and no vocabulary."""
        return self._request([], Vocabulary("\n".join(SPECIAL_TOKENS) + "\n", "placeholder"))

    def _digest(self) -> str:
        """Return a digest of everything that rates depend on: paths and sizes of the input, settings, machine."""
        values = {
            "machine": cpu(),
            "files": [[file.location, file.size] for file in self.files],
            "vocab": str(self.vocab),
            "text_field": self.text_field,
            "vocab_size": self.config.model.vocab_size,
            "seq_len": self.config.data.seq_len,
            "corpus": self.config.corpus.model_dump(mode="json"),
            "prepare": self.preparation.model_dump(mode="json") if self.preparation else None,
        }
        return hashlib.sha256(canonical_json(values).encode()).hexdigest()[:16]

    def _measure(self) -> CorpusRates:
        """Measure the rates on the smallest input files or, if there are no input files, on an artificial text."""
        with tempfile.TemporaryDirectory(prefix="corpus-plan-") as folder:
            files = smallest_files(self.files, corpus_rates.SAMPLE_BYTES)
            number = f"{len(files):,} smallest files" if len(files) > 1 else "smallest file"
            sample = f"the {number} of the input"
            if not files:
                path = Path(folder) / "sample.jsonl"
                _write_artificial_text(path, corpus_rates.SAMPLE_BYTES)
                files = search_inputs([path]).files
                sample = _ARTIFICIAL_TEXT
            request = self._request(files, self._vocabulary(files))
            stages = self._measure_preparation(files)
            return measure_rates(request, sample, f"{cpu()['model']}", stages)

    def _measure_preparation(self, files: list[InputFile]) -> list[PrepareRate]:
        """Measure the stages of `corpus prepare` on the sample `files`; return [] if no preparation is planned."""
        if self.preparation is None:
            return []
        try:
            return measure_preparation(self.preparation, files, self.text_field)
        except ModuleNotFoundError:
            raise missing_packages("--prepare", "corpus") from None

    def _vocabulary(self, files: list[InputFile]) -> Vocabulary:
        """Read the given vocabulary, or train one of `model.vocab_size` tokens on the first documents of `files`.

        If they give fewer tokens, unused ones are added. Raises UserError if there is no text, or for a BPE vocabulary
        that is not given.
        """
        if self.vocab is not None:
            return Vocabulary.read(self.vocab)
        corpus = self.config.corpus
        if corpus.tokenizer == "bpe":
            raise UserError("corpus.tokenizer: bpe needs --vocab; pass the tokenizer.json of the corpus")
        stream = TextStream(files, self.text_field, self.config.data.endpoint_url)
        texts = [text for _, text in itertools.islice(stream, _VOCABULARY_DOCUMENTS)]
        if not texts:
            raise UserError(f"the sample: {stream.counts.nothing_usable('give another --input or --text-field')}")
        size = self.config.model.vocab_size
        trained = train_vocabulary(lambda: iter(texts), size, corpus.lowercase)
        return _filled(trained, size)


def _filled(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Add tokens [unused0], [unused1], ... to a vocabulary until it has `size`, which decides the bytes of an id."""
    unused = "".join(f"[unused{number}]\n" for number in range(size - vocabulary.size))
    return Vocabulary(vocabulary.text + unused, "trained on the sample")


def _write_artificial_text(path: Path, num_bytes: int) -> None:
    """Write random documents with about `num_bytes` of text to `path`, as JSON lines with the field `text`.

    Equal arguments give equal bytes with the same versions of Python and NumPy.
    """
    draw = np.random.default_rng(1)
    words = _words(draw)
    weights = 1 / (np.arange(len(words)) + 1 + _RANK_SHIFT)
    cumulative = np.cumsum(weights / weights.sum())
    uniform = draw.random(num_bytes // _BYTES_PER_WORD)
    ranks = np.minimum(np.searchsorted(cumulative, uniform), len(words) - 1)
    drawn_words = (words[rank] for rank in ranks.tolist())
    size = 0
    with path.open("w", encoding="utf-8") as out:
        while size < num_bytes:
            num_lines = draw.integers(*_LINES_IN_DOCUMENT)
            text = "\n".join(_line(drawn_words, draw) for _ in range(num_lines))
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text)


def _line(drawn_words: Iterator[str], draw: np.random.Generator) -> str:
    sentences = []
    for _ in range(draw.integers(*_SENTENCES_IN_LINE)):
        num_words = draw.integers(*_WORDS_IN_SENTENCE)
        sentence = " ".join(itertools.islice(drawn_words, int(num_words)))
        sentences.append(f"{sentence.capitalize()}.")
    return " ".join(sentences)


def _words(draw: np.random.Generator) -> list[str]:
    """Return 60,000 words like English ones, the most frequent first; rare ones are joined from parts of others."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    counts: Counter[str] = Counter()
    for topic in sorted(topics):
        counts.update(re.findall(r"[a-z]+", topics[topic].lower()))
    common = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    long_words = [word for word in common if len(word) > 4]
    pairs = draw.integers(len(long_words), size=(_NUM_WORDS - len(common), 2)).tolist()
    rare = [long_words[first][:3] + long_words[second][3:] for first, second in pairs]
    return common + rare

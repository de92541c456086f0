"""`electra-dist corpus vocab`: train a vocabulary on input files. `corpus build` finds or trains its own here, too."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from electra_dist.console import Console
from electra_dist.errors import UserError
from electra_launcher.cli.command_output import open_console, progress_bar
from electra_launcher.cli.options import EndpointUrl

if TYPE_CHECKING:  # Each command imports what it needs, so that its --help answers at once.
    from electra_dist.config import Config
    from electra_dist.corpus.counts import Counts
    from electra_dist.corpus.inputs.find_inputs import InputFile
    from electra_dist.corpus.inputs.text_decoding import Undecodable
    from electra_dist.corpus.vocabulary import TextFit, TokenizerKind, VocabularySample
    from electra_dist.tokenizer import Vocabulary

SAMPLE_GB = 10.0  # default limit of the sample; two hours of training on one core
_SAMPLE_SEED = 1  # a constant, so that equal inputs always give the same vocabulary
_MOST_SOURCES = 20  # that are named with the pieces per word
_ASSUMED_COMPRESSION = 10  # of inputs; those whose files take at most a tenth of the limit are read as a whole


def train_vocab(
    inputs: Annotated[list[str], typer.Option("--input", help="as for `corpus build`; may be repeated")],
    output: Annotated[Path, typer.Option(help="vocab.txt or tokenizer.json to write; an existing file is replaced")],
    size: Annotated[int, typer.Option(min=1, help="entries wanted; a small text may give fewer")] = 30522,
    cased: Annotated[bool, typer.Option("--cased", help="keep upper case and accents; default: remove both")] = False,
    keep_accents: Annotated[
        bool,
        typer.Option(
            "--keep-accents",
            help="lower-case text and keep accents and vowel signs; writes a tokenizer.json, for `corpus build --set "
            "corpus.tokenizer=bpe`",
        ),
    ] = False,
    tokenizer: Annotated[
        Literal["wordpiece", "bpe"],
        typer.Option(help="wordpiece, or bpe for a tokenizer.json of byte-level BPE, which keeps case and accents"),
    ] = "wordpiece",
    text_field: Annotated[str, typer.Option(help="as for `corpus build`")] = "text",
    sample_gb: Annotated[
        float, typer.Option(min=0.001, help="most text to train on, in GB; of larger inputs a sample is taken")
    ] = SAMPLE_GB,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Train a WordPiece or byte-level BPE vocabulary on text files; the same input always gives the same one."""
    from electra_dist.corpus.inputs.find_inputs import find_inputs, refuse_output_among_inputs
    from electra_dist.store.atomic_files import replacing

    refuse_output_among_inputs(str(output), inputs)
    if keep_accents and (cased or tokenizer == "bpe"):
        other = "--cased" if cased else "--tokenizer bpe"
        raise UserError(f"--keep-accents: {other} keeps accents and case; leave one of the two options out")
    training = _Training(text_field, "skip", endpoint_url, sample_gb, open_console(soft_wrap=False))
    files = find_inputs(inputs, endpoint_url)
    vocabulary = training.train(files, size, not cased, tokenizer, keep_accents)
    with replacing(output) as out:
        out.write(vocabulary.text.encode())
    out_lines = open_console()
    out_lines.print(f"{output}: {vocabulary.size} entries, sha256 {vocabulary.sha256}", soft_wrap=True)
    for remark in training.remarks(files, vocabulary, not cased):
        out_lines.print(remark, soft_wrap=True)
    if vocabulary.kind == "bpe":
        out_lines.print(
            f"{output} is a tokenizer.json: `corpus build --vocab {output}` needs --set corpus.tokenizer=bpe",
            soft_wrap=True,
        )


def find_vocabulary(
    path: Path | None, files: list[InputFile], settings: Config, output: str, text_field: str, console: Console
) -> Vocabulary:
    """Return the vocabulary of a build: from `path`, from the output's vocab.txt, or newly trained on `files`.

    ManifestMismatch is raised if the vocab.txt in the output has changed since this build began.
    """
    from electra_dist.corpus.builder.build_records import read_output_vocabulary
    from electra_dist.store.open_store import open_store
    from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

    wanted_kind = settings.corpus.tokenizer
    if path is not None:
        vocabulary = Vocabulary.read(path)
        _check_kind(vocabulary, wanted_kind, str(path))
        return vocabulary
    store = open_store(output, settings.data.endpoint_url)
    if store.exists(VOCAB_FILE):
        vocabulary = read_output_vocabulary(store)
        _check_kind(vocabulary, wanted_kind, f"{store.url}/{VOCAB_FILE}")
        return vocabulary
    console.print(f"training a vocabulary of {settings.model.vocab_size} entries")
    corpus = settings.corpus
    training = _Training(text_field, corpus.undecodable, settings.data.endpoint_url, SAMPLE_GB, console)
    vocabulary = training.train(files, settings.model.vocab_size, corpus.lowercase, wanted_kind)
    for line in training.losses(files, vocabulary, corpus.lowercase):
        console.print(line, soft_wrap=True)
    return vocabulary


def _check_kind(vocabulary: Vocabulary, wanted_kind: TokenizerKind, name: str) -> None:
    """Raise a UserError if a vocabulary is not of the kind (WordPiece or BPE) that `corpus.tokenizer` sets."""
    if vocabulary.kind == wanted_kind:
        return
    description = "a tokenizer.json" if vocabulary.kind == "bpe" else "a WordPiece vocabulary"
    raise UserError(
        f"{name}: is {description}, but corpus.tokenizer is {wanted_kind}; set corpus.tokenizer: {vocabulary.kind}, "
        f"or give another --vocab"
    )


def _lines_on_losses(fits: dict[str, TextFit], vocabulary: Vocabulary, lowercase: bool) -> list[str]:
    """Return a line for each source from which lower-casing removes many accents or vowel signs."""
    if not lowercase or vocabulary.kind == "bpe":
        return []
    return [
        f"{source}: lower-casing removes {fit.lost_by_lowercase}; to keep them, use `corpus vocab --keep-accents` "
        f"and set corpus.tokenizer: bpe for the build, or --cased and corpus.lowercase: false"
        for source, fit in fits.items()
        if fit.lost_by_lowercase
    ]


class _NoText(UserError):
    """Error: none of the documents that were read has a text."""


class _Training:
    """Training of a vocabulary on input files, or on a sample of them, with a progress bar."""

    def __init__(
        self, text_field: str, undecodable: Undecodable, endpoint_url: str | None, sample_gb: float, console: Console
    ) -> None:
        self._text_field = text_field
        self._endpoint_url = endpoint_url
        self._undecodable = undecodable
        self._limit_bytes = int(sample_gb * 1e9)
        self._console = console
        self._counts: Counts | None = None  # of the latest pass over all of some files

    def train(
        self,
        files: list[InputFile],
        size: int,
        lowercase: bool,
        kind: TokenizerKind,
        keep_accents: bool = False,
    ) -> Vocabulary:
        """Train a vocabulary on all files or, if the files are large, on a sample of their documents.

        The sample is kept in a temporary folder. The same files and settings always give the same vocabulary.
        """
        from electra_dist.corpus.vocabulary import VocabularySample, train_kind

        num_bytes = sum(file.size for file in files)
        if num_bytes * _ASSUMED_COMPRESSION <= self._limit_bytes:
            texts = lambda: (text for _, _, text in self._texts(files))  # noqa: E731
            return train_kind(kind, texts, size, lowercase, keep_accents)
        with tempfile.TemporaryDirectory(prefix="electra-sample-") as folder:
            sample = VocabularySample(Path(folder), self._limit_bytes, _SAMPLE_SEED)
            self._take(sample, files)
            self._console.print(f"training on a sample of {sample.num_bytes / 1e9:.2f} GB")
            return train_kind(kind, sample.texts, size, lowercase, keep_accents)

    def remarks(self, files: list[InputFile], vocabulary: Vocabulary, lowercase: bool) -> list[str]:
        """Return what was left out in the training, and a line for each source on how the vocabulary divides its text.

        Sources with most [UNK] come first.
        """
        lines = [] if self._counts is None else self._counts.remarks_on_documents()
        fits, sources_without_text = self._measure(files, vocabulary, lowercase)
        lines += sources_without_text
        ordered = sorted(fits.items(), key=lambda item: -item[1].unknown / max(1, item[1].tokens))
        lines += [f"{source}: {fit.remark}" for source, fit in ordered]
        num_sources = len({file.source for file in files})
        if num_sources > _MOST_SOURCES:
            lines.append(f"and {num_sources - _MOST_SOURCES:,} more sources")
        return lines + _lines_on_losses(fits, vocabulary, lowercase)

    def losses(self, files: list[InputFile], vocabulary: Vocabulary, lowercase: bool) -> list[str]:
        """Return a line for each source from which lower-casing removes many accents or vowel signs."""
        fits, _ = self._measure(files, vocabulary, lowercase)
        return _lines_on_losses(fits, vocabulary, lowercase)

    def _measure(
        self, files: list[InputFile], vocabulary: Vocabulary, lowercase: bool
    ) -> tuple[dict[str, TextFit], list[str]]:
        """Measure how the vocabulary divides the text of each source, at most `_MOST_SOURCES` of them.

        Return source -> measures, and an error line for each source in which no document has a text.
        """
        from electra_dist.corpus.vocabulary import measure_fit

        files_of: dict[str, list[InputFile]] = {}
        for file in files:
            files_of.setdefault(file.source, []).append(file)
        fits: dict[str, TextFit] = {}
        without_text: list[str] = []
        for source, files_of_source in itertools.islice(files_of.items(), _MOST_SOURCES):
            texts = (text for _, _, text in self._texts(files_of_source))
            try:
                fits[source] = measure_fit(vocabulary, lowercase, texts)
            except _NoText as error:
                without_text.append(f"{source}: {error}")
        return fits, without_text

    def _take(self, sample: VocabularySample, files: list[InputFile]) -> None:
        """Fill `sample` with random documents of `files`; the progress bar shows how many MB are read."""
        ends = [0]
        for file in files:
            ends.append(ends[-1] + file.size)
        with progress_bar(self._console) as report:
            sample.take(
                self._texts(files),
                lambda file: report("sample for the vocabulary, MB", ends[file] // 10**6, ends[-1] // 10**6),
            )

    def _texts(self, files: list[InputFile]) -> Iterator[tuple[int, int, str]]:
        """Yield of each document the number of its file, its number in the file, and its text.

        Documents without a text, or with one that cannot be decoded, are left out. Raises _NoText if all are.
        """
        from electra_dist.corpus.inputs.text_readers import TextStream

        stream = TextStream(files, self._text_field, self._endpoint_url, self._undecodable)
        has_text = False
        for document, text in stream:
            has_text = True
            yield document.file, document.number, text
        self._counts = stream.counts
        if not has_text:
            raise _NoText(stream.counts.nothing_usable("correct --input or --text-field"))

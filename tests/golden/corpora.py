"""Golden corpora: every byte of corpora that are built from files of all formats."""

from __future__ import annotations

from pathlib import Path

from support.corpus_texts import BUILD_CONFIG, make_prose, make_vocabulary
from support.raw_inputs import RAW_FORMATS, write_raw_inputs

from golden.comparison import Kind
from golden.doors import command, files_below

BUILDS: dict[str, list[str]] = {
    "plain": [],
    "packed rows": ["corpus.packing=rows"],
    "no packing": ["corpus.packing=none"],
    "epochs of the sources": ["corpus.source_epochs={texts/a: 2.5, texts/b: 0.5}"],
    "shares of the sources": ["corpus.source_shares={texts/a: 1, texts/b: 0, texts/c: 3, texts/d: 2}"],
    "no origin files": ["corpus.origins=false"],
    "another seed": ["seed=7"],
    "in parts": [],
}
# report.html has times; progress/ is deleted at the end.
LEFT_OUT = ("report.html", "build.json")


def names() -> list[str]:
    """Return the names of all builds."""
    return list(BUILDS)


def make(name: str, folder: Path) -> dict[str, str]:
    """Build a corpus by the command and return the digests of its files."""
    texts = [text.replace("\n", " ") for text in make_prose(4 * len(RAW_FORMATS), seed=3)]
    write_raw_inputs(folder / "texts", texts)
    vocabulary = make_vocabulary()
    (folder / "vocab.txt").write_text(vocabulary.text)
    (folder / "build.yaml").write_text(BUILD_CONFIG.format(vocab_size=len(vocabulary.tokens)))
    options = ["--input", "texts", "--output", "corpus", "--vocab", "vocab.txt", "--config", "build.yaml"]
    for setting in BUILDS[name]:
        options += ["--set", setting]
    if name == "in parts":
        for part in (1, 2, 3):
            command(folder, "corpus", "build", *options, "--workers", "1", "--part", f"{part}/3")
        command(folder, "corpus", "merge", "corpus")
    else:
        command(folder, "corpus", "build", *options, "--workers", "2")
    return files_below(folder / "corpus", LEFT_OUT)


KIND = Kind("corpora", __doc__.splitlines()[0], names, make)

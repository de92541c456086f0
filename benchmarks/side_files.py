"""Measure the size of a corpus's side files, which name the documents of each row, against the size of the shards.

    python benchmarks/side_files.py            # 10 MB of prose that the Python installation contains

Corpora are built of the same documents in eight ways: from plain text, which has no ids, and from JSON lines in which
each document has a random UUID, which cannot be compressed; with rows of 128 and of 512 tokens; and with and without
side files.

Limits: processor times are those of a single build each; other work on the machine changes them by some per cent.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measure import Json, ResultLine, finish, installed, parser, print_table
from rich.console import Console

from electra_dist.config import CorpusConfig
from electra_dist.corpus.build_console import BuildConsole
from electra_dist.corpus.build_corpus import build_corpus
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.python_docs import write_python_docs
from electra_dist.corpus.text_decoding import decode
from electra_dist.corpus.text_readers import DocumentStream, find_inputs
from electra_dist.corpus.vocab import train_vocabulary
from electra_dist.tokenizer import Vocabulary

ROW_LENGTHS = (128, 512)


class Built(NamedTuple):
    """Sizes of a corpus, and the processor time of its build."""

    tokens: int  # tokens of the corpus, without [PAD]
    shard_bytes: int  # size of all shards
    side_bytes: int  # size of all side files
    fingerprint: str
    cpu_s: float  # processor seconds of the build


def build(inputs: Path, vocabulary: Vocabulary, folder: Path, seq_len: int, origins: bool) -> Built:
    """Build a corpus in one process; return the sizes of its shards and side files, and the processor time.

    Args:
        inputs: Folder of documents.
        vocabulary: Vocabulary of the corpus.
        folder: New folder for the corpus.
        seq_len: Tokens of a row.
        origins: Whether to write side files.
    """
    request = BuildRequest(
        inputs=find_inputs([inputs]),
        vocabulary=vocabulary,
        output=str(folder),
        seq_len=seq_len,
        seed=1,
        corpus=CorpusConfig(origins=origins),
    )
    begin = time.process_time()
    with open(os.devnull, "w") as null_device:
        manifest = build_corpus(request, BuildConsole(Console(file=null_device))).manifest
    cpu_s = time.process_time() - begin
    side_bytes = sum(path.stat().st_size for path in folder.glob("origins/*.parquet"))
    shard_bytes = sum(shard.bytes for shard in manifest.shards)
    return Built(manifest.num_tokens, shard_bytes, side_bytes, manifest.fingerprint, cpu_s)


def measure(text: Path, vocabulary: Vocabulary, folder: Path) -> dict[str, Json]:
    """Build the corpora of all cases, and return the sizes of their side files relative to shards and tokens.

    Args:
        text: Folder with the documents as plain text.
        vocabulary: Vocabulary of the corpora.
        folder: Empty folder for everything that is written.

    Returns:
        Name of the case (kind of ids, length of rows) -> JSON object with its figures.
    """
    with_ids = folder / "with-ids"
    with_ids.mkdir()
    draw = random.Random(0)
    lines = [
        json.dumps({"id": str(uuid.UUID(int=draw.getrandbits(128))), "text": decode(document)})
        for document in DocumentStream(find_inputs([text]))
    ]
    (with_ids / "documents.jsonl").write_text("\n".join(lines))
    figures: dict[str, Json] = {}
    for kind, inputs in (("no ids", text), ("UUIDs", with_ids)):
        for seq_len in ROW_LENGTHS:
            name = f"{kind}, rows of {seq_len}"
            without = build(inputs, vocabulary, folder / f"{name}, without", seq_len, origins=False)
            built = build(inputs, vocabulary, folder / name, seq_len, origins=True)
            assert built.fingerprint == without.fingerprint
            figures[name] = {
                "tokens_per_document": built.tokens / len(lines),
                "share_of_shards": built.side_bytes / built.shard_bytes,
                "bytes_per_token": built.side_bytes / built.tokens,
                "cpu_ratio": built.cpu_s / without.cpu_s,
            }
    return figures


def main(argv: Sequence[str] | None = None) -> Json:
    """Measure all cases, print a table and return the record."""
    arguments = parser(__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="side-files-") as name:
        folder = Path(name)
        text = folder / "text"
        text.mkdir()
        if arguments.smoke:
            (text / "words.txt").write_text("\n\n".join(f"document {number} of many" for number in range(300)))
        else:
            write_python_docs(text)
        size = 100 if arguments.smoke else 30_522
        documents = [decode(document) for document in DocumentStream(find_inputs([text]))]
        cases = measure(text, train_vocabulary(lambda: iter(documents), size, True), folder)
    rows = []
    lines = []
    for case, figures in cases.items():
        share = f"{100 * figures['share_of_shards']:.2f} %"
        per_token = f"{figures['bytes_per_token']:.3f}"
        rows.append([case, share, per_token, f"{figures['cpu_ratio']:.2f}"])
        title = f"side files of a corpus, {figures['tokens_per_document']:,.0f} tokens a document, {case}"
        lines.append(ResultLine(title, f"{per_token} bytes a token", f"{share} of the shards"))
    print_table(["case", "of the shards", "bytes a token", "processor time, with / without"], rows)
    return finish("side_files", arguments, argv, lines, packages=installed("pyarrow", "zstandard"), cases=cases)


if __name__ == "__main__":
    main()

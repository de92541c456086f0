"""Measure the size of a corpus's side files, which name the documents of each row, against the size of the shards.

    python benchmarks/side_files.py            # 10 MB of prose that the Python installation contains

The same documents are built as plain text (documents without ids) and as JSON lines in which each has a random UUID,
which cannot be compressed; with rows of 128 and of 512 tokens; each with and without side files.

Limits: the processor time of one build each; other work on the machine changes it by some per cent.
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

    tokens: int
    shard_bytes: int
    side_bytes: int
    fingerprint: str
    cpu_s: float


def build(inputs: Path, vocabulary: Vocabulary, folder: Path, seq_len: int, origins: bool) -> Built:
    """Build a corpus in one process, and return its sizes.

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
    """Return the sizes of each case: kind of ids and length of rows -> figures.

    Args:
        text: Folder with the documents as plain text.
        vocabulary: Vocabulary of the corpora.
        folder: Empty folder for everything that is written.
    """
    with_ids = folder / "with-ids"
    with_ids.mkdir()
    draw = random.Random(0)
    lines = [
        json.dumps({"id": str(uuid.UUID(int=draw.getrandbits(128))), "text": decode(document)})
        for document in DocumentStream(find_inputs([text]))
    ]
    (with_ids / "documents.jsonl").write_text("\n".join(lines))
    found: dict[str, Json] = {}
    for kind, inputs in (("no ids", text), ("UUIDs", with_ids)):
        for seq_len in ROW_LENGTHS:
            name = f"{kind}, rows of {seq_len}"
            without = build(inputs, vocabulary, folder / f"{name}, without", seq_len, origins=False)
            built = build(inputs, vocabulary, folder / name, seq_len, origins=True)
            assert built.fingerprint == without.fingerprint
            found[name] = {
                "tokens_per_document": built.tokens / len(lines),
                "share_of_shards": built.side_bytes / built.shard_bytes,
                "bytes_per_token": built.side_bytes / built.tokens,
                "cpu_ratio": built.cpu_s / without.cpu_s,
            }
    return found


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
        found = measure(text, train_vocabulary(lambda: iter(documents), size, True), folder)
    rows = []
    lines = []
    for case, figures in found.items():
        share = f"{100 * figures['share_of_shards']:.2f} %"
        per_token = f"{figures['bytes_per_token']:.3f}"
        rows.append([case, share, per_token, f"{figures['cpu_ratio']:.2f}"])
        what = f"side files of a corpus, {figures['tokens_per_document']:,.0f} tokens a document, {case}"
        lines.append(ResultLine(what, f"{per_token} bytes a token", f"{share} of the shards"))
    print_table(["case", "of the shards", "bytes a token", "processor time, with / without"], rows)
    return finish("side_files", arguments, argv, lines, packages=installed("pyarrow", "zstandard"), cases=found)


if __name__ == "__main__":
    main()

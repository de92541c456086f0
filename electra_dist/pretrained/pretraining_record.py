"""Write and read pretraining.json, the file of an exported model that says how the model was pretrained.

Hugging Face's config.json describes the shape of a model. It does not say whether a model that predicts tokens has
seen [MASK] in training, whether a discriminator's output is an energy, or how long the rows were. Scores of text
depend on these facts. transformers ignores the file. Without it, a model that predicts tokens counts as a masked
language model, any other as a discriminator of replaced tokens, and rows may be as long as the model has positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from electra_dist.store.atomic_files import file_sha256, readable, replacing
from electra_dist.store.interface import check_key
from electra_dist.store.json_file import find_document
from electra_dist.store.regular_files import read_regular
from electra_dist.tokenizer import NamedDigest, check_digest

PRETRAINING_FILE = "pretraining.json"
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")


class PretrainingRecord(BaseModel):
    """Facts about the pretraining of an exported generator or discriminator for which config.json has no place."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may record more

    objective: str  # `objective.name` of the run
    tower: Literal["discriminator", "generator"]
    seq_len: Annotated[int, Field(gt=0)]  # tokens of a row in training; later positions were never trained
    steps: tuple[int, ...]  # steps of the averaged checkpoints; a single step if there is no mean
    rows: Annotated[int, Field(ge=0)]  # rows trained on up to the last of these steps
    corpus_fingerprint: str  # of the training corpus
    electra_dist: str  # version of this package that wrote the file
    tokenizer_sha256: dict[str, str] = {}  # file of the tokenizer -> its SHA-256; empty in an older export


def write_pretraining_record(folder: Path, record: PretrainingRecord) -> None:
    """Write or replace FOLDER/pretraining.json atomically.

    Digests of the tokenizer's files in the folder are added to the record, so write these files first.
    """
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]  # vocab.txt exists for WordPiece only
    digests = {name: file_sha256(folder / name) for name in names}
    record = record.model_copy(update={"tokenizer_sha256": digests})
    text = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
    with replacing(folder / PRETRAINING_FILE) as file:
        file.write(text.encode())


def read_pretraining_record(folder: Path) -> PretrainingRecord | None:
    """Return the content of FOLDER/pretraining.json; None if there is no such file, as in models of other programs."""
    file = folder / PRETRAINING_FILE
    return find_document(file, PretrainingRecord, "export the model again, or delete the file")


def check_tokenizer_files(folder: Path) -> None:
    """Verify the tokenizer's files of an export against the digests in its pretraining.json.

    Nothing is checked in the folder of another program's model or of an older export, which name no digests. Raises
    ManifestMismatch if a file has another digest.
    """
    record = read_pretraining_record(folder)
    if record is None:
        return
    for name, sha256 in record.tokenizer_sha256.items():
        file = folder / check_key(name)
        with readable(file):
            data = read_regular(file)
        named_by = str(folder / PRETRAINING_FILE)
        check_digest(data, str(file), NamedDigest(sha256, named_by, "restore the file, or export the model again"))

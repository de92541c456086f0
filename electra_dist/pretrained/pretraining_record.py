"""Write and read pretraining.json, the file of an exported model that says how the model was pretrained.

Hugging Face's config.json describes the shape of a model. It does not say whether a model that predicts tokens has
seen [MASK] in training, whether a discriminator's output is an energy, or how long the rows were. Scores of text
depend on these. transformers ignores the file; a model without it counts as trained with the objective of its class,
and at all its positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import read_json_as

PRETRAINING_FILE = "pretraining.json"


class PretrainingRecord(BaseModel):
    """Facts about the pretraining of an exported tower that config.json has no place for."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may record more

    objective: str  # `objective.name` of the run
    tower: Literal["discriminator", "generator"]
    seq_len: int  # tokens of a row in training; positions from here on were never trained
    steps: tuple[int, ...]  # steps of the checkpoints whose mean the weights are; of a single one, its step
    rows: int  # rows trained on up to the last of these steps
    corpus_fingerprint: str  # of the training corpus
    electra_dist: str  # version of this package that wrote the file


def write_pretraining_record(folder: Path, record: PretrainingRecord) -> None:
    """Write FOLDER/pretraining.json, indented JSON; an existing file is replaced atomically.

    Raises:
        StoreError: the folder cannot be written.
    """
    text = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
    with replacing(folder / PRETRAINING_FILE) as file:
        file.write(text.encode())


def read_pretraining_record(folder: Path) -> PretrainingRecord | None:
    """Return the content of FOLDER/pretraining.json; None if there is no such file, as in models of other programs.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / PRETRAINING_FILE
    if not file.exists():
        return None
    return read_json_as(file, TypeAdapter(PretrainingRecord), "export the model again, or delete the file")

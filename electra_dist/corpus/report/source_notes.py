"""Collect the licences of a corpus's sources and the counts of `corpus prepare`, for the reports of a build.

Guarantee: an input counts as made by `corpus prepare` only if prepare.json lies beside it, which a preparation writes
last. Licences and counts have no influence on the shards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import Field, TypeAdapter

from electra_dist.config import Section
from electra_dist.data.verified_read import read_verified
from electra_dist.errors import UserError
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.open_store import open_store

_PREPARE_KEY = "prepare.json"
_DOCUMENTS_FOLDER = "documents"  # in the output of a preparation


class PreparedSource(Section):
    """Licence of one source of `corpus prepare`, and the numbers of its documents."""

    license: str = Field(description="licence of the source as the YAML file of the preparation states it")
    documents_in: int = Field(description="documents that the preparation read")
    documents_dropped: int = Field(description="documents that any step of the preparation dropped")
    documents_out: int = Field(description="documents that the preparation kept")


class PreparedText(Section):
    """Counts of one run of `corpus prepare`, whose output is one source of a corpus."""

    sources: dict[str, PreparedSource] = Field(description="source of the preparation -> its licence and counts")
    dropped: dict[str, dict[str, dict[str, int]]] = Field(
        description="step -> reason -> source -> number of documents that the step dropped"
    )


class SourceNotes(Section):
    """Licences of a corpus's sources, and the counts of the sources that `corpus prepare` made."""

    licences: dict[str, str] = Field(default={}, description="source -> its licence, as corpus.licences states it")
    prepared: dict[str, PreparedText] = Field(default={}, description="source -> counts of its preparation")

    def licence(self, source: str) -> str | None:
        """Return a source's licence from corpus.licences, else all licences in its prepare.json, else None."""
        if source in self.licences:
            return self.licences[source]
        if source in self.prepared:
            return ", ".join(sorted({prepared.license for prepared in self.prepared[source].sources.values()}))
        return None


def find_preparations(inputs: Sequence[str], endpoint_url: str | None) -> dict[str, PreparedText]:
    """Find the given inputs that `corpus prepare` wrote; return source -> counts of the preparation.

    An input is recognized if it is the folder `documents` in the command's output or, on a local disk, the output
    folder itself. Raises UserError if a prepare.json is damaged.
    """
    prepared: dict[str, PreparedText] = {}
    for location in inputs:
        is_remote = location.startswith("s3://")
        path = location.rstrip("/") if is_remote else os.path.normpath(location)
        folder, _, name = path.rpartition("/")
        if name == _DOCUMENTS_FOLDER:
            text = _read_preparation(folder or ".", endpoint_url)
            source = path
        elif not is_remote and os.path.isdir(path):
            text = _read_preparation(path, None)
            source = f"{path}/{_DOCUMENTS_FOLDER}"
        else:
            continue
        if text is not None:
            prepared[source] = text
    return prepared


def _read_preparation(folder: str, endpoint_url: str | None) -> PreparedText | None:
    """Return the counts in the prepare.json of a folder; None if the folder has no prepare.json."""
    store = open_store(folder, endpoint_url)
    if not store.exists(_PREPARE_KEY):
        return None
    return read_verified(store, _PREPARE_KEY, lambda data: _parse_preparation(data, f"{store.url}/{_PREPARE_KEY}"))


def _parse_preparation(data: bytes, url: str) -> PreparedText:
    try:
        tree = parse_json_object(data)
        counts = {
            "sources": {
                name: {key: source.get(key) for key in PreparedSource.model_fields}
                for name, source in tree.get("sources", {}).items()
            },
            "dropped": tree.get("dropped"),
        }
        return validate_json(TypeAdapter(PreparedText), counts)
    except (DamagedJson, AttributeError) as error:
        raise UserError(
            f"{url}: not the report of a preparation ({error}); run `electra-dist corpus "
            "prepare` again, or delete the file"
        ) from None

"""Hold what is known about the sources of a corpus beside its text: licences, and what `corpus prepare` has counted.

Guarantee: a preparation is recognized by its prepare.json, which is written last. Nothing of it decides a shard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import Field, TypeAdapter

from electra_dist.config import Section
from electra_dist.errors import UserError
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.open_store import open_store

_PREPARE_KEY = "prepare.json"
_DOCUMENTS_FOLDER = "documents"  # in the output of a preparation


class PreparedSource(Section):
    """Counts of one source of a preparation."""

    license: str = Field(description="licence that the preparation's YAML file states")
    documents_in: int = Field(description="documents read")
    documents_dropped: int = Field(description="documents dropped by any step")
    documents_out: int = Field(description="documents kept")


class PreparedText(Section):
    """Counts of a preparation, whose documents are a source of a corpus."""

    sources: dict[str, PreparedSource] = Field(description="counts by source of the preparation")
    dropped: dict[str, dict[str, dict[str, int]]] = Field(
        description="step -> reason -> source -> documents that the step dropped"
    )


class SourceNotes(Section):
    """What is known about the sources of a corpus beside its text."""

    licences: dict[str, str] = Field(default={}, description="licence by source, as corpus.licences states it")
    prepared: dict[str, PreparedText] = Field(default={}, description="counts of the preparation of a source")

    def licence(self, source: str) -> str | None:
        """Return the licence of a source: as the config states it, or those of its preparation; None if unknown."""
        if source in self.licences:
            return self.licences[source]
        if source in self.prepared:
            return ", ".join(sorted({prepared.license for prepared in self.prepared[source].sources.values()}))
        return None


def find_preparations(inputs: Sequence[str], endpoint_url: str | None) -> dict[str, PreparedText]:
    """Return the counts of each input that `corpus prepare` has made, by the name of the source in the build.

    Args:
        inputs: files, folders and s3:// URLs that the user gave. The folder `documents` of a preparation's output is
            recognized, and the output itself if it is a local folder.
        endpoint_url: S3 endpoint; None for AWS.

    Raises:
        UserError: a prepare.json is damaged.
        StoreError: S3 refuses access.
    """
    prepared: dict[str, PreparedText] = {}
    for given in inputs:
        is_remote = given.startswith("s3://")
        path = given.rstrip("/") if is_remote else os.path.normpath(given)
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
    """Return the counts in the prepare.json of a folder; None if there is none.

    Raises:
        UserError: prepare.json is damaged.
        StoreError: S3 refuses access.
    """
    store = open_store(folder, endpoint_url)
    if not store.exists(_PREPARE_KEY):
        return None
    try:
        tree = parse_json_object(store.read(_PREPARE_KEY))
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
            f"{store.url}/{_PREPARE_KEY}: not the report of a preparation ({error}); run `electra-dist corpus "
            "prepare` again, or delete the file"
        ) from None

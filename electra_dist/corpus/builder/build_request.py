"""Describe a corpus to build, and list the parameters that determine its bytes.

Two requests with equal parameters, vocabulary and inputs give the same corpus, byte for byte. Worker processes get the
whole request. The parameters are stored with the corpus, so that a build with other parameters in the same folder is
refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.config import CorpusConfig
from electra_dist.corpus.build_report import PreparedText, SourceNotes
from electra_dist.corpus.builder.build_records import BuildNotes
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.find_inputs import InputFile, num_with_content
from electra_dist.store.json_file import canonical_json
from electra_dist.tokenizer import Vocabulary

# Keys of the section `corpus` that affect neither the shards nor corpus.json, or that repeat what the vocabulary says.
_NO_PARAMETERS = {"origins", "licences", "max_unk_rate", "tokenizer"}
_BUILDER_VERSION = 1  # increase it when the same input begins to give other rows
_EXAMPLES = 0  # number by which `example_seed` is derived from the seed of the corpus
_ORDER = 1  # number by which `order_seed` is derived from it
_GROUP_SHARDS = 4  # size of a group of input files, as a multiple of the size of a shard
_MIN_CHUNK_BYTES = 1 << 16  # 64 KiB
_MAX_CHUNK_BYTES = 1 << 22  # 4 MiB


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Description of a corpus to build: its inputs, vocabulary, parameters and output."""

    # What decides the bytes of the corpus: a change needs another output folder.
    inputs: Sequence[InputFile]  # in reading order, from `find_inputs`
    vocabulary: Vocabulary
    seq_len: int  # tokens of a row
    seed: int  # decides the order of the documents, which are held out, and the examples' random draws
    corpus: CorpusConfig  # all keys but `_NO_PARAMETERS`
    text_field: str = "text"  # field of a JSON line, or parquet column, that holds the text

    # What does not decide them.
    output: str  # folder or s3://bucket/prefix
    num_workers: int = 1  # processes; 1: the calling process does the work
    endpoint_url: str | None = None  # S3 endpoint; None: AWS
    skipped_inputs: Counts = field(default_factory=Counts)  # what the search for inputs left out
    prepared: dict[str, PreparedText] = field(default_factory=dict)  # source -> counts of `corpus prepare`

    @property
    def shard_bytes(self) -> int:
        """Return the intended bytes of a shard (`corpus.shard_size_mb`); real sizes differ by a few per cent."""
        return int(self.corpus.shard_size_mb * 1e6)

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of documents that become rows together: a quarter of a shard, from 64 KiB to 4 MiB."""
        quarter_shard = self.shard_bytes // 4
        return min(max(quarter_shard, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)

    @property
    def group_bytes(self) -> int:
        """Return the least bytes on disk of the input files that a worker reads as one task; 64 MB by default."""
        return max(_GROUP_SHARDS * self.shard_bytes, _MIN_CHUNK_BYTES)

    @property
    def spill_bytes(self) -> int:
        """Return the bytes of documents that go into one intermediate (spill) file; 128 MB by default."""
        return 2 * self.group_bytes

    def parameters(self) -> dict[str, Any]:
        """Return as JSON values the parameters that, beside text and vocabulary, determine the rows of the corpus.

        They are stored in corpus.json and, while the build is not finished, in progress/build.json.
        """
        corpus = self.corpus.model_dump(mode="json", exclude=_NO_PARAMETERS)
        return {
            "version": _BUILDER_VERSION,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "text_field": self.text_field,
            "chunk_bytes": self.chunk_bytes,
            **corpus,
        }

    def free_settings(self) -> BuildNotes:
        """Return settings such as licences, which a build records but which change neither shards nor corpus.json."""
        sources = SourceNotes(licences=self.corpus.licences, prepared=self.prepared)
        return BuildNotes(
            with_origins=self.corpus.origins,
            input_sources=self.sources,
            sources=sources,
            max_unk_rate=self.corpus.max_unk_rate,
        )

    @property
    def sources(self) -> list[str]:
        """Return the sources of the inputs, in the order of their first files."""
        return list(dict.fromkeys(file.source for file in self.inputs))

    def with_sources(self, sources: Sequence[str]) -> BuildRequest:
        """Return the same request with other names for its sources, which are in the order of `self.sources`."""
        names = dict(zip(self.sources, sources, strict=True))
        return dataclasses.replace(
            self,
            inputs=[file._replace(source=names[file.source]) for file in self.inputs],
            prepared={names.get(source, source): counts for source, counts in self.prepared.items()},
        )

    def inputs_identity(self) -> dict[str, Any]:
        """Return the number of inputs that are not empty, and a digest of all names and sizes, as in corpus.json.

        By them a later call recognizes a corpus of the same files, without reading the files. The names are
        relative to the given input folder, so the folder may be moved. A file that changed but kept its size is not
        noticed.
        """
        names_and_sizes = canonical_json([[file.name, file.size] for file in self.inputs])
        digest = hashlib.sha256(names_and_sizes.encode()).hexdigest()
        return {"num_inputs": num_with_content(self.inputs), "inputs_sha256": digest}

    @property
    def example_seed(self) -> int:
        """Return the seed of the random draws by which documents are divided into examples."""
        return derive_seed(self.seed, Purpose.CORPUS, _EXAMPLES)

    @property
    def order_seed(self) -> int:
        """Return the seed that decides the shuffled order of the documents."""
        return derive_seed(self.seed, Purpose.CORPUS, _ORDER)

    @property
    def heldout_key(self) -> int:
        """Return the 64-bit key of the hash of a document's text that decides whether the document is held out."""
        return derive_seed(self.seed, Purpose.HELDOUT)

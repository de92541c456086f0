"""Read the vocabulary of a corpus, verified against the digest in corpus.json."""

from __future__ import annotations

from electra_dist.data.corpus_manifest import MANIFEST_KEY, TokenizerEntry
from electra_dist.data.verified_read import read_verified
from electra_dist.store.interface import Store
from electra_dist.tokenizer import NamedDigest, Vocabulary


def read_corpus_vocabulary(store: Store, tokenizer: TokenizerEntry) -> Vocabulary:
    """Return the vocabulary in a corpus's vocab.txt, whose SHA-256 must be that of corpus.json.

    A wrong body from S3 is read again a few times.

    Args:
        store: store of the corpus.
        tokenizer: entry of the tokenizer in corpus.json.

    Raises:
        StoreMissing: the file is missing.
        ManifestMismatch: the file is not the one with which the corpus was built.
    """
    return read_named_vocabulary(
        store,
        tokenizer.vocab_file,
        NamedDigest(
            sha256=tokenizer.sha256,
            named_by=f"{store.url}/{MANIFEST_KEY}",
            next_step="restore the file from a backup or from a run on this corpus (RUN/vocab.txt)",
        ),
    )


def read_named_vocabulary(store: Store, key: str, expected: NamedDigest | None) -> Vocabulary:
    """Return the vocabulary in an object of a store, after a check of its digest if one is recorded.

    A wrong body from S3 is read again a few times.

    Args:
        store: store of the object.
        key: key of the vocabulary.
        expected: the SHA-256 that the vocabulary must have, and the file that records it; None if no file does.

    Raises:
        StoreMissing: the object is missing.
        ManifestMismatch: the object has another digest.
        UserError: the object is not a vocabulary.
    """
    return read_verified(store, key, lambda data: Vocabulary.parse(data, f"{store.url}/{key}", expected))

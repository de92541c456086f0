"""Read the vocabulary of a corpus, verified against corpus.json, and write the vocabulary of a new corpus."""

from __future__ import annotations

from electra_dist.data.corpus_manifest import MANIFEST_KEY, TokenizerEntry
from electra_dist.data.verified_read import read_verified
from electra_dist.errors import ManifestMismatch
from electra_dist.store.interface import Store
from electra_dist.tokenizer import VOCAB_FILE, NamedDigest, Vocabulary


def read_corpus_vocabulary(store: Store, tokenizer: TokenizerEntry) -> Vocabulary:
    """Return the vocabulary of a corpus, verified against `tokenizer`, its entry in corpus.json.

    Raises ManifestMismatch if the SHA-256, the size or the ids of the special tokens differ from the entry.
    """
    vocabulary = read_named_vocabulary(
        store,
        tokenizer.vocab_file,
        NamedDigest(
            sha256=tokenizer.sha256,
            named_by=f"{store.url}/{MANIFEST_KEY}",
            next_step="restore the file from a backup or from a run on this corpus (RUN/vocab.txt)",
        ),
    )
    _check_entry(tokenizer, vocabulary, f"{store.url}/{MANIFEST_KEY}")
    return vocabulary


def _check_entry(tokenizer: TokenizerEntry, vocabulary: Vocabulary, url: str) -> None:
    fault = ""
    if tokenizer.vocab_size != vocabulary.size:
        fault = f"vocab_size is {tokenizer.vocab_size}, but {tokenizer.vocab_file} has {vocabulary.size} tokens"
    for token, token_id in vocabulary.special.items():
        named_id = tokenizer.special[token]
        if named_id != token_id:
            fault = fault or f"special {token} is {named_id}, but its id in {tokenizer.vocab_file} is {token_id}"
    if fault:
        raise ManifestMismatch(f"{url}: {fault}; restore corpus.json or build the corpus again")


def write_corpus_vocabulary(store: Store, text: str) -> bool:
    """Write the vocab.txt of a new corpus unless the store has it already; return whether it was written.

    Raises UserError if the store's vocab.txt holds another vocabulary, or is not a vocabulary.
    """
    if not store.exists(VOCAB_FILE):
        store.write(VOCAB_FILE, text.encode())
        return True
    there = NamedDigest(
        sha256=Vocabulary(text, VOCAB_FILE).sha256,
        named_by="--vocab",
        next_step="move the file away, give it as the vocabulary, or choose another --output",
    )
    read_named_vocabulary(store, VOCAB_FILE, there)
    return False


def read_named_vocabulary(store: Store, key: str, expected: NamedDigest | None) -> Vocabulary:
    """Read the vocabulary file `key` of a store and check that it has the digest `expected` (None: no check).

    Wrong content from S3 is read again a few times.
    """
    return read_verified(store, key, lambda data: Vocabulary.parse(data, f"{store.url}/{key}", expected))

"""Check that a file has the digest that another file names for it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from electra_dist.errors import ManifestMismatch


class NamedDigest(NamedTuple):
    """SHA-256 that a file must have, and what the error message says if the file has another one."""

    sha256: str  # hexadecimal
    named_by: str  # path or URL of the file that names this digest
    next_step: str  # what the user can do about another digest, as an imperative


def check_digest(data: bytes, name: str, expected: NamedDigest) -> None:
    """Raise ManifestMismatch, which names the file, if its content `data` does not have the digest `expected`."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected.sha256:
        raise ManifestMismatch(
            f"{name}: its sha256 is {found}, but {expected.named_by} names {expected.sha256}; {expected.next_step}"
        )

"""Read an object and check its content; read it again if the check fails, because a service may send a wrong body.

Guarantee: what `read_verified` returns has passed the caller's check. A body that a service or a proxy sends in place
of the object, for example an error document with status 200, is not taken for the object.

Limits: the check is the caller's. If no digest of a file is recorded anywhere, the caller can check its format only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from electra_dist.errors import StoreError, UserError
from electra_dist.store.interface import Store

_Content = TypeVar("_Content")


def read_verified(store: Store, key: str, parse: Callable[[bytes], _Content]) -> _Content:
    """Read an object and return `parse(its bytes)`; `parse` must raise UserError for wrong content (`reread`)."""
    return reread(store, key, lambda: parse(store.read(key)))


def reread(store: Store, key: str, read: Callable[[], _Content]) -> _Content:
    """Return what `read` reads from an object; it must raise UserError, but no StoreError, for wrong content.

    Wrong content is read again by the rule of all stores (`Patience.reread`).
    """

    def read_once() -> tuple[_Content | UserError, str]:
        try:
            return read(), ""
        except StoreError:
            raise
        except UserError as error:
            return error, str(error)

    content, _ = store.reread(key, read_once)
    if isinstance(content, UserError):
        raise content
    return content

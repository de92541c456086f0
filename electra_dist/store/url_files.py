"""Find and fetch input files at URLs that fsspec reads, such as hf://datasets/ORG/NAME, https:// or sftp://.

Guarantee: all bytes of a file are of the version that its listing had. On the Hugging Face Hub that is a commit, to
which the newest revision is resolved once; elsewhere it is the ETag or the time of the last change, and the size. A
file with another version when it is fetched, before or after, is an error that names it.

How: a URL is listed once. Each file is read in ranges; a range that fails is read again while the storage is away.

Limits: a server that tells neither an ETag nor a time is believed if the size stays the same. Of https:// only single
files are found, because the protocol has no listings.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from electra_dist.errors import StoreAway, StoreError, StoreMissing, UserError, missing_packages
from electra_dist.hub import HUB_SCHEME, hub_error
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import check_key
from electra_dist.store.json_file import canonical_json
from electra_dist.store.patience import Patience, command_patience
from electra_dist.store.user_cache import user_cache_folder

Result = TypeVar("Result")

_RANGE_BYTES = 16 << 20
_HUB_URL = re.compile(
    r"hf://(?P<kind>datasets/|spaces/|)(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?P<path>/.*)?"
)
# What file systems call the properties that tell versions of a file apart.
_VERSION_KEYS = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "last_modified", "mtime", "created")
_MAGIC = re.compile(r"[*?\[]")
_USER = re.compile(r"(?P<scheme>\w{1,16})://(?P<user>[^/@\s?#]*)@")
_PARAMETER = re.compile(r"[?&]([^?=&#]+)=")
# Names of parameters that sign a request, such as X-Amz-Signature, or that are a key themselves.
_SECRET_PARAMETER = re.compile(
    r"^(sig|key|code)$|signature|credential|token|secret|passw|api.?key|access.?key", re.IGNORECASE
)


class UrlFile(NamedTuple):
    """One file at a URL, as it was listed."""

    name: str  # below the folder that the URL names; only the file's own name if the URL names the file
    location: str  # URL of the file; on the Hub with the commit
    size: int  # bytes
    version: str = ""  # empty if the location names the version


class UrlListing(NamedTuple):
    """Files that a URL stands for, sorted by name; `is_folder` if it names a folder, not files or a pattern."""

    files: list[UrlFile]
    is_folder: bool


def list_url(url: str) -> UrlListing:
    """List the files that a URL names: a file, all files below a folder, or those of a pattern with *, ? or [...].

    Raises UserError if the URL has no file, if its package is missing, or if the server refuses to show it. A URL with
    credentials in it is refused, too, because a corpus records the URLs of its text.
    """
    _refuse_credentials(url)
    pinned = _with_commit(url) if url.startswith(HUB_SCHEME) else url
    file_system, path = _open(pinned)

    def find() -> tuple[dict[str, dict[str, Any]], str]:
        """Return path -> properties of the files, and the folder below which they are."""
        if _MAGIC.search(path) and not path.startswith(("http://", "https://")):
            return file_system.glob(path, detail=True), _MAGIC.split(path)[0].rpartition("/")[0]
        info = file_system.info(path)
        if info["type"] == "file":
            return {path: info}, path.rpartition("/")[0]
        return file_system.find(path, detail=True), path

    found, folder = _waiting(url, find)
    files = []
    for file_path, info in sorted(found.items()):
        if info["type"] == "file":
            name = file_path.removeprefix(folder).lstrip("/").partition("?")[0]
            location = file_system.unstrip_protocol(file_path)
            version = _version(info) if pinned == url else ""
            files.append(UrlFile(name, location, _size(location, info), version))
    if not files:
        raise StoreMissing(f"{url}: no such file; correct the URL")
    return UrlListing(files, is_folder=folder == path)


def fetch_url(location: str, size: int, version: str, destination: Path) -> None:
    """Copy a listed file to a local one, atomically; raise UserError if it is another version now."""
    file_system, path = _open(location)
    patience = command_patience()

    def check() -> None:
        if not version:
            return
        file_system.invalidate_cache()
        info = _waiting(location, lambda: file_system.info(path), patience)
        if _size(location, info) != size or not _is_same(version, _version(info)):
            raise UserError(f"{location}: has changed since it was listed; start again, so that it is listed anew")

    check()
    with replacing(destination) as out:
        while out.tell() < size:
            read = functools.partial(_read_from, file_system, path, location, out.tell(), size)
            out.write(_waiting(location, read, patience))
    check()


def _read_from(file_system: Any, path: str, location: str, start: int, size: int) -> bytes:
    """Return up to 16 MiB of a file of `size` bytes, from byte `start` on; from a server without ranges, all of them.

    `location` is the file's URL, for the StoreAway that is raised if another number of bytes arrives.
    """
    end = min(start + _RANGE_BYTES, size)
    data: bytes = file_system.cat_file(path, start=start, end=end)
    if len(data) == end - start:
        return data
    if len(data) == size:  # A server without ranges answers with the whole file.
        return data[start:]
    raise StoreAway(f"{location}: {len(data)} bytes instead of {end - start}; check the network")


def local_copy(given: str) -> Path:
    """Return a path as it is; copy the files that a URL names into this user's cache, and return the copy's path.

    Files of the same versions are copied once. A URL of one file gives a file, any other one a folder.
    """
    if "://" not in given:
        return Path(given)
    listing = list_url(given)
    versions = canonical_json([[file.location, file.size, file.version] for file in listing.files])
    folder = user_cache_folder() / "inputs" / hashlib.sha256(versions.encode()).hexdigest()[:16]
    for file in listing.files:
        path = folder / check_key(file.name)
        if not path.exists():
            fetch_url(file.location, file.size, file.version, path)
    if listing.is_folder or len(listing.files) > 1:
        return folder
    return folder / listing.files[0].name


def _refuse_credentials(url: str) -> None:
    users = [match for match in _USER.finditer(url) if match["scheme"].startswith("http") or ":" in match["user"]]
    if users or any(_SECRET_PARAMETER.search(name) for name in _PARAMETER.findall(url)):
        shown = _USER.sub(r"\g<scheme>://", url).partition("?")[0]
        raise UserError(
            f"{shown}: the URL holds credentials, which a corpus would record; give them as the package of this "
            f"storage reads them (environment, configuration file), or download the file first"
        )


def _with_commit(url: str) -> str:
    """Return a URL of the Hub with the commit that its revision (without one: its main branch) names now."""
    parts = _HUB_URL.fullmatch(url)
    if parts is None:
        raise UserError(f"{url}: not a URL of the Hub; write hf://datasets/ORG/NAME/PATH, or NAME@REVISION")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise missing_packages(url, "hub") from None
    kind = parts["kind"].removesuffix("s/") or "model"  # "dataset" for "datasets/"
    revision = unquote(parts["revision"]) if parts["revision"] else None
    info = _waiting(url, lambda: HfApi().repo_info(parts["repo"], repo_type=kind, revision=revision))
    return f"{HUB_SCHEME}{parts['kind']}{parts['repo']}@{info.sha}{parts['path'] or ''}"


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path within it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0]
        if scheme in ("http", "https"):
            raise missing_packages(url, "clouds") from None
        raise UserError(f"{url}: a package is missing; {' '.join(str(error).split())}") from None
    except ValueError:
        raise UserError(
            f"{url}: unknown kind of storage; give a local path, s3://bucket/prefix, hf://datasets/ORG/NAME, or "
            f"another URL that fsspec knows"
        ) from None


def _waiting(where: str, operation: Callable[[], Result], patience: Patience | None = None) -> Result:
    """Call an operation until it succeeds or fails for good; every error becomes a UserError about the URL `where`."""

    def call() -> Result:
        try:
            return operation()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  (each file system has its own HTTP client and errors)
            raise _user_error(where, error) from None

    return (patience or command_patience()).call(call)


def _user_error(where: str, error: Exception) -> UserError:
    """Turn any exception of a file system of fsspec into an error of one line about `where`, a URL.

    It is StoreMissing, StoreError for a refusal, or StoreAway for everything that may pass.
    """
    if where.startswith(HUB_SCHEME) and type(error) is not FileNotFoundError:
        return hub_error(where, error)
    if isinstance(error, FileNotFoundError):
        return StoreMissing(f"{where}: no such file; correct the URL")
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return StoreError(f"{where}: access refused; correct the URL, or set the credentials of this storage")
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return StoreAway(f"{where}: cannot be read ({reason}); check the URL, the network and the credentials")


def _size(location: str, info: dict[str, Any]) -> int:
    if info.get("size") is None:
        raise UserError(f"{location}: the server does not tell the size of this file; download it first")
    return int(info["size"])


def _version(info: dict[str, Any]) -> str:
    """Return as JSON the properties of a file, such as its ETag, which differ between its versions."""
    known = {key: info[key] for key in _VERSION_KEYS if info.get(key)}
    # As text, a time as its seconds: a listing may use another type for a property than a single file.
    return canonical_json(
        {key: str(value.timestamp() if isinstance(value, datetime) else value) for key, value in known.items()}
    )


def _is_same(listed: str, now: str) -> bool:
    """Return whether two versions are equal in everything that both tell; a listing may tell less."""
    before, after = json.loads(listed), json.loads(now)
    return all(before[key] == after[key] for key in before.keys() & after.keys())

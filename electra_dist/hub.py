"""Find the folder of a model that is named by a path or by its name on the Hugging Face Hub, before torch is imported.

A name on the Hub is ORG/NAME or ORG/NAME@REVISION, where a revision is a branch, a tag or a commit; `hf://` may stand
before it. Without `hf://`, a name whose first part is a folder here is a path, so that a mistyped `runs/smal` is never
looked up.

How: huggingface_hub downloads the files of a model into its cache (HF_HOME) and verifies their sizes. It reads the
token of HF_TOKEN or of `hf auth login`. With HF_HUB_OFFLINE=1, or while the Hub is away, it takes what the cache has.

Limits: every process that loads a model asks the Hub once for the commit. A run of many ranks on several nodes should
name a commit, or be started with HF_HUB_OFFLINE=1 after `hf download` into a cache that all nodes see.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from electra_dist.errors import StorageLost, UserError, missing_packages

HUB_SCHEME = "hf://"
_NAME = re.compile(r"(?:hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_FILES = ("*.json", "vocab.txt", "model.safetensors", "model-*.safetensors")
_FOLDERS = ("", "discriminator/", "generator/", "best/")  # of an export, and of fine-tuning
_WANTED = [folder + name for folder in _FOLDERS for name in _FILES]
_OLD_WEIGHTS = "pytorch_model.bin"  # downloaded only where there are no others
UNKNOWN_LICENSE = "unknown"  # identifier of the hub for a model whose licence is not stated
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.\-]*")  # such as apache-2.0


def check_license(license_id: str) -> None:
    """Raise UserError unless a text has the form of the Hub's licence identifiers, such as apache-2.0."""
    if not _LICENSE_ID.fullmatch(license_id):
        raise UserError(
            f"--license {license_id}: not a licence identifier; give one such as apache-2.0, mit, cc-by-4.0 or other"
        )


def model_folder(spec: str) -> Path:
    """Return the folder of a model; download it if `spec` is a name on the Hub. A path need not exist.

    Raises UserError if the Hub has no such model or revision, or does not show it, and StorageLost if the Hub does not
    answer and the model is not in the cache.
    """
    name = hub_name(spec)
    if name is None:
        return Path(spec)
    try:
        return _download(name["repo"], name["revision"])
    except UserError as error:
        if spec.startswith(HUB_SCHEME):
            raise
        raise type(error)(f"{spec}: no such folder here; and as a name on the Hub, {error}") from None


def hub_name(spec: str) -> re.Match[str] | None:
    """Match a model's name on the Hub: groups `repo` and `revision` (None: the main branch). None for a path."""
    name = _NAME.fullmatch(spec)
    if spec.startswith(HUB_SCHEME):
        if name is None:
            raise UserError(
                f"{spec}: not the name of a model on the Hub; write hf://ORG/NAME or hf://ORG/NAME@REVISION"
            )
        return name
    if name is None or Path(spec.partition("/")[0]).is_dir():
        return None
    return name


def shown_name(folder: Path) -> str:
    """Return a model's folder for people to read: its path, or ORG/NAME@COMMIT if it is in the cache of the Hub."""
    is_cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    if not is_cached:
        return str(folder)
    return f"{folder.parents[1].name.removeprefix('models--').replace('--', '/')}@{folder.name[:12]}"


@functools.cache
def _download(repo: str, revision: str | None) -> Path:
    """Download a model into the Hub's cache, and return its folder, which stays the same for this process."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise missing_packages(f"{repo}: a model on the Hub", "hub") from None
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED))
        if not any(folder.rglob("*.safetensors")):
            # The same commit, whatever `revision` has become.
            snapshot_download(repo, revision=folder.name, allow_patterns=[*_WANTED, _OLD_WEIGHTS])
    except Exception as error:  # noqa: BLE001  (errors of the HTTP client have no public base class)
        raise hub_error(repo if revision is None else f"{repo}@{revision}", error) from None
    return folder


def hub_error(name: str, error: Exception) -> UserError:
    """Turn an exception of huggingface_hub about the repository `name` into an error of one line with the next step.

    That is StorageLost if the Hub does not answer, otherwise UserError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return UserError(
            f"{name}: gated on {hub}; accept its terms there, then set HF_TOKEN or run `hf auth login` with an "
            f"account that has access"
        )
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{name}: no such revision on {hub}; name a branch, a tag or a commit after the @")
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return UserError(
            f"{name}: not found on {hub}, which shows some names only with a token; correct the name or the path, or "
            f"set HF_TOKEN"
        )
    if constants.HF_HUB_OFFLINE:
        return UserError(
            f"{name}: not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, or fill the "
            f"cache with `hf download` where there is a network"
        )
    reason = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return UserError(f"{name}: {hub} refuses the token ({reason}); set HF_TOKEN to a token with access")
    return StorageLost(f"{name}: {hub} does not give it ({reason}); check the network, or name a path")

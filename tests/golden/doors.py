"""How the golden set comes to the product: commands and runs in forks of this process, and the reading of files.

Everything that knows the inside of the product is here, so that a change of the inside has one place to mend.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drills.campaign.cases import Interruption
from drills.campaign.forked_starts import run_command, start
from drills.kill_matrix.comparison import NOT_COMPARED, read_lines
from electra_kernels.native import cpu_library
from support.real_runs import REPOSITORY

from electra_dist.config.load import load_config
from electra_dist.store.json_file import canonical_json

CONFIGS = REPOSITORY / "configs"
_SPACE = "\u2003"  # between the words of a command, some of which have spaces
_planted: list[tuple[str, str]] = []


def plant(old: str, new: str) -> None:
    """From now on, replace a text in configs of runs, words of commands, the JSON of identities, and errors."""
    _planted.append((old, new))


def with_plants(text: str) -> str:
    """Return a text with what `plant` replaces."""
    for old, new in _planted:
        text = text.replace(old, new)
    return text


def has_cpu_library() -> bool:
    """Return whether the kernels' C library was built, whose sums round in another order than torch's."""
    return cpu_library.permute is not None


def sha256(data: bytes) -> str:
    """Return the beginning of the SHA-256 of some bytes, 80 bits, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:20]


def files_below(folder: Path, leave_out: Iterable[str] = ()) -> dict[str, str]:
    """Return the digest of every file below a folder whose path contains no text of `leave_out`, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part in name for part in leave_out):
            found[name] = sha256(path.read_bytes())
    return found


def command(folder: Path, *arguments: str, exit_code: int = 0) -> str:
    """Run `electra-dist ARGUMENTS` in a folder and return its output, with names for the folder and the checkout."""
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    with contextlib.chdir(folder):
        code = run_command(with_plants(_SPACE.join(arguments)).split(_SPACE), output)
    text = output.read_text(errors="replace") if output.exists() else ""
    if code != exit_code:
        raise RuntimeError(
            f"electra-dist {' '.join(arguments)} ended with {code} instead of {exit_code}:\n{text[-2000:]}"
        )
    return named_places(text, folder)


def named_places(text: str, folder: Path) -> str:
    """Return a text in which the folder of an entry is TMP and the checkout is REPOSITORY."""
    return (
        text.replace(str(folder.resolve()), "TMP").replace(str(folder), "TMP").replace(str(REPOSITORY), "REPOSITORY")
    )


def train(
    config: Path,
    run_dir: Path,
    ranks: int,
    stop_at: int | None = None,
    spikes: Sequence[int] = (),
    first_loss_scale: float = 1.0,
) -> tuple[list[int], str]:
    """Train to the end in forks, with a stop and a restart at a step; return the exit codes and what was printed."""
    config.write_text(with_plants(config.read_text()))
    output = config.with_suffix(".txt")
    output.unlink(missing_ok=True)
    codes = [0] * ranks
    if stop_at is not None:
        codes = start(
            config,
            run_dir.parent,
            ranks,
            output,
            Interruption("SIGTERM", 0, stop_at),
            spikes,
            first_loss_scale=first_loss_scale,
        )
    if set(codes) <= {0, 75}:
        codes = start(config, run_dir.parent, ranks, output, None, spikes, first_loss_scale=first_loss_scale)
    return codes, output.read_text(errors="replace") if output.exists() else ""


def exact_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of steps and evaluations without what depends on the machine or the moment."""
    records = read_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in NOT_COMPARED} for record in records]


def events(run_dir: Path) -> list[str]:
    """Return the events of the ledger with their steps; those of checkpoints, written by a thread, come last."""
    texts = [f"{event['event']} {event.get('step')}" for event in read_lines(run_dir / "ledger.jsonl")]
    return sorted(texts, key=lambda text: text.startswith("checkpoint "))


def newest_tensors(run_dir: Path) -> dict[str, str]:
    """Return the digest of each kind of state (weights, moments) over all parameters, from the newest checkpoint.

    The pieces of a parameter that the ranks hold are put together, so the digests do not depend on how they are cut.
    """
    newest = max((run_dir / "checkpoints").glob("step-*"))
    pieces: dict[str, dict[str, dict[int, bytes]]] = defaultdict(lambda: defaultdict(dict))
    for file in sorted(newest.glob("rank-*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, tensor in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            kind, parameter, begin = name.split("|")
            first, end = tensor["data_offsets"]
            pieces[kind][parameter][int(begin)] = data[8 + length + first : 8 + length + end]
    return {
        kind: sha256(
            b"".join(f"{name}\0".encode() + piece[at] for name, piece in sorted(of.items()) for at in sorted(piece))
        )
        for kind, of in sorted(pieces.items())
    }


def identity(config: Path, overrides: Sequence[str] = ()) -> str:
    """Return the digest of the identity of a config: what must not change between the starts of a run."""
    return sha256(with_plants(canonical_json(load_config(config, list(overrides)).identity())).encode())


def resolved(config: Path) -> dict[str, Any]:
    """Return a config with all its keys, as a tree."""
    tree: dict[str, Any] = load_config(config, []).model_dump(mode="json")
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def without_moments(text: str) -> str:
    """Return a text in which what depends on the moment or the machine is replaced: times, hosts, versions, ids."""
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00)?", "TIME", text)
    return re.sub(r"\b[0-9a-f]{40,64}\b", "DIGEST", text)

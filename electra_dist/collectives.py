"""Exchange small JSON values between all ranks, agree on one choice, and end all ranks with one exit code.

Guarantee: every rank returns the same value. An error that `from_rank_0` lists is raised on every rank, with the same
message. Messages are parsed as JSON and never unpickled, so a foreign process that has joined the process group can
make no rank run code or allocate much memory.

An error that one rank alone meets, such as a damaged shard (exit code 78) or a full disk of its node (75), is printed
once, and every rank that still reaches the process group's key-value store, in rank 0's process, ends with its exit
code (`report_once`, `reported_exit_code`). The launcher would otherwise take whichever exit code it received first.

How: a value travels as a JSON text in a tensor of bytes, after its length. Floats keep all their bits.

Cost: two small collectives for each call; milliseconds over gloo.

Limits: lists, dictionaries with text as keys, text, numbers, booleans and None; a tuple arrives as a list. Messages of
more than 64 MiB are refused. Every rank of the default process group must call `from_rank_0` and `gather`, in the same
order. NCCL does not notice that a peer is missing; a rank that hangs in it is ended by its launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from electra_dist.errors import (
    ManifestMismatch,
    StorageLost,
    StoreAway,
    StoreError,
    StoreExhausted,
    StoreMissing,
    UserError,
    error_line,
)
from electra_dist.store.json_file import DamagedJson, parse_json

Json = None | bool | int | float | str | list[Any] | dict[str, Any]
T = TypeVar("T", bound=Json)

# Keys of the process group's store.
_NUM_ERRORS = "user_errors"
_EXIT_CODE = "reported_exit_code"

_MOST_BYTES = 64 << 20  # limit for a message of rank 0, and for the sum of the messages that one `gather` collects
# Errors that rank 0 passes on to all ranks; an error of a subclass arrives as its nearest base class in this table.
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (StorageLost, StoreExhausted, StoreAway, StoreMissing, StoreError, ManifestMismatch, UserError)
}


def from_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only, and return its value on every rank. Collective: all ranks must call this.
    If it raises UserError, every rank raises that error. Any other exception is raised on rank 0 alone, and the other
    ranks then wait until the process group fails.
    """
    known_error: UserError | None = None
    message: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            message = {"value": function()}
        except UserError as error:
            known_error = error
            kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
            message = {"error": kind, "text": str(error)}
    sent = _encode(message)
    length = torch.tensor([len(sent)], device=sent.device)
    dist.broadcast(length, 0)
    size = _checked_size(int(length), 0, _MOST_BYTES)
    if dist.get_rank() != 0:
        sent = sent.new_zeros(size)
    dist.broadcast(sent, 0)
    received = _decode(sent, 0)
    if known_error is not None:
        raise known_error
    match received:
        case {"error": str(kind), "text": str(text)} if kind in _ERRORS:
            raise _ERRORS[kind](text)
        case {"value": value}:
            return value
    raise _sent_by_a_stranger(0, "neither a value nor an error")


def gather(value: T) -> list[T]:
    """Collect one value from every rank and return all of them, ordered by rank, on every rank. Collective."""
    own = _encode(value)
    num_ranks = dist.get_world_size()
    length = torch.tensor([len(own)], device=own.device)
    lengths = [torch.zeros_like(length) for _ in range(num_ranks)]
    dist.all_gather(lengths, length)
    sizes = [_checked_size(int(size), rank, _MOST_BYTES // num_ranks) for rank, size in enumerate(lengths)]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    received = [torch.zeros_like(padded) for _ in range(num_ranks)]
    dist.all_gather(received, padded)
    return [_decode(content[:size], rank) for rank, (content, size) in enumerate(zip(received, sizes))]


class Choice(NamedTuple):
    """Implementation that a rank chose, by name, and the reason for the log; the usual choice has an empty reason."""

    name: str
    reason: str = ""


class Candidate(NamedTuple):
    """Implementation that `first_that_works` may choose, with the function that finds out whether it can be used."""

    name: str
    title: str  # in the reason, if another candidate is chosen
    find_fault: Callable[[], str]  # returns why this machine cannot use it, or ""


def first_that_works(candidates: Iterable[Candidate], fallback: str) -> Choice:
    """Choose the first candidate without a fault, or `fallback` if all have one; the reason lists the faults found."""
    faults: list[str] = []
    for candidate in candidates:
        fault = candidate.find_fault()
        if not fault:
            return Choice(candidate.name, "; ".join(faults))
        faults.append(f"{candidate.title} cannot be used: {fault}")
    return Choice(fallback, "; ".join(faults))


def agree(own: Choice, fallback: str) -> Choice:
    """Return the choice that all ranks have made or, if they differ, `fallback`, which all can use. Collective.
    Ranks whose GPUs or packages differ may choose differently, and results would then differ between ranks.
    """
    choices = [Choice(*choice) for choice in gather(list(own))]
    for choice in choices:
        if choice.name == fallback:
            return choice
    first = choices[0]
    for rank, choice in enumerate(choices):
        if choice.name != first.name:
            return Choice(fallback, f"rank 0 would use {_shown(first)}, but rank {rank} {_shown(choice)}")
    return first


def _shown(choice: Choice) -> str:
    return f"{choice.name} ({choice.reason})" if choice.reason else choice.name


def report_once(error: UserError, exit_code: int) -> None:
    """Print an error to stderr, unless another rank has printed one, and tell all ranks to end with `exit_code`.
    Not a collective: any rank may call this alone. If rank 0 has ended, each rank that calls this prints its error.
    """
    is_first = True  # also if the store cannot be reached
    with contextlib.suppress(RuntimeError):  # torch's error if rank 0, whose process has the store, has ended
        store = dist.distributed_c10d._get_default_store()
        num_errors = store.add(_NUM_ERRORS, 1)  # atomic, so exactly one rank gets 1
        is_first = num_errors == 1
        if is_first:
            store.set(_EXIT_CODE, str(exit_code))
    if is_first:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(error_line(error), file=sys.stderr, flush=True)


def reported_exit_code() -> int | None:
    """Return the exit code of the first `report_once` of any rank; None before it, or if rank 0 has ended."""
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_EXIT_CODE]):
            return int(store.get(_EXIT_CODE))
    return None


def _encode(value: Json) -> torch.Tensor:
    """Encode a value as JSON text in a tensor, uint8 [bytes], on the device that the process group uses."""
    text = json.dumps(value).encode("ascii")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _decode(message: torch.Tensor, rank: int) -> Any:
    try:
        return parse_json(message.cpu().numpy().tobytes())
    except DamagedJson as error:
        raise _sent_by_a_stranger(rank, f"a message that cannot be used: {error}") from None


def _checked_size(size: int, rank: int, most_bytes: int) -> int:
    if not 0 < size <= most_bytes:
        raise _sent_by_a_stranger(rank, f"a message of {size:,} bytes, and {most_bytes:,} are the limit")
    return size


def _sent_by_a_stranger(rank: int, what: str) -> UserError:
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return UserError(
        f"rank {rank} sent {what}; a process that is not of this run may have joined its ranks at {place}: start the "
        f"run again with another port (deepspeed --master_port PORT)"
    )

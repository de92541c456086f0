"""Values of all ranks arrive as they were sent, and what a hostile process sends is refused without being executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import free_port
from support.torch_versions import without_gloo_lines

from electra_dist import collectives
from electra_dist.collectives import Candidate, Choice, agree, first_that_works

# Rank 0 is a process of another user, where the test may start one, and has joined a run's process group.
ATTACKER = """
import os, pickle, sys, torch, torch.distributed as dist
if os.getuid() == 0:
    os.setuid(65534)

class Opens:
    def __reduce__(self):
        return os.open, (sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)

def send(content, size=None):
    dist.broadcast(torch.tensor([len(content) if size is None else size]), 0)
    if size is None:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)

dist.init_process_group("gloo")
send(pickle.dumps({"value": Opens()}))
send(b"[" * 100_000)
send(b'{"error": "SystemExit", "text": "0"}')
send(b'{"value": 1' + b"0" * 5000 + b"}")
send(b"", 1 << 62)
send(b"", -1)
lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
content = torch.frombuffer(bytearray(pickle.dumps(Opens())), dtype=torch.uint8)
dist.all_gather(lengths, torch.tensor([len(content)]))
longest = int(max(lengths))
padded = torch.zeros(longest, dtype=torch.uint8)
padded[: len(content)] = content
dist.all_gather([torch.zeros_like(padded) for _ in range(2)], padded)
dist.barrier()
"""

# The same with torch's own exchange of Python objects, which unpickles on the receiving side.
OBJECT_ATTACKER = """
import os, sys, torch.distributed as dist
if os.getuid() == 0:
    os.setuid(65534)

class Opens:
    def __reduce__(self):
        return os.open, (sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)

dist.init_process_group("gloo")
dist.broadcast_object_list([Opens(), None])
os._exit(0)
"""

ONE_CALL = """
import os, torch.distributed as dist
from electra_dist.collectives import from_rank_0
dist.init_process_group("gloo")
try:
    from_rank_0(lambda: 1)
finally:
    os._exit(0)
"""

VICTIM = """
import resource, torch.distributed as dist
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import UserError
dist.init_process_group("gloo")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for call in [lambda: from_rank_0(lambda: 1)] * 6 + [lambda: gather("x" * 10)]:
    try:
        print("accepted", call())
    except UserError as error:
        print("refused", error)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
dist.barrier()
"""

VALUES = """
import json, math, sys, torch.distributed as dist
from electra_dist.collectives import from_rank_0, gather
from electra_dist.errors import StorageLost, StoreAway, StoreExhausted, UserError
dist.init_process_group("gloo")
rank = dist.get_rank()
sent = [rank, 0.1 + rank, 5e-324, -(2**63), "\\ud800\\u00e9\\n" * rank, None, [True, {"a": []}], "y" * 70_000 * rank]
assert gather(sent)[rank] == sent and gather(rank) == [0, 1] and gather(None) == [None, None]
assert math.isnan(from_rank_0(lambda: math.nan)) and gather(math.inf) == [math.inf] * 2
assert from_rank_0(lambda: sent)[1] == 0.1

class Special(StoreExhausted):
    pass

def fail(error):
    raise error

cases = [(Special("s3://b: away"), StoreExhausted), (StorageLost("full"), StorageLost), (UserError("no"), UserError)]
for error, kind in cases:
    try:
        from_rank_0(lambda: fail(error))
    except UserError as received:
        assert str(received) == str(error) and isinstance(received, kind)
        assert isinstance(received, StoreAway) == (kind is not UserError)
        assert isinstance(received, StorageLost) == (kind is StorageLost)
    else:
        raise AssertionError(error)
dist.barrier()
print("equal")
"""


def run_ranks(*programs: str, arguments: tuple[str, ...] = (), check: bool = True) -> list[str]:
    """Run one program for each rank of a process group, and return what each has printed.

    Args:
        check: whether all must end with exit code 0.
    """
    group = {"WORLD_SIZE": str(len(programs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, program in enumerate(programs)
    ]
    try:
        outputs = [without_gloo_lines(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not check or all(rank.returncode == 0 for rank in ranks), outputs
    return outputs


@pytest.mark.multiproc
def test_values_and_errors_arrive_as_they_were_sent() -> None:
    assert run_ranks(VALUES, VALUES) == ["equal\n", "equal\n"]


@pytest.mark.multiproc
def test_a_pickle_in_place_of_a_message_is_not_executed(tmp_path: Path) -> None:
    victims_file = tmp_path / "made-by-the-victim"
    run_ranks(OBJECT_ATTACKER, ONE_CALL, arguments=(str(victims_file),), check=False)
    assert not victims_file.exists()


@pytest.mark.multiproc
def test_a_process_of_another_user_that_has_joined_the_ranks_executes_nothing(tmp_path: Path) -> None:
    """It sends pickles, nested lists, a foreign class, a long number and impossible lengths."""
    victims_file = tmp_path / "made-by-the-victim"
    _, output = run_ranks(ATTACKER, VICTIM, arguments=(str(victims_file),))
    lines = output.splitlines()
    assert len(lines) == 7 and all(line.startswith("refused rank 0 sent ") for line in lines), output
    assert all("--master_port" in line for line in lines)
    assert not victims_file.exists()


def test_the_first_candidate_without_a_fault_is_chosen_and_the_reason_has_the_faults_before_it() -> None:
    broken = [Candidate("a", "The A", lambda: "no nvcc"), Candidate("b", "The B", lambda: "no driver")]
    assert first_that_works([*broken, Candidate("c", "The C", str)], fallback="d") == Choice(
        "c", "The A cannot be used: no nvcc; The B cannot be used: no driver"
    )
    assert first_that_works(broken, fallback="d").name == "d"
    assert first_that_works([Candidate("c", "The C", str)], fallback="d") == Choice("c")


def test_ranks_that_differ_take_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    flash, flex = Choice("flash", "one"), Choice("flex", "two")
    sdpa = Choice("sdpa", "rank 2 has no kernel")

    def agreed(*choices: Choice) -> Choice:
        monkeypatch.setattr(collectives, "gather", lambda own: [list(choice) for choice in choices])
        return agree(choices[0], fallback="sdpa")

    assert agreed(flash, flash) == flash
    assert agreed(flash, flash, sdpa) == sdpa
    mixed = agreed(flex, flex, flash)
    assert mixed.name == "sdpa" and "rank 2 flash (one)" in mixed.reason

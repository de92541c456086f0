"""Kills a short real run at every durable operation in turn, and compares each killed run with the uninterrupted one.

    python tests/drills/kill_matrix                     # all kills (make kill-matrix)
    python tests/drills/kill_matrix --sample            # the few kills of SAMPLE
    python tests/drills/kill_matrix --operations 17,33  # the kills at these operations
    python tests/drills/kill_matrix --store azure       # corpus and second target on Azurite in place of an S3 server

`short_run.py` describes the run, `durable_operations.py` what is numbered, `comparison.py` what must be equal. The
process is killed before each operation, and after half of the bytes of each write. A kill after an operation leaves
what a kill before the process's next one leaves, so only the last operation of a process is followed by a kill; with
`--moments before,torn,after` all are. The drill prints operations, kills and differences by kind of operation and by
file, and exits with 1 if a killed run differs, or if files were changed in a way that is not intercepted.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from drills.kill_matrix.durable_operations import Kill
from drills.kill_matrix.matrix import KillResult, Matrix, run_kills
from rich.progress import Progress
from support import azurite, s3_server
from support.fork_server import import_everything
from support.small_disks import folder_in_memory

# Kind of operation, file, which of those in the uninterrupted run, and moment.
SAMPLE = {
    "s3": (
        ("create", "run/.skipped_steps.json.*", -1, "before"),  # a rollback is in the ledger and not yet carried out
        ("rename", "run/skipped_steps.json", -1, "after"),  # it has been stored, and the checkpoint is not yet loaded
        ("write", "run/metrics.jsonl", -1, "torn"),
        ("link", "checkpoints/step-*/manifest.json", -1, "after"),  # the last checkpoint is in one of two targets
        ("unlink", "checkpoints/step-*/manifest.json", -1, "after"),  # of an old checkpoint
    ),
    "azure": (
        ("part", "az:checkpoints/step-*", -1, "before"),  # an upload is unfinished
        ("PUT", "az:checkpoints/step-*/manifest.json", 0, "after"),  # committed, but no answer came
        ("DELETE", "az:checkpoints/step-*/manifest.json", -1, "after"),  # of an old checkpoint
    ),
}
Sample = Sequence[tuple[str, str, int, str]]


def chosen_kills(
    matrix: Matrix, operations: Sequence[int], moments: Sequence[str], sample: Sample
) -> list[tuple[int, Kill]]:
    """Return the kills that the command line asks for, each with the number of its operation."""
    kills = matrix.kills()
    if operations:
        return [(number, kill) for number, kill in kills if number in operations and kill.moment in moments]
    if not sample:
        last = {(operation.phase, operation.rank): operation for operation in matrix.operations}.values()
        return [
            (number, kill)
            for number, kill in kills
            if kill.moment in moments or (kill.moment == "after" and kill.operation in last)
        ]
    chosen = []
    for kind, file, place, moment in sample:
        alike = [
            (number, kill)
            for number, kill in kills
            if (kill.operation.kind, kill.moment) == (kind, moment) and fnmatch.fnmatch(kill.operation.file, file)
        ]
        chosen.append(alike[place])
    return chosen


def sort_of_file(file: str) -> str:
    """Return the name of a file without the numbers of steps, attempts, ranks and parts, for the table."""
    name = re.sub(r"[0-9a-f]{64}", "SHA256", file)
    return re.sub(r" part \d+$", "", re.sub(r"\d{4,}", "N", name))


def print_table(title: str, results: Sequence[KillResult], key: Callable[[KillResult], str]) -> None:
    """Print operations, kills and differences by `key`, in the order of the names."""
    print(f"\n{title:58} operations  kills  not reached  differences")
    rows = [(name, [result for result in results if key(result) == name]) for name in sorted(set(map(key, results)))]
    for name, group in [*rows, ("all", list(results))]:
        num_operations = len({result.number for result in group})
        num_missing = sum(not result.was_reached for result in group)
        num_different = sum(bool(result.differences) for result in group)
        print(f"{name:58} {num_operations:10} {len(group):6} {num_missing:12} {num_different:12}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", default="", help="numbers of operations, separated by commas; default: all")
    parser.add_argument("--moments", default="before,torn", help="moments of the kills, separated by commas")
    parser.add_argument("--sample", action="store_true", help="only the few kills that the tests repeat")
    parser.add_argument("--workers", type=int, default=3, help="runs at a time (a run often waits; default: 3)")
    parser.add_argument("--list", action="store_true", help="print the numbered operations and kill nothing")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept afterwards")
    parser.add_argument("--store", choices=["s3", "azure"], default="s3", help="service of the second target")
    parser.add_argument("--objects", action="store_true", help="only the kills at changes of objects")
    parser.add_argument(
        "--server", choices=["radosgw", "moto"], help="S3 server (default: radosgw if it is installed, otherwise moto)"
    )
    return parser.parse_args()


def run_and_show(matrix: Matrix, kills: Sequence[tuple[int, Kill]], num_workers: int) -> list[KillResult]:
    """Run kills with a progress bar, print each that differs, and return the results."""
    results = []
    with Progress(auto_refresh=False) as progress:  # without a thread, because this process forks
        task = progress.add_task("kills", total=len(kills))
        for result in run_kills(matrix, kills, num_workers):
            results.append(result)
            progress.advance(task)
            progress.refresh()
            if result.differences:
                text = "\n    ".join([f"DIFFERENT: {describe(result)}", *result.differences])
                progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
    return results


def describe(result: KillResult) -> str:
    """Return which operation was killed, and when."""
    operation = result.kill.operation
    return (
        f"operation {result.number}, killed {result.kill.moment}: {operation.phase}, rank {operation.rank}, "
        f"{operation.kind} {operation.file}, number {operation.occurrence}"
    )


def print_summary(matrix: Matrix, results: Sequence[KillResult], seconds: float) -> None:
    """Print the tables and the line with the totals."""
    print_table("by kind", results, lambda result: result.kill.operation.kind)
    print_table("by file", results, lambda result: sort_of_file(result.kill.operation.file))
    num_different = sum(bool(result.differences) for result in results)
    mean_s = sum(result.seconds for result in results) / max(1, len(results))
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    print(
        f"\n{len(matrix.operations)} operations, {len(results)} kills, {num_different} differences, "
        f"{len(matrix.missed)} changes not intercepted; {mean_s:.1f} s for a kill, {seconds:.0f} s in all, and "
        f"{cpu_s:.0f} s of processor time without the server"
    )


def main() -> int:
    """Run the drill and return its exit code: 0 if no killed run differs from the uninterrupted one."""
    args = parse()
    operations = [int(number) for number in args.operations.split(",") if number]
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kill-matrix-", dir=folder_in_memory()) as temporary,
        azurite.running_azurite() if args.store == "azure" else s3_server.running_s3(args.server) as server,
    ):
        os.environ.update(server.env)
        if args.store == "azure":
            bucket = azurite.make_container(server.endpoint_url, "kills")
        else:
            bucket = s3_server.make_bucket(*server, "kills")
        import_everything()
        matrix = Matrix((args.keep or Path(temporary)).resolve(), bucket, server)
        matrix.run_uninterrupted()
        print(f"uninterrupted run: {len(matrix.operations)} operations, {matrix.seconds:.1f} s", flush=True)
        for change in matrix.missed:
            print(f"NOT INTERCEPTED: {change}")
        if args.list:
            for number, operation in enumerate(matrix.operations, start=1):
                print(f"{number:5} {operation.phase} rank {operation.rank}: {operation.kind} {operation.file}")
            return 1 if matrix.missed else 0
        sample = SAMPLE[args.store] if args.sample else ()
        kills = chosen_kills(matrix, operations, args.moments.split(","), sample)
        if args.objects:
            kills = [(number, kill) for number, kill in kills if kill.operation.file.startswith(("az:", "s3:"))]
        results = run_and_show(matrix, kills, args.workers)
    print_summary(matrix, results, time.monotonic() - begin)
    has_killed = any(result.was_reached for result in results)
    is_good = has_killed and not matrix.missed and not any(result.differences for result in results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

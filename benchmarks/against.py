"""Compare the speed of this source tree with that of another commit of it.

    python benchmarks/against.py COMMIT                      # all cases, five pairs each
    python benchmarks/against.py COMMIT step loader --save   # also writes benchmarks/results/against-YYYYMMDD.json

Each case of `against_cases.py` runs in turns in both trees, every time in a new process, so that other load on the
machine affects both alike. A ratio is taken within each pair, and every second pair begins with the other tree; the
median of the ratios and their extremes are printed. More than 1: this tree is slower. A first pair that warms
caches is not counted.

Guarantee: a process imports this project from one of the two trees only, but for `against_cases.py`, which is this
tree's. The commit is checked out into a temporary folder, which is removed. Its C library is built if this tree has
one.

Limits: one thread, one rank, local files. `--save` adds the cases of this call to an earlier record of the same day
and the same two commits.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from against_cases import CASES
from measure import REPOSITORY, Json, format_summary, make_record, print_table, ratio, record_file, run_child
from run import add_common_options

PROGRAM = Path(__file__).parent / "against_cases.py"
ON_THE_PATH = ("", "kernels", "launcher", "benchmarks", "tests")  # folders of a tree that hold modules


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit below a folder, with its C library if this tree has one, and yield its root."""
    tree = folder / "tree"
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        if any((REPOSITORY / "kernels").rglob("*.so")):
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure_once(case: str, tree: Path, own: Path, smoke: bool) -> dict[str, float]:
    """Run a case once in a new process of a tree; return its seconds by name."""
    own.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / name) for name in ON_THE_PATH),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-P", str(PROGRAM), case, str(own), *["--smoke"] * smoke]
    return json.loads(run_child(command, cwd=tree, env=environment).splitlines()[-1])


def compare(case: str, before: Path, folder: Path, pairs: int, smoke: bool) -> Json:
    """Run a case in both trees in turns; return by name the seconds in each tree, and their ratio."""
    trees = {"before": before, "after": REPOSITORY}
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(0 if smoke else -1, pairs):  # The pair -1 writes files and fills caches, and is not counted.
        for name in sorted(trees, reverse=number % 2 == 0):
            own = folder / name / case
            for what, found in measure_once(case, trees[name], own, smoke).items():
                if number >= 0:
                    seconds.setdefault(what, {"before": [], "after": []})[name].append(found)
    return {what: times | {"ratio": ratio(times["after"], times["before"])} for what, times in seconds.items()}


def save(record: Json, folder: Path) -> None:
    """Write the record, together with the other cases of an earlier one of the same day and commit."""
    file = record_file(record, folder)
    if file.exists():
        earlier = json.loads(file.read_text())
        if (earlier["before"], earlier["commit"]) == (record["before"], record["commit"]):
            record["cases"] = earlier["cases"] | record["cases"]
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--pairs", type=int, default=5, help="counted runs in each tree (%(default)s)")
    add_common_options(parser)
    arguments = parser.parse_args(words)
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"there is no case {', '.join(unknown)}; the cases are {', '.join(CASES)}")
    command = ["python", "benchmarks/against.py", arguments.commit, *arguments.cases, f"--pairs={arguments.pairs}"]
    record = make_record("against", shlex.join(command), arguments.smoke)
    resolve = ["git", "-C", str(REPOSITORY), "rev-parse", f"{arguments.commit}^{{commit}}"]
    record["before"] = subprocess.run(resolve, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    pairs = 1 if arguments.smoke else arguments.pairs
    record["cases"] = {}
    with tempfile.TemporaryDirectory(prefix="against-") as name, checked_out(record["before"], Path(name)) as before:
        for case in arguments.cases or CASES:
            found = compare(case, before, Path(name), pairs, arguments.smoke)
            record["cases"] |= found
            rows = []
            for what, times in found.items():
                seconds = [format_summary(times[tree], ".3f") for tree in ("before", "after")]
                rows.append([what, *seconds, format_summary(times["ratio"])])
            print_table([case, "before, s", "after, s", "after / before"], rows)
            if arguments.save:
                save(record, arguments.results)


if __name__ == "__main__":
    main(sys.argv[1:])

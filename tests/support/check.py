"""Check what has changed since the last commit: style, types, and the tests that the change concerns most.

    python tests/support/check.py                     # (make check)
    python tests/support/check.py --list              # print which tests would run, and run nothing
    python tests/support/check.py configs/defaults.yaml   # as if these files had changed

How: test files that have changed run first, to their end; then those that name a changed file or module, and those in
its folder, until the time is up. Of these, tests that start several ranks run last. The types are checked beside them.

Guarantee: if no test file is selected, the files of FAST run, so something is always tested. Limits: a test that
reaches a changed module only through other modules is not found; `make test` runs all.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
MOST_SHOWN = 8
NO_TESTS = 5  # exit code of pytest if no test of the files runs by default
INTERRUPTED = 2  # exit code of pytest after SIGINT
LONGEST_CHANGED_S = 600.0  # for the test files that have changed themselves
SOURCES = ("benchmarks", "electra_dist", "kernels", "launcher")
FAST = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
    "tests/test_public_names.py",
    "tests/config/test_config.py",
    "tests/data/test_order.py",
    "tests/engine/test_optimizer.py",
    "tests/model/test_layer.py",
    "tests/run/test_ledger.py",
    "tests/store/test_patience.py",
    "tests/train/test_step.py",
)


def changed_files(root: Path) -> list[str]:
    """Return the files that differ from the last commit, deleted ones too, and new ones that git does not ignore.

    Raises CalledProcessError if `root` is in no git work tree, or has no commit.
    """
    names: set[str] = set()
    for arguments in ("diff --name-only --relative -z HEAD", "ls-files -z --others --exclude-standard"):
        done = subprocess.run(["git", *arguments.split()], cwd=root, check=True, capture_output=True, text=True)
        names.update(done.stdout.split("\0"))
    return sorted(names - {""})


def select(root: Path, changed: Sequence[str]) -> dict[str, int]:
    """Return the test files that a change of some files concerns, with their distances; the nearest come first."""
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "tests").rglob("test_*.py"))
        # The tests of the second folder run within tests/kernels/test_interpreter.py, in Triton's interpreter.
        if not any(path.is_relative_to(root / "tests" / folder) for folder in ("cluster", "kernels/interpreted"))
    }
    distance_of: dict[str, int] = {}
    for file in changed:
        named, folder = _names_of(file), _test_folder(file)
        for test, text in texts.items():
            is_beside = folder is not None and str(PurePosixPath(test).parent) == folder
            if test == file:
                distance = 0
            elif named.search(text) or (is_beside and PurePosixPath(test).name.startswith(_test_name(file))):
                distance = 1
            elif is_beside:
                distance = 3 if "pytest.mark.multiproc" in text else 2
            else:
                continue
            distance_of[test] = min(distance, distance_of.get(test, distance))
    return dict(sorted(distance_of.items(), key=lambda item: (item[1], item[0])))


def _names_of(file: str) -> re.Pattern[str]:
    """Return a pattern that finds, in a test's text, a file's name or, of a Python file, an import of its module."""
    path = PurePosixPath(file)
    names = [rf"(?<![\w.-])(?:{re.escape(file)}|{re.escape(path.name)})(?![\w-])"]
    if path.suffix == ".py":
        parts = list(path.with_suffix("").parts)
        package, module = ".".join(parts[parts[0] != "electra_dist" : -1]), parts[-1]
        names = [rf"\b{re.escape(package)}\.{module}\b", rf"\bfrom {re.escape(package)} import [^\n]*\b{module}\b"]
        names.append(rf"[\"']{re.escape(file)}[\"']")
    return re.compile("|".join(names))


def _test_folder(file: str) -> str | None:
    """Return the folder of the tests of a source file, or that of a test; None for any other file."""
    folders = PurePosixPath(file).parent.parts
    if not folders or folders[0] not in (*SOURCES, "tests"):
        return None
    if folders[0] in ("kernels", "launcher"):
        folders = (folders[0], *folders[2:])
    return str(PurePosixPath("tests", *folders[folders[0] in ("electra_dist", "tests") :]))


def _test_name(file: str) -> str:
    """Return how the names of the test files of a source file begin, such as `test_order` for data/order.py."""
    return f"test_{PurePosixPath(file).stem.strip('_')}"


def run_tests(files: Sequence[str], seconds: float) -> int:
    """Run test files until the time is up, and return pytest's exit code; 0 if none has failed by then."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-x", "-n", "2", "--dist", "loadfile"]
    with subprocess.Popen([*command, "--no-loadscope-reorder", *files], cwd=ROOT) as tests:
        try:
            return tests.wait(seconds)
        except subprocess.TimeoutExpired:
            print("\nthe time is up; pytest is interrupted", flush=True)
            tests.send_signal(signal.SIGINT)
        code = tests.wait()
    if code != INTERRUPTED:
        return code
    print(f"not all of these tests were run within {seconds:.0f} s; SECONDS=240 gives more time")
    return 0


def run_nearest_first(selected: Mapping[str, int], seconds: float) -> int:
    """Run the nearest files first, and return 1 if a test has failed.

    Test files that have changed run to their end; those that name a changed file, and then the others, run while there
    is time and nothing has failed.
    """
    changed, near, beside = (
        [file for file, distance in selected.items() if min(distance, 2) == wanted] for wanted in range(3)
    )
    end = time.monotonic() + seconds
    codes = [run_tests(changed, LONGEST_CHANGED_S)] if changed else []
    for files in filter(None, (near, beside)):
        if time.monotonic() < end and not set(codes) - {0, NO_TESTS}:
            codes.append(run_tests(files, end - time.monotonic()))
    if not set(codes) - {NO_TESTS}:
        print("no test of the selected files runs by default, so the fixed fast set runs")
        codes = [run_tests(FAST, max(1.0, end - time.monotonic()))]
    return int(any(code not in (0, NO_TESTS) for code in codes))


def run_all(selected: Mapping[str, int], seconds: float) -> int:
    """Check style and types, run the selected tests, print how long each took; return 1 if one failed, else 0.

    A fault of style ends the call.
    """
    for options in (["check"], ["format", "--check"]):
        begin = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "ruff", *options, "--quiet", "."], cwd=ROOT).returncode
        _print_part(f"ruff {options[0]}", begin, code)
        if code:
            print("the tests run once ruff is content")
            return 1
    codes = []
    if not (ROOT / ".mypy_cache").exists():
        print("types: there is no .mypy_cache yet, so they take half a minute of processor time more")
    begin = time.monotonic()
    packages = [part for name in ("electra_dist", "electra_launcher", "electra_kernels") for part in ("-p", name)]
    command = [sys.executable, "-m", "mypy", *packages]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as types:
        codes.append(run_nearest_first(selected, seconds))
        _print_part("tests", begin, codes[-1])
        print((types.communicate()[0]).strip())
    codes.append(types.returncode)
    _print_part("tests and types together", begin, types.returncode)
    return 1 if any(codes) else 0


def _print_part(name: str, begin: float, code: int) -> None:
    """Print how long a part has taken and whether it is good."""
    print(f"{name}: {'good' if code == 0 else 'FAILED'}, {time.monotonic() - begin:.1f} s", flush=True)


def main() -> int:
    """Check what the command line asks for, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="take these files as changed (default: ask git)")
    parser.add_argument("--seconds", type=float, default=60.0, help="end the tests then (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the selected test files, and run nothing")
    args = parser.parse_args()
    begin = time.monotonic()
    changed = args.files or changed_files(ROOT)
    selected = select(ROOT, changed)
    more = f" and {len(changed) - MOST_SHOWN} more" if len(changed) > MOST_SHOWN else ""
    print(f"changed: {', '.join(changed[:MOST_SHOWN]) or 'nothing'}{more}")
    print(f"tests: {len(selected)} files")
    if args.list:
        print("\n".join(selected))
        return 0
    code = run_all(selected, args.seconds)
    if any(file.startswith("tests/cluster/") for file in changed):
        print("tests/cluster has changed: make cluster-test runs it")
    print(f"{'good' if code == 0 else 'FAILED'}, {time.monotonic() - begin:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())

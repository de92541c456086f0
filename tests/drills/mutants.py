"""Breaks the code on purpose, one mistake at a time: for each mutant a named test must fail.

    python tests/drills/mutants.py
    python tests/drills/mutants.py --only store:
    python tests/drills/mutants.py --list

A mutant is a mistake that an engineer could make: a piece of text in one file and what replaces it. `mutants.yaml` has
them all, with every package of the project. The drill copies the files of the repository to a temporary folder, makes
sure that all named tests pass there, and then, for one mutant after another, changes the file, runs the named test and
restores the file. It prints a table, and exits with 1 if a test of a mutant passes (the mutant survived), if a test
cannot be run, or if the text to replace is not in the file exactly once, because the code has changed since: correct
the entry in mutants.yaml then.

Each run of pytest is a fork of this process, which has imported the packages of others beforehand, so most mutants
take a second.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import pytest
import yaml
from drill import Verdict, options, print_verdicts
from rich.progress import track
from support.real_runs import REPOSITORY

TESTS_FAILED = 1  # exit code of pytest; other codes mean that the tests did not run
LIMIT_S = 300.0  # how long the tests of one mutant may take
COMPILED = ("electra_dist", "kernels", "launcher", "tests/support")  # folders whose modules forks load as bytecode
OWN_PACKAGES = ("electra_dist", "electra_kernels", "electra_launcher", "support")  # which forks import from the copy
# Packages of others that tests import; a fork finds them imported.
PRELOADED = (
    *("boto3", "botocore.client", "deepspeed", "hypothesis", "matplotlib.figure", "numpy", "pandas", "psutil"),
    *("pyarrow.parquet", "pydantic", "safetensors.torch", "scipy.stats", "sklearn.linear_model", "tokenizers"),
    *("torch", "torch.distributed", "torch.utils.tensorboard", "typer", "webdataset", "yaml", "zstandard"),
    "transformers.models.electra.modeling_electra",
    "transformers.models.modernbert.modeling_modernbert",
)


class Mutant(NamedTuple):
    """A mistake: in `file`, `original` becomes `mutated`; then `test` must fail."""

    file: str
    name: str  # "PACKAGE: what is wrong"
    original: str  # a piece of text that is in the file exactly once
    mutated: str
    test: str  # a test, or a file of tests, without the markers `drill` and `cluster`


def read_mutants() -> list[Mutant]:
    """Return the mutants of mutants.yaml, which lists them by file."""
    entries_of = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return [Mutant(file=file, **entry) for file, entries in entries_of.items() for entry in entries]


def main() -> int:
    """Apply the mutants, print the table, and return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="take only the mutants whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the names and tests of the mutants, and end")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if arguments.only in mutant.name]
    if not chosen:
        parser.error(f"no mutant's name contains {arguments.only!r}; --list shows all names")
    if arguments.list:
        print_list(chosen)
        return 0
    begin = time.monotonic()
    with copy_of_repository() as copy, packages_imported():
        tests = sorted({mutant.test for mutant in chosen})
        code, output = run_tests(copy, tests, limit_s=LIMIT_S * len(tests))
        if code != 0:
            print(output[-6000:])
            print("error: the tests fail without a mutant; make them pass first", file=sys.stderr)
            return 1
        mutants = track(chosen, description="mutants", auto_refresh=False)  # a thread would not survive the forks
        verdicts = [verdict_of(copy, mutant) for mutant in mutants]
    exit_code = print_verdicts("mistakes that a test must find", verdicts)
    num_found = sum(verdict.good for verdict in verdicts)
    print(f"{num_found} of {len(chosen)} mistakes found, {time.monotonic() - begin:.0f} s")
    return exit_code


def print_list(mutants: list[Mutant]) -> None:
    """Print the name, the file and the test of each mutant, and the number of mutants of each package."""
    for mutant in mutants:
        print(f"{mutant.name}\n    {mutant.file}\n    {mutant.test}")
    num_of_package = Counter(mutant.name.partition(":")[0] for mutant in mutants)
    print(f"{len(mutants)}: " + ", ".join(f"{package} {number}" for package, number in num_of_package.items()))


@contextlib.contextmanager
def copy_of_repository() -> Iterator[Path]:
    """Make a temporary folder with the files of the repository that git knows, or would add; delete it at the end.

    The compiled library of the kernels is copied, too, although git ignores it: tests of what uses it run as they do
    in the repository. All modules are compiled to bytecode that is valid as long as the source is the same, so a
    mutant is compiled anew.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    libraries = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "kernels").glob("electra_kernels/native/*.so")]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        for name in (*filter(None, listed.split("\0")), *map(str, libraries)):
            source = REPOSITORY / name
            if source.is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy / name)
        for compiled in COMPILED:
            compileall.compile_dir(
                copy / compiled, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
            )
        yield copy


@contextlib.contextmanager
def packages_imported() -> Iterator[None]:
    """Import the packages of others, and let the forks that are made in the `with` block share the memory of them."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # an optional package, or another version
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def verdict_of(copy: Path, mutant: Mutant) -> Verdict:
    """Apply one mutant to the copy, run its test, restore the file, and return the line of the table."""
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.original) != 1:
        detail = f"{mutant.file} does not have {mutant.original!r} exactly once; correct the entry"
        return Verdict(mutant.name, False, detail)
    begin = time.monotonic()
    path.write_text(text.replace(mutant.original, mutant.mutated))
    code, output = run_tests(copy, [mutant.test], limit_s=LIMIT_S)
    path.write_text(text)
    seconds = f"{time.monotonic() - begin:.1f} s"
    if code == TESTS_FAILED:
        return Verdict(mutant.name, True, f"{mutant.test.split('::')[0]} fails, {seconds}")
    if code == 0:
        return Verdict(mutant.name, False, f"survived {mutant.test}, {seconds}")
    return Verdict(mutant.name, False, f"pytest ended with {code}: {output[-200:]}")


def run_tests(copy: Path, tests: list[str], limit_s: float) -> tuple[int, str]:
    """Run tests of the copy on the code of the copy in a fork; return pytest's exit code and its output.

    Pytest stops at the first test that fails. If it takes longer than `limit_s`, it is killed, and the code is -9.
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            become_pytest(copy, tests, output)
        deadline = time.monotonic() + limit_s
        ended, status = os.waitpid(pid, os.WNOHANG)
        while ended == 0:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def become_pytest(copy: Path, tests: list[str], output: IO[bytes]) -> NoReturn:
    """Be a pytest of these tests in this forked process, with all modules of the project from the copy; never return.

    Its output goes to the file `output`.
    """
    code = 2
    try:
        os.setsid()
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.chdir(copy)
        paths = [str(copy), str(copy / "kernels"), str(copy / "launcher")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        own_folders = {REPOSITORY / name for name in ("", "kernels", "launcher", "tests", "tests/drills")}
        sys.path[:] = [*paths, *(path for path in sys.path if Path(path).resolve() not in own_folders)]
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]:
            del sys.modules[name]
        importlib.invalidate_caches()
        sys.argv[:] = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not cluster and not drill", *tests]
        code = int(pytest.main(sys.argv[1:]))
    except BaseException:  # noqa: BLE001  (a fork must not return into the drill)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

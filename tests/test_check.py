"""`make check` selects the tests that a change concerns, the nearest first, and stops when the time is up."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from support import until_time_is_up
from support.check import FAST, changed_files
from support.import_graph import ROOT
from support.related_tests import PROGRAMS, READ_ALL, select

pytest_plugins = ("pytester",)

TREE = {
    "electra_dist/store/retry.py": "",
    "electra_dist/store/client.py": "from electra_dist.store import retry\n",
    "electra_dist/report/page.py": 'STYLE = "page.css"\n',
    "electra_dist/report/page.css": "",
    "kernels/electra_kernels/native/library.c": "",
    "launcher/pretrain.py": "def main():\n    from electra_dist.store import client\n",
    "configs/small.yaml": "",
    "docs/results.md": "",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef pretrain():\n    return 'launcher/pretrain.py'\n",
    "tests/data/test_direct.py": "def test():\n    import electra_dist.store.retry\n",
    "tests/data/test_indirect.py": "from electra_dist.store import client\n",
    "tests/data/test_slow.py": "import pytest\nfrom support import runs\n\n@pytest.mark.multiproc\ndef test(): pass\n",
    "tests/data/test_other.py": "import os\n",
    "tests/kernels/test_library.py": "from electra_kernels.native import library\n",
    "tests/report/test_page.py": "from electra_dist.report.page import STYLE\n",
    "tests/store/test_beside.py": "",
    "tests/store/test_retry.py": "",
    "tests/support/runs.py": "from electra_dist.store import client\n",
    "tests/config/test_configs.py": "SMALL = 'configs/small.yaml'\nDOCS = ROOT / 'docs'\n",
    "tests/train/test_run.py": "def test(pretrain): pass\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project."""
    for file, text in TREE.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_nearest_tests_come_first_and_slow_ones_last(tree: Path) -> None:
    selected = select(tree, ["electra_dist/store/retry.py"])
    assert [(one.file, one.distance) for one in selected] == [
        ("tests/store/test_retry.py", 1),  # by its name
        ("tests/data/test_direct.py", 1),  # by an import inside a function
        ("tests/store/test_beside.py", 2),  # by its folder
        ("tests/data/test_indirect.py", 2),
        ("tests/data/test_slow.py", 3),
    ]
    assert selected[3].way == (
        "tests/data/test_indirect.py",
        "electra_dist/store/client.py",
        "electra_dist/store/retry.py",
    )


def test_a_fixture_that_starts_a_program_leads_to_its_modules(tree: Path) -> None:
    by_file = {one.file: one for one in select(tree, ["electra_dist/store/client.py"])}
    run = by_file["tests/train/test_run.py"]
    assert run.way == (
        "tests/train/test_run.py",
        "tests/conftest.py",
        "launcher/pretrain.py",
        "electra_dist/store/client.py",
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/data/test_other.py", [("tests/data/test_other.py", 0)]),
        ("configs/small.yaml", [("tests/config/test_configs.py", 1)]),
        ("docs/results.md", [("tests/config/test_configs.py", 2)]),  # by its folder
        ("electra_dist/report/page.css", [("tests/report/test_page.py", 2)]),
        ("kernels/electra_kernels/native/library.c", [("tests/kernels/test_library.py", 1)]),
        ("LICENSE", []),
    ],
)
def test_a_file_that_nothing_imports_is_found_by_its_name(
    tree: Path, changed: str, expected: list[tuple[str, int]]
) -> None:
    assert [(one.file, one.distance) for one in select(tree, [changed])] == expected


def test_a_changed_conftest_concerns_all_tests_of_its_folder(tree: Path) -> None:
    selected = select(tree, ["tests/conftest.py"])
    assert {one.file for one in selected} == {file for file in TREE if "/test_" in file}
    assert {one.distance for one in selected} == {1}


def test_a_deleted_module_and_a_file_with_wrong_syntax_select_what_imports_them(tree: Path) -> None:
    (tree / "electra_dist/store/client.py").write_text("def broken(:\n")
    assert select(tree, ["electra_dist/store/client.py"])[0].file == "tests/data/test_indirect.py"
    (tree / "electra_dist/store/retry.py").unlink()
    assert "tests/data/test_direct.py" in {one.file for one in select(tree, ["electra_dist/store/retry.py"])}


def test_changed_are_edited_deleted_and_new_files_that_git_does_not_ignore(tree: Path) -> None:
    (tree / ".gitignore").write_text("*.log\n")
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    assert changed_files(tree) == []
    (tree / "configs/small.yaml").write_text("seed: 1\n")
    (tree / "docs/results.md").unlink()
    (tree / "new file.py").touch()
    (tree / "run.log").touch()
    assert changed_files(tree) == ["configs/small.yaml", "docs/results.md", "new file.py"]


def test_in_this_repository_a_change_of_the_waits_selects_the_tests_of_the_store_first() -> None:
    selected = select(ROOT, ["electra_dist/store/patience.py"])
    assert selected[0].file.startswith("tests/store/test_")
    assert selected[0].distance == 1
    distances = {one.file: one.distance for one in selected}
    assert distances["tests/test_architecture.py"] == 2
    assert all(one.distance <= 3 for one in selected)
    assert len(set(distances)) == len(selected) > 20


def test_the_files_that_the_selection_names_exist() -> None:
    assert [file for file in (*FAST, *PROGRAMS.values(), *READ_ALL) if not (ROOT / file).is_file()] == []
    assert len(FAST) >= 25


SLOW = """
import time

def test_first():
    pass

def test_slow():
    time.sleep(0.6)

def test_last():
    pass
"""


STOPPED = """
import time

def test_that_takes_any_exception_for_a_failure():
    try:
        time.sleep(5.0)
    except BaseException as error:
        raise AssertionError from error
"""


def run_until(pytester: pytest.Pytester, seconds: float, *options: str) -> pytest.RunResult:
    """Run two files in this order, `test_z.py` first, with so many seconds."""
    pytester.makepyfile(test_z=SLOW, test_a="def test_a(): pass\n")
    until = time.monotonic() + seconds
    pytester.makepyfile(test_b="raise AssertionError('this file is not collected')\n")
    plugin = ["-p", "support.until_time_is_up", f"--until={until}", "--file=test_z.py", "--file=test_a.py"]
    return pytester.runpytest_inprocess(*plugin, "-v", *options)


def test_files_run_in_the_given_order_while_there_is_time(pytester: pytest.Pytester) -> None:
    result = run_until(pytester, 60.0)
    result.assert_outcomes(passed=4)
    names = [line.split()[0] for line in result.outlines if "PASSED" in line]
    assert names == ["test_z.py::test_first", "test_z.py::test_slow", "test_z.py::test_last", "test_a.py::test_a"]
    assert "time is up" not in result.stdout.str()


def test_when_the_time_is_up_no_test_begins_but_the_first(pytester: pytest.Pytester) -> None:
    result = run_until(pytester, 0.0)
    result.assert_outcomes(passed=1)
    assert "time is up: 3 tests of 2 files were not run or not finished; make test runs all" in result.outlines


@pytest.mark.real_start
def test_the_tests_that_a_worker_leaves_out_are_counted(pytester: pytest.Pytester) -> None:
    result = run_until(pytester, 0.0, "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    result.assert_outcomes(passed=1)
    assert "time is up: 3 tests of 2 files were not run or not finished; make test runs all" in result.outlines


def test_a_test_that_takes_too_long_is_stopped(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(until_time_is_up, "GRACE_S", 0.2)
    pytester.makepyfile(test_z=STOPPED, test_a="def test_a(): pass\n")
    options = ["-p", "support.until_time_is_up", f"--until={time.monotonic()}", "--file=test_z.py", "--file=test_a.py"]
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(skipped=1)
    assert "time is up: 2 tests of 2 files were not run or not finished; make test runs all" in result.outlines

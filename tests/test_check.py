"""`make check` selects the tests that a change concerns, the nearest first, and ends them when the time is up."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from support import check
from support.check import FAST, INTERRUPTED, NO_TESTS, ROOT, changed_files, run_nearest_first, run_tests, select

TREE = {
    "electra_dist/store/retry.py": "",
    "electra_dist/store/client.py": "from electra_dist.store import retry\n",
    "electra_dist/report/page.py": 'STYLE = "page.css"\n',
    "electra_dist/report/page.css": "",
    "kernels/electra_kernels/native/library.c": "",
    "launcher/pretrain.py": "def main():\n    from electra_dist.store import client\n",
    "configs/small.yaml": "",
    "docs/results.md": "",
    "tests/data/test_direct.py": "def test():\n    import electra_dist.store.retry\n",
    "tests/data/test_indirect.py": "from electra_dist.store import client\n",
    "tests/data/test_other.py": "import os\n",
    "tests/kernels/test_library.py": "from electra_kernels.native import library\n",
    "tests/report/test_page.py": "from electra_dist.report.page import STYLE\n",
    "tests/store/test_beside.py": "",
    "tests/store/test_a_slow.py": "import pytest\n\n@pytest.mark.multiproc\ndef test(): pass\n",
    "tests/store/test_retry.py": "",
    "tests/launcher/test_program.py": "PROGRAM = 'launcher/pretrain.py'\n",
    "tests/config/test_configs.py": "SMALL = 'configs/small.yaml'\n",
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
    assert list(select(tree, ["electra_dist/store/retry.py"]).items()) == [
        ("tests/data/test_direct.py", 1),  # by an import inside a function
        ("tests/store/test_retry.py", 1),  # by its name
        ("tests/store/test_beside.py", 2),  # by its folder
        ("tests/store/test_a_slow.py", 3),
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/data/test_other.py", {"tests/data/test_other.py": 0}),
        ("configs/small.yaml", {"tests/config/test_configs.py": 1}),
        ("launcher/pretrain.py", {"tests/launcher/test_program.py": 1}),
        ("electra_dist/store/client.py", {"tests/data/test_indirect.py": 1}),
        ("LICENSE", {}),
    ],
)
def test_a_test_that_names_a_file_or_imports_a_module_is_selected(
    tree: Path, changed: str, expected: dict[str, int]
) -> None:
    found = select(tree, [changed])
    assert {file: distance for file, distance in found.items() if distance < 2} == expected


def test_a_deleted_module_selects_what_imports_it(tree: Path) -> None:
    (tree / "electra_dist/store/retry.py").unlink()
    assert "tests/data/test_direct.py" in select(tree, ["electra_dist/store/retry.py"])


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


def test_in_this_repository_a_change_of_the_waits_selects_their_own_test_first() -> None:
    selected = select(ROOT, ["electra_dist/store/patience.py"])
    assert selected["tests/store/test_patience.py"] == 1
    assert len(selected) > 20


def test_the_files_of_the_fast_set_exist() -> None:
    assert [file for file in FAST if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("codes", "ran", "expected"),
    [
        ({}, ["c", "a", "b"], 0),
        ({"a": 1}, ["c", "a"], 1),
        ({"c": 1}, ["c"], 1),
        (dict.fromkeys("abc", NO_TESTS), ["c", "a", "b", FAST[0]], 0),
    ],
)
def test_the_nearest_files_run_first_until_one_fails_and_the_fast_set_where_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], ran: list[str], expected: int
) -> None:
    calls: list[str] = []

    def run(files: list[str], seconds: float) -> int:
        calls.append(files[0])
        return codes.get(files[0], 0)

    monkeypatch.setattr(check, "run_tests", run)
    assert run_nearest_first({"b": 2, "a": 1, "c": 0}, 60.0) == expected
    assert calls == ran


def test_a_changed_test_file_runs_however_little_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, float]] = []
    monkeypatch.setattr(check, "run_tests", lambda files, seconds: calls.append((files[0], seconds)) or 0)
    assert run_nearest_first({"c": 0, "a": 1}, 0.0) == 0
    assert calls == [("c", check.LONGEST_CHANGED_S)]


class _Tests:
    """Process of pytest that takes too long, and ends with a code once it is interrupted."""

    def __init__(self, code: int) -> None:
        self._code = code
        self.signals: list[int] = []

    def __enter__(self) -> _Tests:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> int:
        if timeout_s is not None:
            raise subprocess.TimeoutExpired("pytest", timeout_s)
        return self._code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize(("code", "expected"), [(INTERRUPTED, 0), (1, 1)])
def test_tests_are_interrupted_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, code: int, expected: int) -> None:
    tests = _Tests(code)
    monkeypatch.setattr(subprocess, "Popen", lambda command, cwd: tests)
    assert run_tests(["tests/test_architecture.py"], 0.5) == expected
    assert tests.signals == [signal.SIGINT]

"""A command that was asked to test something and tested nothing fails, and says why."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.nothing_tested import PACKAGES
from support.real_runs import REPOSITORY

pytest_plugins = ("pytester",)

INI = "[pytest]\naddopts = -m 'not cluster and not drill'\nmarkers =\n    cluster\n    drill\n"
SLURM = """
import pytest

@pytest.mark.cluster
@pytest.mark.parametrize("number", [1, 2])
def test_slurm(number):
    pytest.skip("not installed: sbatch (Debian packages slurm-wlm)")
"""
SSH = """
import pytest

@pytest.mark.cluster
def test_ssh():
    pass
"""
DRILLS = """
import pytest

@pytest.mark.drill
def test_disk():
    pytest.skip("mounting needs root")
"""
ORDINARY = """
import pytest

def test_gpu():
    pytest.skip("needs a CUDA device")
"""
ONE_GOOD_DRILL = """
import pytest

@pytest.mark.drill
def test_good():
    pass
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with skipped tests of each kind."""
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(test_slurm=SLURM, test_drills=DRILLS, test_ordinary=ORDINARY)
    return pytester


def run(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest with the plugin in this process, or with its own workers if the arguments ask for them."""
    return folder.runpytest_inprocess("-p", "support.nothing_tested", *arguments)


def error_lines(result: pytest.RunResult) -> list[str]:
    """Return the lines that begin with `error: `."""
    return [line for line in result.outlines if line.startswith("error: ")]


def test_skipped_cluster_tests_fail_and_name_the_packages(folder: pytest.Pytester) -> None:
    result = run(folder, "-m", "cluster")
    result.assert_outcomes(skipped=2, deselected=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert error_lines(result) == [
        "error: nothing was tested in test_slurm.py: not installed: sbatch (Debian packages slurm-wlm); "
        f"as root: apt-get install --no-install-recommends {PACKAGES}"
    ]


@pytest.mark.real_start
def test_they_fail_with_workers_too(folder: pytest.Pytester) -> None:
    result = run(folder, "-m", "cluster", "-n", "1")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert len(error_lines(result)) == 1


def test_a_cluster_file_that_is_skipped_fails_where_another_one_runs(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_ssh=SSH)
    result = run(folder, "-m", "cluster")
    result.assert_outcomes(passed=1, skipped=2, deselected=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "nothing was tested in test_slurm.py:" in error_lines(result)[0]


def test_drills_fail_only_if_all_of_them_are_skipped(folder: pytest.Pytester) -> None:
    result = run(folder, "-m", "drill")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert error_lines(result) == ["error: nothing was tested in test_drills.py: mounting needs root"]
    folder.makepyfile(test_good=ONE_GOOD_DRILL)
    result = run(folder, "-m", "drill")
    assert result.ret == pytest.ExitCode.OK
    assert error_lines(result) == []


def test_a_skipped_file_fails_only_if_the_call_names_it(folder: pytest.Pytester) -> None:
    for named in ("test_ordinary.py", "test_ordinary.py::test_gpu"):
        result = run(folder, named)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert error_lines(result) == ["error: nothing was tested in test_ordinary.py: needs a CUDA device"]
    assert run(folder).ret == pytest.ExitCode.OK


def test_a_failure_keeps_its_exit_code_and_a_call_without_tests_has_a_line(folder: pytest.Pytester) -> None:
    result = run(folder, "test_drills.py")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "need -m MARKER" in error_lines(result)[0]
    assert error_lines(run(folder, "--collect-only")) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("drills/s3_ways.py --ways dribble,redirect", "'dribble' is in the name of no case"),
        ("drills/s3_faults.py --faults 0", "--faults: must be at least 1"),
        ("drills/full_disks.py --only cashe", "'cashe' is in the name of no case"),
        ("drills/damages.py --count 0", "--count: must be at least 1"),
        ("drills/chaos_drill.py --count 0", "--count: must be at least 1"),
        ("fuzz/campaign.py --file no-such-file", "no file with 'no-such-file'"),
        ("fuzz/campaign.py --reader no-such-reader", "'no-such-reader' in its name"),
        ("fuzz/campaign.py --cases 0 --processes 0", "no case is asked for"),
    ],
)
def test_a_drill_without_a_case_is_refused_before_it_begins(command: str, message: str) -> None:
    script, *arguments = command.split()
    program = [sys.executable, str(REPOSITORY / "tests" / script)]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr

"""A plugin of pytest: a call that asks for certain tests and tests nothing fails, and says what to install.

The tests with the marker `cluster`, `drill` or `sample` run only if a call asks for them. Where a program, root or a
device is missing they are skipped, and pytest would end with 0. These calls end with 1 instead, and with one line:

- one that selects only tests with these markers, and skips all of them;
- one that selects only such tests, and skips every `cluster` test of a file: Slurm may be missing where ssh is not;
- one that names a test file, and skips all tests of it.

A call that selects no test at all ends with pytest's own exit code 5, and with a line, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Sequence

import pytest

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common slurm-wlm munge pdsh openssh-server iproute2 nftables"
MARKERS = {"cluster", "drill", "sample"}
RAN = ("passed", "failed", "error", "xfailed", "xpassed")  # what pytest's report calls tests that were not skipped


def files_without_a_test(
    ran: Sequence[pytest.TestReport], skipped: Sequence[pytest.TestReport], named: Collection[str]
) -> dict[str, set[str]]:
    """Return the files that were asked for and of which nothing was tested, with the reasons of their skips.

    `ran` are the reports of the tests that were not skipped. `named` are the files that the command line names, or of
    which it names a test.
    """
    tested = {_file(report) for report in ran}
    are_all_marked = all(MARKERS & report.keywords.keys() for report in [*ran, *skipped])
    found: dict[str, set[str]] = defaultdict(set)
    for report in skipped:
        is_asked = are_all_marked and (not ran or "cluster" in report.keywords)
        if _file(report) not in tested and (is_asked or _file(report) in named):
            found[_file(report)].add(_reason(report))
    return found


def _file(report: pytest.TestReport) -> str:
    """Return the path of a test's file below the root folder."""
    return report.nodeid.partition("::")[0]


def _reason(report: pytest.TestReport) -> str:
    """Return the reason of a skip without pytest's first word."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _named_files(config: pytest.Config) -> set[str]:
    """Return the files that the command line names, or of which it names a test, by their paths below the root."""
    names = [name.partition("::")[0] for name in config.args]
    paths = [(config.invocation_params.dir / name).resolve() for name in names if name.endswith(".py")]
    return {path.relative_to(config.rootpath).as_posix() for path in paths if path.is_relative_to(config.rootpath)}


def _error_line(config: pytest.Config) -> str:
    """Return the line for a call that has tested nothing of what it was asked for; otherwise an empty text."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return ""
    ran = [report for kind in RAN for report in reporter.stats.get(kind, []) if isinstance(report, pytest.TestReport)]
    skipped = [report for report in reporter.stats.get("skipped", []) if isinstance(report, pytest.TestReport)]
    found = files_without_a_test(ran, skipped, _named_files(config))
    if not found:
        return ""
    reasons = sorted(set().union(*found.values()))
    line = f"error: nothing was tested in {', '.join(sorted(found))}: {'; '.join(reasons)}"
    if any(part.startswith("not installed:") for reason in reasons for part in reason.split("; ")):
        line += f"; as root: apt-get install --no-install-recommends {PACKAGES}"
    return line


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn the exit code 0 of a call that has tested nothing into 1."""
    if session.exitstatus == pytest.ExitCode.OK and _error_line(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> Generator[None]:
    """Print the line after the summary of pytest."""
    yield
    line = _error_line(config)
    if not line and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        line = "error: no test was selected; the markers cluster, drill and sample need -m MARKER"
    if line:
        terminalreporter.write_line(line, red=True)

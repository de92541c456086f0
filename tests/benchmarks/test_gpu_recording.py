"""What becomes of a case that fails, that does not fit into the time, or that costs the process its GPU."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu
import pytest
import torch
from gpu_parts import recording
from gpu_parts.recording import Case, DeviceLost, Recorder, Rows, is_failure_of_ours


def _passing(operation: str, by: str = "ours") -> Case:
    return Case(operation, by, "check", lambda: [{"operation": operation, "by": by, "ms": 1.0}])


def _failing(error: Exception, by: str = "ours") -> Case:
    def run() -> Rows:
        raise error

    return Case(f"fails with {type(error).__name__}", by, "check", run)


def test_a_failed_case_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    recorder = Recorder({}, tmp_path / "gpu.json", None)
    subjects = [
        _failing(KeyError("any type of exception"), by="rival"),
        _failing(torch.OutOfMemoryError("CUDA out of memory")),
        _failing(SystemError("no message is lost\nsecond line")),
        _passing("the last"),
    ]
    recorder.run_part("part", lambda: iter(subjects))
    rows = json.loads((tmp_path / "gpu.json").read_text())["part"]
    assert [row.get("failed") for row in rows] == [
        "KeyError: 'any type of exception'",
        "out of memory",
        "SystemError: no message is lost",
        None,
    ]
    assert [is_failure_of_ours(row) for row in rows] == [False, False, True, False]


def test_a_part_that_cannot_begin_is_a_row(tmp_path: Path) -> None:
    def cases() -> Iterator[Case]:
        yield _passing("first")
        raise ImportError("no module")

    recorder = Recorder({}, None, None)
    recorder.run_part("part", cases)
    assert [row.get("failed") for row in recorder.record["part"]] == [None, "ImportError: no module"]
    assert any(is_failure_of_ours(row) for row in recorder.rows())


def test_the_file_is_whole_after_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    seen = []

    def look() -> Rows:
        seen.append(len(json.loads(path.read_text())["part"]))
        return [{"operation": "look", "by": "ours"}]

    recorder = Recorder({}, path, None)
    recorder.run_part("part", lambda: iter([_passing("a"), Case("b", "ours", "check", look), _passing("c")]))
    assert seen == [1]
    whole = path.read_text()
    # A process that ends while it writes leaves the file as it was.
    monkeypatch.setattr(recording.json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recorder.run_part("part", lambda: iter([_passing("d")]))
    assert path.read_text() == whole


def test_a_case_that_no_longer_fits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: clock[0])

    def case(name: str, kind: str, seconds: float) -> Case:
        def run() -> Rows:
            clock[0] += seconds
            return [{"operation": name, "by": "ours"}]

        return Case(name, "ours", kind, run)

    recorder = Recorder({}, None, 100)
    subjects = [
        case("guessed at 15 s, takes 50", "step", 50),
        case("guessed at 60 s", "compiled step", 1),
        case("guessed at 10 s, takes 5", "check", 5),
        case("as long as the first", "step", 1),
        case("short", "check", 5),
    ]
    recorder.run_part("part", lambda: iter(subjects))
    skipped = {row["operation"]: row.get("skipped") for row in recorder.record["part"]}
    assert skipped == {
        "guessed at 15 s, takes 50": None,
        "guessed at 60 s": "it takes about 60 s and 50 s are left",
        "guessed at 10 s, takes 5": None,
        "as long as the first": "it takes about 50 s and 45 s are left",
        "short": None,
    }
    assert not any(is_failure_of_ours(row) for row in recorder.rows())


def test_a_lost_gpu_ends_the_process_and_another_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    lost = _failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    subjects = [_passing("first"), lost, _passing("last")]
    recorder = Recorder({}, path, None)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        recorder.run_part("part", lambda: iter(subjects))
    second = Recorder(json.loads(path.read_text()), path, None)
    second.run_part("part", lambda: iter(subjects))
    rows = json.loads(path.read_text())["part"]
    assert [row["operation"] for row in rows] == ["first", "fails with RuntimeError", "last"]


def test_the_next_process_gets_the_options_the_file_and_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "9", "--parts", "heads,fusions"])
    recorder = Recorder({}, tmp_path / "gpu.json", 120)
    gpu._start_again(recorder)
    *command, minutes = started[0]
    assert command[2:] == ["--resume", str(tmp_path / "gpu.json"), "--parts", "heads,fusions", "--minutes"]
    assert 1.9 < float(minutes) <= 2


@pytest.mark.parametrize(
    ("by", "facts", "ends_with"),
    [
        ("rival", {"right": False}, None),
        ("rival", {"failed": "RuntimeError: refused"}, None),
        ("ours", {"failed": "out of memory"}, None),
        ("ours", {"skipped": "no time"}, None),
        ("ours", {"right": False}, "is wrong"),
        ("ours (triton)", {"failed": "RuntimeError: refused"}, "raised an error"),
    ],
)
def test_only_what_is_ours_fails_the_run(
    by: str, facts: dict, ends_with: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke"])
    ran = []

    def cases() -> Iterator[Case]:
        yield Case("first", by, "check", lambda: [{"operation": "first", "by": by, **facts}])
        yield Case("second", by, "check", lambda: ran.append("second") or [])

    monkeypatch.setattr(gpu, "PARTS", {"part": ()})
    monkeypatch.setattr(gpu, "cases_of", lambda *_: cases())
    if ends_with is None:
        gpu.main()
    else:
        with pytest.raises(SystemExit, match=ends_with):
            gpu.main()
    assert ran == ["second"]


def test_no_compiled_case_becomes_eager() -> None:
    """torch compiles a function a limited number of times and then runs it eagerly, without an error."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def case(size: int) -> Case:
        def run() -> Rows:
            torch.compile(double, backend=backend, dynamic=False)(torch.ones(size))
            return [{"operation": str(size), "by": "ours"}]

        return Case(str(size), "ours", "compiled step", run)

    with torch._dynamo.config.patch(recompile_limit=2):
        Recorder({}, None, None).run_part("part", lambda: (case(size) for size in range(2, 8)))

    assert len(compiled) == 6

"""The records of failed starts, and the account of a run's last end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.run_records import ledger_event

from electra_dist.run.failures import Failure, account_of_end, newest_failure, read_failures, record_failure

EARLY, LATE = "2025-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"


def failure(**fields: Any) -> Failure:
    """Return a device-side assert of rank 3 at step 7; `fields` replace the defaults."""
    known = {"time": LATE, "start": "s", "node": "node7", "rank": 3, "code": 1, "error": "device-assert", "step": 7}
    return Failure(**{**known, **fields})


def test_failures_of_all_nodes_are_read_in_order_of_time(tmp_path: Path) -> None:
    late = failure(positions=[56, 63], line="a\x1bb\ud800".encode(errors="replace").decode())
    record_failure(tmp_path, 0, late, {3: "last words\n"})
    record_failure(tmp_path, 1, failure(time=EARLY, rank=8), {})
    assert [one.rank for one in read_failures(tmp_path)] == [8, 3]
    assert read_failures(tmp_path)[1] == late
    assert (tmp_path / "failures" / "rank-00003.txt").read_text() == "last words\n"
    assert read_failures(tmp_path / "none") == []


def test_of_the_newest_start_the_node_that_failed_first_explains_it() -> None:
    old, peer, cause = failure(start="r"), failure(error="peer-abort", rank=0), failure(error="ecc", rank=9)
    assert newest_failure([old, peer, cause]) == cause
    assert newest_failure([old, peer]) == peer
    assert newest_failure([]) is None


def test_the_account_names_rank_node_fault_step_and_the_decision() -> None:
    assert failure().description == "rank 3 on node7: CUDA error, device-side assert, at step 7"
    assert failure(repeated=True).description == (
        "rank 3 on node7: CUDA error, device-side assert, at step 7: the same step on the same rows as before: code, "
        "not node; not restarted a second time"
    )
    assert failure(step=None, error="import").description.endswith("cannot be imported, before its first step")


def test_the_account_of_the_last_end_is_that_of_the_newer_record(tmp_path: Path) -> None:
    events = [ledger_event("start", 0), ledger_event("crash", 7, why="RuntimeError")]
    known = account_of_end(tmp_path, events, [failure(positions=[56, 63])])
    assert (known["state"], known["class"], known["rows"], known["restart"]) == (
        "failed",
        "device-assert",
        [56, 63],
        "as it is",
    )
    final = account_of_end(tmp_path, events, [failure(repeated=True)])
    assert final["restart"] == "never" and "train.skip_steps=[7]" in final["next"][-1]
    missing = account_of_end(tmp_path, events, [failure(repeated=True, error="import")])
    assert missing["restart"] == "never" and "skip_steps" not in missing["next"][-1]
    elsewhere = account_of_end(tmp_path, events, [failure(error="ecc")])
    assert elsewhere["restart"] == "elsewhere" and "strikes.jsonl" in elsewhere["next"][-1]
    stopped = account_of_end(tmp_path, [*events, ledger_event("stop", 9, why="SIGTERM")], [failure(time=EARLY)])
    assert (stopped["state"], stopped["what"]) == ("stopped", "stop at step 9: SIGTERM")
    full = account_of_end(tmp_path, [ledger_event("storage", 9, why="/runs/a: disk full")], [])
    assert (full["state"], full["class"], full["restart"]) == ("stopped", "storage-away", "as it is")
    quota = account_of_end(tmp_path, [ledger_event("storage", 9, why="/runs/a: disk full (quota); free space")], [])
    assert (quota["class"], quota["fault"], quota["restart"]) == ("disk-quota", "user", "as it is")
    bucket_full = "s3://b/x: the storage is full or over its quota (QuotaExceeded); free space"
    assert account_of_end(tmp_path, [ledger_event("storage", 9, why=bucket_full)], [])["class"] == "disk-quota"
    without_supervisor = account_of_end(tmp_path, events, [])
    assert (without_supervisor["state"], without_supervisor["what"]) == ("crash", "crash at step 7: RuntimeError")
    runs = account_of_end(tmp_path, [ledger_event("resume", 7)], [failure(time=EARLY)])
    assert runs["state"] == account_of_end(tmp_path, [], [])["state"] == "running or killed"


def test_a_crash_that_no_supervisor_saw_is_not_explained_by_an_earlier_failure(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    events = [ledger_event("start", 0), ledger_event("crash", 9, why="OutOfMemoryError")]
    known = account_of_end(run, events, [failure(time=EARLY)])
    assert (known["state"], known["what"]) == ("crash", "crash at step 9: OutOfMemoryError")
    assert known["next"] == [f"electra-dist status '{run}'"]
    before_its_start = account_of_end(run, [], [failure(time=EARLY, step=None)])
    assert before_its_start["state"] == "failed"

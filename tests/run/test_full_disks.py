"""Files of the run folder on a disk that refuses writes: nothing is lost that a restart needs, and nothing raises."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
from support.run_records import EVAL, STEP

from electra_dist.errors import StoreAway, StoreError
from electra_dist.run.heartbeat import Heartbeat, read_heartbeats
from electra_dist.run.ledger import Ledger, read_ledger
from electra_dist.run.log_lines import Console
from electra_dist.run.metrics import MetricsWriter, read_metrics
from electra_dist.run.records import JsonlFile, read_records
from electra_dist.store.patience import Patience


class Disk:
    """Disk on which so many bytes can still be written, or on which each sync fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 10**9
        self.error = errno.ENOSPC
        self.can_sync = True
        self._write, self._pwrite, self._fsync = os.write, os.pwrite, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def write(self, descriptor: int, data: bytes) -> int:
        num_written = min(len(data), self.free_bytes)
        if num_written == 0:
            raise OSError(self.error, os.strerror(self.error))
        self.free_bytes -= num_written
        return self._write(descriptor, data[:num_written])

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.free_bytes == 0:
            raise OSError(self.error, os.strerror(self.error))
        return self._pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        if not self.can_sync:
            raise OSError(self.error, os.strerror(self.error))
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_records_that_a_full_disk_refuses_are_written_later_in_their_order(disk: Disk, tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append({"step": 0})
    disk.free_bytes = 5  # less than a record: half a line reaches the disk
    for step in (1, 2):
        with pytest.raises(StoreAway, match=r"a\.jsonl: disk full; free space there"):
            file.append({"step": step})
    assert (tmp_path / "a.jsonl").read_bytes().endswith(b"}\n")
    disk.free_bytes = 10**9
    file.append({"step": 3})
    file.close()
    assert [record["step"] for record in read_records(file.path, dict)] == [0, 1, 2, 3]


def test_a_disk_that_goes_away_after_a_replacement_loses_no_record_and_refuses_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records are replaced, but the disk goes away before the new file is open for the next record."""
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append({"step": 0})
    open_file = os.open
    is_away = True

    def refuse_appending(path: Path, flags: int, *args: int, **kwargs: int) -> int:
        if is_away and flags & os.O_APPEND:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_appending)
    for step in (1, 2):
        file.replace([{"step": step}])
    with pytest.raises(StoreAway, match=r"a\.jsonl: "):
        file.append({"step": 3})
    is_away = False
    file.append({"step": 4})
    file.close()

    assert [record["step"] for record in read_records(file.path, dict)] == [2, 3, 4]


def test_records_whose_sync_failed_are_written_again(disk: Disk, tmp_path: Path) -> None:
    """A kernel drops what it could not write, and a second sync of the same bytes would succeed without them."""
    file = JsonlFile(tmp_path / "a.jsonl")
    file.append({"step": 0})
    file.sync()
    file.append({"step": 1})
    disk.can_sync = False
    with pytest.raises(StoreAway):
        file.sync()
    os.truncate(file.path, 12)  # the kernel has dropped the second record
    disk.can_sync = True
    file.sync()
    file.close()
    assert [record["step"] for record in read_records(file.path, dict)] == [0, 1]


def test_a_file_that_was_closed_on_a_full_disk_can_be_closed_again(disk: Disk, tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "a.jsonl")
    disk.free_bytes = 0
    with pytest.raises(StoreAway):
        file.append({"step": 0})
    with pytest.raises(StoreAway):
        file.close()
    disk.free_bytes = 10**9
    file.close()
    assert list(read_records(file.path, dict)) == [{"step": 0}]


def test_an_event_that_the_disk_refuses_is_in_the_ledger_after_the_next_sync(disk: Disk, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    disk.free_bytes = 0
    disk.error = errno.EROFS
    with pytest.raises(StoreAway, match="read-only file system"):
        ledger.append("checkpoint", 5)
    assert read_ledger(tmp_path) == []
    disk.free_bytes = 10**9
    ledger.sync()
    ledger.append("done", 6)
    ledger.close()
    assert [(event.event, event.step) for event in read_ledger(tmp_path)] == [("checkpoint", 5), ("done", 6)]


def test_metrics_and_ledger_wait_for_the_disk_when_they_are_synced_and_closed_unless_told_not_to(
    disk: Disk, tmp_path: Path
) -> None:
    patience = Patience(60.0, note=lambda line: None)
    waits = []

    def free_space(reason: str) -> None:
        if reason:
            waits.append(reason)
            disk.free_bytes = 10**9

    patience.reporter.on_wait = free_space
    ledger = Ledger(tmp_path, patience)
    metrics = MetricsWriter(tmp_path, patience=patience)
    for step, ends in ((1, (metrics.sync, ledger.sync)), (2, (metrics.close, ledger.close))):
        disk.free_bytes = 0
        metrics.write(STEP.model_copy(update={"step": step}))
        ledger.append_soon("checkpoint", step)
        if step == 2:
            for file in (metrics, ledger):
                with pytest.raises(StoreAway):
                    file.close(waits=False)
            assert len(waits) == 2
        for end in ends:
            disk.free_bytes = 0
            end()
    assert len(waits) == 4
    assert [event.step for event in read_ledger(tmp_path)] == [1, 2]
    assert [record.step for record in read_metrics(tmp_path)] == [1, 2]


def test_metrics_are_complete_after_the_disk_had_no_space_and_are_noted_once(disk: Disk, tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(STEP.model_copy(update={"step": 1}))
    disk.free_bytes = 100
    for step in (2, 3, 4):
        writer.write(STEP.model_copy(update={"step": step}))
    (problem,) = writer.problems()
    assert "metrics.jsonl: disk full" in problem and writer.problems() == []
    with pytest.raises(StoreAway):
        writer.sync()
    disk.free_bytes = 10**9
    writer.write(EVAL.model_copy(update={"step": 4}))
    writer.close()
    records = [(record.kind, record.step) for record in read_metrics(tmp_path)]
    assert records == [("train", 1), ("train", 2), ("train", 3), ("train", 4), ("eval", 4)]


def test_tensorboard_is_dropped_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def refuse(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = MetricsWriter(tmp_path, tensorboard={})
    writer.write(STEP.model_copy(update={"step": 1}))
    monkeypatch.setattr(RecordWriter, "write", refuse)
    for step in range(2, 40):
        writer.write(STEP.model_copy(update={"step": step}))
    writer.flush_tensorboard()
    problems = writer.problems()
    for step in range(40, 60):
        writer.write(STEP.model_copy(update={"step": step}))
    writer.close()
    assert len(problems) == 1 and "disk full; TensorBoard gets no more records" in problems[0]
    assert writer.problems() == []
    assert len(read_metrics(tmp_path)) == 59


def test_lines_that_the_disk_refuses_are_missing_from_the_log_and_counted(tmp_path: Path) -> None:
    """The log is on a full disk: /dev/full refuses each write; then it is the real file again."""
    stream = io.StringIO()
    console = Console(tmp_path, total_steps=9, start_step=0, stream=stream)
    log = console._log
    console.note("one")
    with open("/dev/full", "ab", buffering=0) as full:
        console._log = full
        console.note("two")
        console.note("three")
    console._log = log
    console.note("four")
    console.close()
    lines = [line.split("  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == ["one", "2 lines are missing above, because the disk refused them", "four"]
    assert stream.getvalue().splitlines() == ["one", "two", "three", "four"]


def test_a_console_whose_stdout_is_on_a_full_disk_goes_on(tmp_path: Path) -> None:
    with open("/dev/full", "w") as stdout:
        console = Console(tmp_path, total_steps=9, start_step=0, stream=stdout)
        console.note("one")
        console.note("two")
        console.close()
        with pytest.raises(OSError, match="No space"):
            stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # so that closing it succeeds
    assert "two" in (tmp_path / "log.txt").read_text()


def test_a_heartbeat_that_the_disk_refuses_changes_nothing(disk: Disk, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 0, attempt=1)
    heartbeat.beat("step", 1)
    disk.free_bytes = 0
    heartbeat.beat("step", 2)
    assert read_heartbeats(tmp_path)[0].step == 1
    disk.free_bytes = 10**9
    heartbeat.beat("storage", 3, 'RUN/metrics.jsonl: "disk" full\n' + 300 * "x")
    (beat,) = read_heartbeats(tmp_path)
    assert (beat.phase, beat.step) == ("storage", 3)
    assert beat.reason.startswith("RUN/metrics.jsonl: ?disk? full?xxx") and len(beat.reason) == 160
    disk.free_bytes = 0
    disk.error = errno.EACCES
    with pytest.raises(StoreError, match="not writable"):
        heartbeat.beat("step", 4)

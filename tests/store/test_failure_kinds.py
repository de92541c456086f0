"""The table of storage failures, and the errors that follow from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from electra_dist.errors import StoreAway, StoreError, StoreExhausted, StoreMissing, UserError
from electra_dist.store.atomic_files import readable, writable
from electra_dist.store.failure_kinds import FailureKind, is_worth_waiting_for, kind_of_error, safe_code
from electra_dist.store.open_store import LocalStore

AWAY = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN]
USER = [errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EMFILE, errno.ENAMETOOLONG]


def test_errors_have_the_kind_that_decides_what_follows() -> None:
    kinds = {number: kind_of_error(OSError(number, os.strerror(number))) for number in AWAY + USER}
    assert [kinds[number] for number in AWAY] == [FailureKind.AWAY] * len(AWAY)
    assert [kinds[number] for number in USER] == [FailureKind.USER] * len(USER)
    assert kind_of_error(OSError("no number")) is FailureKind.PERMANENT
    assert kind_of_error(RuntimeError("bug")) is FailureKind.PERMANENT
    assert kind_of_error(StoreExhausted("x")) is kind_of_error(StoreAway("x")) is FailureKind.AWAY
    assert kind_of_error(StoreMissing("x")) is kind_of_error(UserError("x")) is FailureKind.USER
    assert is_worth_waiting_for(OSError(errno.EINTR, "")) and not is_worth_waiting_for(StoreError("x"))


@pytest.mark.parametrize("convert", [readable, writable])
def test_a_file_that_is_away_is_told_from_one_that_the_user_must_correct(convert, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for number in AWAY:
        with pytest.raises(StoreAway, match=f"{tmp_path}/x: "), convert(tmp_path / "x"):
            raise OSError(number, os.strerror(number))
    with pytest.raises(StoreError) as refused, convert(tmp_path / "x"):
        raise OSError(errno.EMFILE, "")
    assert not isinstance(refused.value, StoreAway)


def test_a_folder_that_does_not_respond_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint folder that seems empty would begin the run again at step 0."""
    store = LocalStore(tmp_path)
    store.write("step-1/a", b"x")
    assert store.list("step-") == ["step-1/a"] and store.list("none/") == []
    scandir = os.scandir

    def away(path: str) -> object:
        if Path(path).name == "step-1":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", away)
    with pytest.raises(StoreAway, match="step-1: input/output error; check the disk"):
        store.list("step-")


@pytest.mark.parametrize("code", ["", "AKIA/secret+key=", "two words", "SlowDown\n", "a" * 41, "Schlüssel"])
def test_an_error_code_that_could_hold_a_secret_is_not_quoted(code: str) -> None:
    """A service or a proxy in front of it may answer with any text, such as a part of the request."""
    assert safe_code(code) == "unknown code"
    assert [safe_code(known) for known in ("SlowDown", "404", "a" * 40)] == ["SlowDown", "404", "a" * 40]

"""`electra-dist verify --bytes` reads all bytes of a corpus and names every file that is not what it should be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from support.real_runs import write_corpus
from typer.testing import CliRunner

from electra_dist.errors import EXIT_USER_ERROR, UserError


def verify(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and error line of `electra-dist verify --bytes ARGUMENTS`."""
    result = CliRunner().invoke(app, ["verify", "--bytes", *arguments])
    if isinstance(result.exception, UserError):
        return EXIT_USER_ERROR, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, ""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of three shards with a held-out corpus of one."""
    write_corpus(str(tmp_path / "corpus"), [20, 30, 10])
    write_corpus(str(tmp_path / "corpus" / "heldout"), [20], seed=9)
    return tmp_path / "corpus"


def flip(path: Path) -> None:
    """Flip the lowest bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_good_corpus_is_counted_and_ends_with_0(corpus: Path) -> None:
    code, output, _ = verify(str(corpus))
    assert code == 0
    assert "read 2 corpus manifests, 2 vocabulary files, 4 shards" in output
    assert output.rstrip().endswith("all good")
    code, output, _ = verify(str(corpus), "--json")
    found = json.loads(output)
    assert (code, found["good"], found["bad"]) == (0, True, [])
    assert found["bytes"] == sum(path.stat().st_size for path in corpus.rglob("*.tar"))


def test_every_bad_file_is_named(corpus: Path) -> None:
    flip(corpus / "shard-000001.tar")
    (corpus / "shard-000002.tar").unlink()
    os.truncate(corpus / "heldout" / "shard-000000.tar", 700)
    flip(corpus / "vocab.txt")
    code, output, error = verify(str(corpus))
    bad = [line for line in output.splitlines() if line.startswith("BAD: ")]
    assert code == 78
    names = ("vocab.txt", "shard-000001.tar", "shard-000002.tar", "heldout/shard-000000.tar")
    assert [line.partition(": ")[2].partition(": ")[0] for line in bad] == [f"{corpus}/{name}" for name in names]
    assert "4 of them bad" in output
    assert error.startswith(f"{corpus}: 4 of 8 files or checkpoints are bad; restore those")
    code, output, _ = verify(str(corpus), "--json")
    found = json.loads(output)
    assert code == 78
    assert [part["url"] for part in found["bad"]] == [f"{corpus}/{name}" for name in names]


def test_a_damaged_manifest_is_one_bad_file_and_another_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    (corpus / "heldout" / "corpus.json").write_text("{")
    code, output, _ = verify(str(corpus))
    assert code == 78
    assert f"BAD: {corpus}/heldout/corpus.json: " in output
    (tmp_path / "empty").mkdir()
    code, _, error = verify(str(tmp_path / "empty"))
    assert code == 78
    assert re.search(r"neither a run .* nor a finished corpus", error)


def test_a_lost_vocabulary_is_named_once_with_the_way_to_restore_it(corpus: Path) -> None:
    (corpus / "vocab.txt").unlink()
    _, output, _ = verify(str(corpus))
    (line,) = [line for line in output.splitlines() if line.startswith("BAD: ")]
    assert line.startswith(f"BAD: {corpus}/vocab.txt: no such file; restore the file from a backup or from a run")

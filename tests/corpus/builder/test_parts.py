"""Parts of a corpus build: any number of them, in any order, killed or not, give the corpus of one build."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpus_texts import BUILD_CONFIG
from support.folder_contents import finished_files

from electra_dist.corpus.builder.build_corpus import Part, build_corpus, build_part, parse_part
from electra_dist.corpus.builder.build_records import BuildRecords
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts, take_joined
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.tokenizer import Vocabulary

RequestFactory = Callable[..., BuildRequest]
COMMAND = [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "corpus"]


@pytest.fixture
def inputs(prose: Callable[[int, int], list[str]], jsonl_file: Callable[..., Path]) -> list[Path]:
    """Five files of 20 to 60 documents: more than one group of inputs."""
    return [jsonl_file(prose(20 + 10 * number, number), f"{number}.jsonl") for number in range(5)]


@pytest.fixture
def whole(build_request: RequestFactory, inputs: list[Path]) -> BuildRequest:
    """The request of a finished corpus that was built at once; it has held-out rows."""
    request = build_request(inputs, "whole", heldout_fraction=0.1)
    build_corpus(request)
    return request


@pytest.mark.parametrize("order", [(1,), (2, 1), (3, 1, 2), (4, 2, 3, 1)])
def test_any_number_of_parts_in_any_order_gives_the_corpus_of_one_build(
    whole: BuildRequest, tmp_path: Path, order: tuple[int, ...]
) -> None:
    request = dataclasses.replace(whole, output=str(tmp_path / "parts"))

    for number in order:
        build_part(request, Part(number, len(order)))
    result = join_parts(request.output, None)

    assert not result.was_finished
    assert finished_files(Path(request.output)) == finished_files(Path(whole.output))


def test_a_missing_part_is_reported_and_nothing_is_written(whole: BuildRequest, tmp_path: Path) -> None:
    request = dataclasses.replace(whole, output=str(tmp_path / "parts"))
    build_part(request, Part(1, 3))
    build_part(request, Part(3, 3))
    before = finished_files(Path(request.output))

    with pytest.raises(UserError, match=r"buckets have no shards yet .*finished parts: 1/3, 3/3"):
        join_parts(request.output, None)

    assert finished_files(Path(request.output)) == before
    build_part(request, Part(2, 3))
    join_parts(request.output, None)
    assert finished_files(Path(request.output)) == finished_files(Path(whole.output))


def test_a_part_with_another_vocabulary_or_other_settings_is_refused(whole: BuildRequest, tmp_path: Path) -> None:
    request = dataclasses.replace(whole, output=str(tmp_path / "parts"))
    build_part(request, Part(1, 2))
    other_vocabulary = Vocabulary(whole.vocabulary.text + "more\n", "other")

    with pytest.raises(ManifestMismatch, match="with tokenizer = "):
        build_part(dataclasses.replace(request, vocabulary=other_vocabulary), Part(2, 2))
    with pytest.raises(ManifestMismatch, match="with seed = "):
        build_part(dataclasses.replace(request, seed=9), Part(2, 2))


def test_records_that_a_killed_merge_has_left_are_deleted_by_the_next_one(
    whole: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = dataclasses.replace(whole, output=str(tmp_path / "parts"))
    build_part(request, Part(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(BuildRecords, "clear", lambda records: None)  # killed after corpus.json
        join_parts(request.output, None)
    assert (tmp_path / "parts" / "progress" / "build.json").exists()

    merged = take_joined(request.output, None)

    assert merged.was_finished and merged.manifest == take_joined(whole.output, None).manifest
    assert finished_files(Path(request.output)) == finished_files(Path(whole.output))


def test_a_folder_without_a_build_cannot_be_merged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no unfinished build"):
        join_parts(str(tmp_path), None)


@pytest.mark.parametrize("text", ["2", "0/4", "5/4", "a/b", "1/0", "/", "1/4/2", "-1/4"])
def test_a_part_that_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give the number of the part and the number of parts"):
        parse_part(text)


def test_parts_that_run_at_once_and_are_killed_give_the_corpus_of_one_build(
    inputs: list[Path], vocab_file: Path, tmp_path: Path
) -> None:
    """Two real processes work at the same time; one is killed with SIGKILL and started again."""
    config = tmp_path / "config.yaml"
    config.write_text(BUILD_CONFIG.format(vocab_size=len(vocab_file.read_text().splitlines())))
    options = ["--vocab", str(vocab_file), "--config", str(config), "--workers", "1"]
    options += list(itertools.chain.from_iterable(["--input", str(path)] for path in inputs))
    subprocess.run([*COMMAND, "build", *options, "--output", str(tmp_path / "once")], check=True, capture_output=True)
    parts = [*COMMAND, "build", *options, "--output", str(tmp_path / "parts"), "--part"]

    first = subprocess.Popen([*parts, "1/2"], stdout=subprocess.DEVNULL)
    second = subprocess.Popen([*parts, "2/2"], stdout=subprocess.DEVNULL)
    while second.poll() is None and not list((tmp_path / "parts").glob("progress/buckets/*.json")):
        time.sleep(0.01)
    second.kill()
    second.wait()
    assert first.wait() == 0
    again = subprocess.run([*parts, "2/2"], check=True, capture_output=True, text=True)
    subprocess.run([*COMMAND, "merge", str(tmp_path / "parts")], check=True, capture_output=True)

    assert "part 2/2 is finished" in again.stdout
    assert finished_files(tmp_path / "parts") == finished_files(tmp_path / "once")


def test_a_part_without_a_vocabulary_is_refused(inputs: list[Path], vocab_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(BUILD_CONFIG.format(vocab_size=len(vocab_file.read_text().splitlines())))
    options = ["--input", str(inputs[0]), "--config", str(config), "--output", str(tmp_path / "out")]

    refused = subprocess.run([*COMMAND, "build", *options, "--part", "1/2"], capture_output=True, text=True)

    assert refused.returncode == 78
    assert "each part would train one" in refused.stderr
    assert refused.stderr.count("\n") == 1

"""A leg of the experiment for one GPU: what it unpacks, when it stops, what it scores, and what it returns."""

import argparse
import io
import os
import tarfile
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from gpu_train_parts.training_process import OutOfTime
from one_gpu_parts import leg, results, scores
from one_gpu_parts.experiment import ARCHIVE
from rich.console import Console
from transformers import ElectraConfig, ElectraForPreTraining

from electra_dist.compare.measures.measure import Measure, Measured
from electra_dist.errors import UserError
from electra_dist.pretrained.load_towers import read_weights


def _write_archive(carried: Path, text: str) -> None:
    """Write an archive with one file, `corpus/corpus.json`."""
    carried.mkdir(exist_ok=True)
    with tarfile.open(carried / ARCHIVE, "w:xz") as tar:
        entry = tarfile.TarInfo("corpus/corpus.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))


def test_a_leg_unpacks_once_and_again_if_the_archive_has_changed(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    assert leg.unpack(carried) is None
    _write_archive(carried, "one")
    folder = leg.unpack(carried)
    assert folder is not None
    file = folder / "corpus" / "corpus.json"
    assert file.read_text() == "one"
    written = file.stat().st_mtime_ns
    assert leg.unpack(carried) == folder
    assert file.stat().st_mtime_ns == written
    # A leg that was killed while it unpacked leaves a partial folder.
    (carried / "one_gpu.partial" / "corpus").mkdir(parents=True)
    (carried / "one_gpu.partial" / "rest").touch()
    _write_archive(carried, "two")
    leg.unpack(carried)
    assert file.read_text() == "two"
    assert not (folder / "rest").exists()
    damaged = carried / ARCHIVE
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(UserError, match=r"one_gpu\.tar\.xz: damaged .* copy it again"):
        leg.unpack(carried)
    _write_archive(carried, "two")
    leg.unpack(carried)
    # On a machine that keeps only what was unpacked, that is enough.
    (carried / ARCHIVE).unlink()
    assert leg.unpack(carried) == folder


class _FakeTraining:
    """Stands for a started training: each call of `wait` raises or returns the next of `answers`."""

    answers: ClassVar[list] = []
    started: ClassVar[list] = []

    def __init__(self, config: Path, run_dir: Path, settings: list[str], deadline: float, *, to_console: bool) -> None:
        self.started.append((settings, int(os.environ["SLURM_JOB_END_TIME"]), deadline))
        self.process = argparse.Namespace(poll=lambda: None if self.running else 0)
        self.running = True
        self.killed = False

    def wait(self) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self.running = False
        return answer

    def kill(self) -> None:
        self.running = False
        self.started.append("killed")


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> type[_FakeTraining]:
    monkeypatch.setattr(leg, "Training", _FakeTraining)
    monkeypatch.setattr(_FakeTraining, "answers", [])
    monkeypatch.setattr(_FakeTraining, "started", [])
    monkeypatch.setenv("SLURM_JOB_END_TIME", "")  # restored after the test
    return _FakeTraining


def test_training_knows_the_end_of_the_leg(fake_training: type[_FakeTraining], tmp_path: Path) -> None:
    fake_training.answers = [75]
    end_time = time.time() + 100
    assert leg.train(tmp_path, ["seed=1"], end_time) == 75
    ((settings, told_end, deadline),) = fake_training.started
    assert settings == ["seed=1"]
    assert told_end == round(end_time)
    assert deadline - time.monotonic() == pytest.approx(100 + leg._HANG_S, abs=5)


def test_a_slurm_job_that_ends_before_the_leg_ends_the_training(
    fake_training: type[_FakeTraining], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_end = round(time.time()) + 50
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(job_end))
    fake_training.answers = [75]
    leg.train(tmp_path, [], time.time() + 100)
    ((_, told_end, _),) = fake_training.started
    assert told_end == job_end


def test_ctrl_c_stops_training_with_a_checkpoint_and_a_hang_is_killed(
    fake_training: type[_FakeTraining], tmp_path: Path
) -> None:
    fake_training.answers = [KeyboardInterrupt(), 75]
    assert leg.train(tmp_path, [], time.time()) == 75
    assert (tmp_path / "stop").exists()
    assert "killed" not in fake_training.started
    fake_training.answers = [OutOfTime("late")]
    assert leg.train(tmp_path, [], time.time()) == 1
    assert fake_training.started[-1] == "killed"


@pytest.mark.parametrize(
    ("trained", "scored", "expected"),
    [(0, 0, 0), (0, 75, 75), (0, 78, 78), (75, None, 75), (1, None, 1), (78, None, 78)],
)
def test_a_leg_ends_with_the_code_of_what_it_did(
    trained: int, scored: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scored` is the exit code of scoring; None where a run is not to be scored."""
    _write_archive(tmp_path, "rows")
    written = []
    monkeypatch.setattr(leg, "train", lambda run_dir, settings, end_time: trained)
    monkeypatch.setattr(leg, "score", lambda run_dir, data, end_time: scored)
    monkeypatch.setattr(leg, "write_results", lambda run_dir, output, record: written.append((output, record)))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    arguments = argparse.Namespace(
        begun=time.time(), minutes=8, arm="rtd", smoke=True, carried=tmp_path, output=None, set=["run_dir=x"]
    )
    assert leg.run_leg(arguments) == expected
    if trained == 78:
        assert written == []
        return
    ((output, record),) = written
    assert output == tmp_path / "out"
    assert (record["exit_code"], record["arm"]) == (expected, "rtd")


def test_without_anything_carried_the_next_step_is_named(tmp_path: Path) -> None:
    arguments = argparse.Namespace(begun=0.0, minutes=8, arm="rtd", smoke=True, carried=tmp_path, output=None, set=[])
    with pytest.raises(UserError, match=r"one_gpu.sh prepare --corpus DIR"):
        leg.run_leg(arguments)


class _FakeMeasure(Measure):
    """Measure that counts its calls, and raises what it is told to."""

    metric = "accuracy"

    def __init__(self, name: str, error: BaseException | None = None) -> None:
        self.name = name
        self.digest = f"digest of {name}"
        self.calls = 0
        self.error = error

    def score(self, encoder: object, progress: object) -> Measured:
        self.calls += 1
        if self.error:
            raise self.error
        return Measured(value=0.5, standard_error=0.1)


def test_an_interrupted_scoring_computes_the_missing_scores_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = argparse.Namespace(state=argparse.Namespace(step=20), config=None)
    monkeypatch.setattr(scores, "load_run_weights", lambda run_dir: state)
    monkeypatch.setattr(scores, "load_pretrained", lambda run_dir: "encoder")
    first, second = _FakeMeasure("first"), _FakeMeasure("second", KeyboardInterrupt())
    refused = _FakeMeasure("refused", UserError("its vocabulary lacks the words"))
    monkeypatch.setattr(scores, "open_measures", lambda data, config: [first, second, refused])
    with pytest.raises(KeyboardInterrupt):
        scores.score_run(tmp_path, tmp_path, Console(file=io.StringIO()))
    second.error = None
    found = scores.score_run(tmp_path, tmp_path, Console(file=io.StringIO()))
    assert (first.calls, second.calls) == (1, 2)
    assert [(score["name"], score["score"]) for score in found] == [
        ("first", 0.5),
        ("second", 0.5),
        ("refused", None),
    ]
    assert found[-1]["failures"] == ["its vocabulary lacks the words"]
    assert scores.read_scores(tmp_path) == found
    # Other weights are scored again.
    state.state.step = 30
    scores.score_run(tmp_path, tmp_path, Console(file=io.StringIO()))
    assert (first.calls, second.calls) == (2, 3)


def test_returned_weights_are_bf16_in_small_files_that_hugging_face_and_this_project_read(tmp_path: Path) -> None:
    shape = ElectraConfig(
        vocab_size=300, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ElectraForPreTraining(shape)
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "vocab.txt").write_text("word\n")
    most = results._HEADER_BYTES + 20_000
    results.write_bf16_weights(tmp_path / "whole", tmp_path / "parts", most)
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) <= most
    expected = {name: value.bfloat16().float() for name, value in model.state_dict().items()}
    theirs = ElectraForPreTraining.from_pretrained(tmp_path / "parts", dtype=torch.float32).state_dict()
    ours = read_weights(tmp_path / "parts")
    for name, value in expected.items():
        assert torch.equal(theirs[name], value), name
        if value.is_floating_point() and name in ours:
            assert torch.equal(ours[name], value), name
    assert {name for name, value in expected.items()} == set(ours)


def test_no_file_gets_more_than_its_bytes_and_no_tensor_is_lost() -> None:
    tensors = {str(size): torch.zeros(size, dtype=torch.int8) for size in (5, 4, 3, 8, 1, 2)}
    files = results.cut_into_files(tensors, 8)
    assert [list(file) for file in files] == [["5"], ["4", "3"], ["8"], ["1", "2"]]
    with pytest.raises(ValueError, match="more than a file's 7"):
        results.cut_into_files(tensors, 7)

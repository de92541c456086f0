"""The experiment for one GPU without network: what is carried, its arms, its legs, and the files that come back."""

import argparse
import io
import json
import os
import random
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from gpu_parts.carried_packages import TO_TRAIN
from gpu_train_parts.training_process import OutOfTime, compare, metrics, read_lines
from one_gpu_parts import leg, prepare, results, scores
from one_gpu_parts.experiment import ARCHIVE, ARMS, CONFIG, SMOKE, config_of, settings_of
from rich.console import Console
from support.real_runs import write_corpus
from transformers import ElectraConfig, ElectraForPreTraining

from electra_dist.compare.measure import Measure, Measured
from electra_dist.config_file import load_config
from electra_dist.data.corpus_manifest import ShardEntry, read_manifest
from electra_dist.errors import UserError
from electra_dist.finetune.number_agreement import ADJECTIVES, BE, NOUNS, PREPOSITIONS
from electra_dist.model.flops import run_flops
from electra_dist.pretrained.load_towers import read_weights
from electra_dist.store.open_store import open_store

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT_ROWS = config_of([*SMOKE, "data.seq_len=32", "model.max_positions=32"])  # rows of `write_corpus`


def _shards(tokens: Sequence[int]) -> list[ShardEntry]:
    return [
        ShardEntry(name=f"{number}.tar", rows=1, tokens=count, bytes=1, sha256="0" * 64)
        for number, count in enumerate(tokens)
    ]


def test_carried_shards_come_from_the_whole_corpus_and_have_no_more_tokens_than_asked() -> None:
    def names(tokens: Sequence[int], most: int) -> list[str]:
        return [shard.name for shard in prepare.spread_shards(_shards(tokens), most)]

    assert names([10] * 9, 30) == ["0.tar", "3.tar", "6.tar"]
    assert names([10] * 9, 39) == ["0.tar", "3.tar", "6.tar"]
    assert names([10] * 9, 1000) == [f"{number}.tar" for number in range(9)]
    assert names([10, 90, 10, 90], 25) == ["0.tar", "2.tar"]
    with pytest.raises(UserError, match=r"smaller corpus\.shard_size_mb"):
        prepare.spread_shards(_shards([10, 10]), 9)


def test_the_carried_corpus_holds_the_rows_of_its_shards_and_can_be_read(tmp_path: Path) -> None:
    whole = write_corpus(str(tmp_path / "whole"), [20, 20, 20, 20])
    most = whole.num_tokens // 2 + 50
    sample = prepare.copy_sample(tmp_path / "whole", tmp_path / "sample", most, SHORT_ROWS)
    assert sample == read_manifest(open_store(str(tmp_path / "sample")))
    assert [shard.name for shard in sample.shards] == ["shard-000000.tar", "shard-000002.tar"]
    assert sample.num_tokens <= most
    assert sample.fingerprint != whole.fingerprint
    for shard in sample.shards:
        with tarfile.open(tmp_path / "sample" / shard.name) as tar:
            blocks = [np.load(io.BytesIO(tar.extractfile(name).read())) for name in tar.getnames()]  # type: ignore[union-attr]
        assert sum(len(block) for block in blocks) == shard.rows
        assert sum(int((block != 0).sum()) for block in blocks) == shard.tokens


def test_a_corpus_with_other_rows_is_refused_in_one_line(tmp_path: Path) -> None:
    write_corpus(str(tmp_path / "whole"), [20])
    with pytest.raises(UserError, match=r"rows of 32 tokens and 300 entries .* needs 128 and 8,192; build the corpus"):
        prepare.copy_sample(tmp_path / "whole", tmp_path / "sample", 1000, load_config(CONFIG))
    assert not (tmp_path / "sample").exists()


def test_the_arms_cost_the_same_flops_and_differ_in_what_their_names_say() -> None:
    configs = {arm: config_of(settings_of(arm, smoke=False, corpus=None, changes=[])) for arm in ARMS}
    first = configs["rtd-curriculum"]
    assert first == load_config(CONFIG)
    assert first.objective.temperature == load_config(REPOSITORY / "configs" / "tiny_rtd.yaml").objective.temperature
    assert configs["rtd"].objective == first.objective.model_copy(update={"temperature": 1.0})
    assert configs["mlm"].objective.name == "mlm"
    assert len({config.run_dir for config in configs.values()}) == len(ARMS)
    for config in configs.values():
        step_flops = run_flops(config, 1)
        assert abs(run_flops(config) - run_flops(first)) <= step_flops / 2
        assert config.optimizer.warmup_steps == pytest.approx(0.05 * config.train.num_steps, abs=1)
        assert config.model == first.model


def test_a_change_of_the_user_applies_to_all_arms() -> None:
    changes = ["train.num_steps=100", "optimizer.warmup_steps=10", "seed=5"]
    for arm in ARMS:
        config = config_of(settings_of(arm, smoke=False, corpus=Path("/rows"), changes=changes))
        assert (config.seed, config.data.corpus, config.data.heldout) == (5, "/rows", "/rows/heldout")
        assert config.train.num_steps >= 100


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
    state = argparse.Namespace(state=argparse.Namespace(step=20))
    monkeypatch.setattr(scores, "load_run_weights", lambda run_dir: state)
    monkeypatch.setattr(scores, "load_pretrained", lambda run_dir: "encoder")
    first, second = _FakeMeasure("first"), _FakeMeasure("second", KeyboardInterrupt())
    refused = _FakeMeasure("refused", UserError("its vocabulary lacks the words"))
    monkeypatch.setattr(scores, "open_measures", lambda data: [first, second, refused])
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"kind": "eval", "step": 20, "context_auc": 0.7, "context_auc_se": 0.01}) + "\n"
    )
    with pytest.raises(KeyboardInterrupt):
        scores.score_run(tmp_path, tmp_path, Console(file=io.StringIO()))
    second.error = None
    found = scores.score_run(tmp_path, tmp_path, Console(file=io.StringIO()))
    assert (first.calls, second.calls) == (1, 2)
    assert [(score["name"], score["score"]) for score in found] == [
        ("context-auc", 0.7),
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


def _agreement_text() -> str:
    """Return 80 documents of sentences with the words of the built-in minimal pairs and many rare words."""
    draw = random.Random(0)

    def sentence() -> str:
        number = draw.randrange(2)
        subject = draw.choice(NOUNS)[number]
        other = draw.choice(draw.choice(NOUNS))
        rare = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
        verb = draw.choice(BE)[number]
        return f"the {subject} {draw.choice(PREPOSITIONS)} the {other} {verb} {draw.choice(ADJECTIVES)} {rare} ."

    return "\n\n".join("\n".join(sentence() for _ in range(12)) for _ in range(80)) + "\n"


def _write_treebank(folder: Path) -> None:
    """Write a treebank with 30 training sentences and 6 test sentences such as "the boy is old"."""
    folder.mkdir()
    draw = random.Random(0)
    for part, num_sentences in (("train", 30), ("test", 6)):
        sentences = []
        for _ in range(num_sentences):
            number = draw.randrange(2)
            words = ["the", draw.choice(NOUNS)[number], draw.choice(BE)[number], draw.choice(ADJECTIVES)]
            tags_and_heads = zip(words, ("DET", "NOUN", "AUX", "ADJ"), (2, 4, 4, 0), strict=True)
            lines = [
                f"{index}\t{word}\t{word}\t{tag}\t_\t_\t{head}\t_\t_\t_"
                for index, (word, tag, head) in enumerate(tags_and_heads, 1)
            ]
            sentences.append("\n".join(lines) + "\n")
        (folder / f"xx-ud-{part}.conllu").write_text("\n".join(sentences) + "\n")


@pytest.mark.drill
@pytest.mark.multiproc  # four starts of DeepSpeed
def test_two_legs_with_what_is_carried_are_a_run_without_a_stop(
    tmp_path: Path, bare_python: Callable[[Sequence[str]], Path]
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(_agreement_text())
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"sentence_good": "the boy is old", "sentence_bad": "the boy are old", "UID": "own"}) + "\n"
    )
    _write_treebank(tmp_path / "treebank")
    script = ["bash", str(REPOSITORY / "benchmarks" / "one_gpu.sh")]
    prepared = ["prepare", "--smoke", "--corpus", str(tmp_path / "text"), "--pairs", str(tmp_path / "pairs.jsonl")]
    prepared += ["--treebank", str(tmp_path / "treebank"), "--no-wheels", "--output", str(tmp_path)]
    here = os.environ | {"PYTHON": os.environ.get("PYTHON", str(REPOSITORY / ".venv" / "bin" / "python"))}
    subprocess.run([*script, *prepared], env=here, check=True, timeout=240)

    there = os.environ | {"PYTHON": str(bare_python(TO_TRAIN))}

    def run_leg(name: str, minutes: float) -> tuple[int, dict]:
        options = ["--smoke", "--minutes", str(minutes), "--carried", str(tmp_path / "carried"), "--set"]
        options += [f"run_dir={tmp_path / name}", "--set", "log.every_steps=1", "--output", str(tmp_path / "out")]
        code = subprocess.run([*script, *options], env=there, timeout=400).returncode
        return code, json.loads((tmp_path / "out" / "leg.json").read_text())

    code, record = run_leg("cut", 0.01)
    assert (code, record["step"], record["scores"]) == (75, 1, [])
    code, record = run_leg("cut", 5)
    assert (code, record["step"]) == (0, 20)
    assert [score["name"] for score in record["scores"]] == ["context-auc", "minimal-pairs", "pairs", "tags", "heads"]
    assert all(score["score"] is not None for score in record["scores"])
    returned = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert max(file.stat().st_size for file in returned) <= 15_000_000
    assert read_weights(tmp_path / "out" / "discriminator")

    code, again = run_leg("cut", 5)
    assert code == 0
    assert again["scores"] == record["scores"]  # with their seconds: nothing was computed again

    assert run_leg("whole", 5)[0] == 0
    found = compare(metrics(tmp_path / "whole"), metrics(tmp_path / "cut"))
    assert (found["steps"], found["same_rows"], found["bit_for_bit"]) == (20, True, True)
    starts = [event["step"] for event in read_lines(tmp_path / "cut" / "ledger.jsonl") if event["event"] == "resume"]
    assert starts[0] == 1

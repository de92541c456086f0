"""The experiment for one GPU without network: what is carried, its arms, and two legs against a run without a stop."""

import io
import json
import os
import random
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gpu_parts.carried_packages import TO_TRAIN
from gpu_train_parts.training_process import compare, metrics, read_lines
from one_gpu_parts import leg, prepare, scores
from one_gpu_parts.experiment import ARMS, CONFIG, SMOKE, config_of, settings_of
from support.real_runs import write_corpus

from electra_dist.config_file import load_config
from electra_dist.data.corpus_manifest import ShardEntry, read_manifest
from electra_dist.errors import UserError
from electra_dist.finetune.sentences.number_agreement import ADJECTIVES, BE, NOUNS, PREPOSITIONS
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


@pytest.fixture
def prepare_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`prepare_command(*options)` runs `prepare --smoke` on a finished corpus of short rows, without wheels."""
    write_corpus(str(tmp_path / "whole"), [20, 20])
    write_corpus(str(tmp_path / "whole" / "heldout"), [5], seed=1)
    monkeypatch.setattr(prepare, "SMOKE", [*SMOKE, "data.seq_len=32", "model.max_positions=32"])

    def run(*options: str) -> None:
        command = ["prepare.py", "--smoke", "--no-wheels", "--corpus", str(tmp_path / "whole")]
        monkeypatch.setattr("sys.argv", [*command, "--output", str(tmp_path), *options])
        prepare.main()

    return run


def test_what_prepare_carries_is_what_a_leg_unpacks(prepare_command: Callable[..., None], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"sentence_good": "the boy is old", "sentence_bad": "the boy are old"}) + "\n")
    _write_treebank(tmp_path / "trees")
    prepare_command("--pairs", str(pairs), "--treebank", str(tmp_path / "trees"))
    folder = leg.unpack(tmp_path / "carried")
    assert folder is not None
    whole = read_manifest(open_store(str(tmp_path / "whole")))
    assert read_manifest(open_store(str(folder / "corpus"))).shards == whole.shards
    assert read_manifest(open_store(str(folder / "corpus" / "heldout"))).num_rows == 5
    heldout = f"data.heldout={folder / 'corpus' / 'heldout'}"
    config = config_of([*SMOKE, "data.seq_len=32", "model.max_positions=32", "model.vocab_size=300", heldout])
    names = [measure.name for measure in scores.open_measures(folder, config)]
    assert names == ["context-auc", "minimal-pairs", "pairs", "tags", "heads"]


def test_prepare_refuses_what_a_leg_could_not_use(
    prepare_command: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare_command("--pairs", str(tmp_path / "missing.jsonl"))
    assert stopped.value.code == 78
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "missing.jsonl" in error
    assert error.count("\n") == 1
    monkeypatch.setattr(prepare, "MOST_BYTES", 100)
    with pytest.raises(SystemExit, match=r"more than the 0 MB that are carried: lower --tokens"):
        prepare_command()


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


@pytest.mark.multiproc  # four starts of DeepSpeed
@pytest.mark.sample
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

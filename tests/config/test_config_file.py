"""YAML to Config: every shipped file resolves, every mistake is one line that names file, key and next step."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from electra_dist.config import Config
from electra_dist.config.load import dump_yaml, load_config, sources
from electra_dist.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Configs of commands, not of a run.
OTHERS = (
    "compare_cpu.yaml",
    "compare_temperatures.yaml",
    "compare_tiny_modern.yaml",
    "compare_tiny_rtd.yaml",
    "compare_worth.yaml",
    "compare_worth_evening.yaml",
    "compare_worth_small.yaml",
    "corpus_prepare.yaml",
)
RUNNABLE = sorted(p for p in CONFIGS.glob("*.yaml") if p.name not in ("defaults.yaml", *OTHERS))
DEMO = CONFIGS / "demo_cpu_bert.yaml"


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.name)
def test_shipped_files_resolve_and_read_back_equal(path: Path) -> None:
    config = load_config(path)
    assert Config.model_validate(yaml.safe_load(dump_yaml(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.micro_bacth=3", ["unknown key `train.micro_bacth`", "did you mean `train.micro_batch`"]),
        ("trian.micro_batch=3", ["unknown key `trian`", "did you mean `train`"]),
        ("lr=1e-4", ["unknown key `lr`", "did you mean `optimizer.lr`"]),
        ("train.lr=1e-4", ["unknown key `train.lr`", "did you mean `optimizer.lr`"]),
        ("learning_rate=1e-4", ["did you mean `optimizer.lr`"]),
        ("batch_size=4", ["did you mean `train.global_batch`"]),
        ("train.max_steps=4", ["did you mean `train.num_steps`"]),
        ("name=rtd", ["unknown key `name`", "use one of run_dir, seed, model"]),  # two sections have this key
        ("objective.mask_prob=25", ["objective.mask_prob", "less than 1", "25", "0.25 means 25 %"]),
        ("train.micro_batch=many", ["train.micro_batch", "valid integer", "many"]),
        ("train.micro_batch=7", ["micro_batch 7 does not divide", "global_batch 16"]),
        ("model.discriminator.num_heads=3", ["num_heads 3 does not divide hidden_size 128"]),
        ("data.seq_len=4096", ["data.seq_len 4096 exceeds model.max_positions 128"]),
        ("run_dir=$SCRATCH/run", ["`run_dir`: expected a whole path, because a config replaces no variable"]),
        (
            "data.cache_dir=${TMPDIR}",
            ["`data.cache_dir`: expected a whole path, because a config replaces no variable"],
        ),
        ("engine.zero_stage=4", ["engine.zero_stage", "0, 1, 2 or 3"]),
        ("nonsense", ["--set nonsense", "key.path=value"]),
    ],
)
def test_mistakes_are_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, [override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert "--set" in message


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for text, words in [
        ("run_dir: [", ["broken.yaml:", "not valid YAML"]),
        ("- a\n- b\n", ["expected sections", "but found a value of type list"]),
        ("# nothing\n", ["expected sections", "but the file is empty"]),
        ("extends: nowhere.yaml\n", ["broken.yaml", "extends", "there is no file", "nowhere.yaml"]),
        ("extends: [defaults.yaml]\n", ["broken.yaml", "extends", "['defaults.yaml']"]),
        ("run_dir: x\n", ["missing key `model`"]),
        ("train.num_steps: 3\n", ["write `train:` and indented below it `num_steps:`"]),
        ("train.num_step: 3\n", ["unknown key `train.num_step`; did you mean `train.num_steps`?"]),
        ("model:\n  discriminator.num_heads: 3\n", ["write `discriminator:` and indented below it `num_heads:`"]),
        (
            "extends: configs/demo_cpu.yaml\nlog:\n",
            ["`log`: input should be a section, with its keys indented below it, not None"],
        ),
        (
            "extends: configs/demo_cpu.yaml\ncheckpoint: {targets: s3://bucket}\n",
            ["`checkpoint.targets`: input should be a list, such as [A, B]"],
        ),
    ]:
        broken.write_text(text)
        with pytest.raises(UserError) as caught:
            load_config(broken)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_sources_say_where_each_value_is_from() -> None:
    origin = sources(DEMO, ["train.micro_batch=8"])
    assert origin["train.micro_batch"] == "--set"
    assert origin["train.num_steps"].endswith("demo_cpu_bert.yaml")
    assert origin["optimizer.eps"].endswith("defaults.yaml")
    assert origin["plan.gpu"] == "default"


def test_a_folder_below_the_home_folder_is_the_same_for_all_who_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(DEMO, ["run_dir=~/x", "data.cache_dir=~/cache"])
    assert config.run_dir == "/home/me/x"
    assert config.checkpoint_urls == ("/home/me/x/checkpoints",)
    assert str(config.cache_folder) == "/home/me/cache"
    with pytest.raises(UserError, match=r"run_dir.*no such user"):
        load_config(DEMO, ["run_dir=~nobody-of-this-name/x"])

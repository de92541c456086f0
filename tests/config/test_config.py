"""The config itself: the paper's values, descriptions, and what belongs to a run's identity."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from electra_dist.config import CACHE_DIR, Config, ObjectiveConfig
from electra_dist.config.load import load_config
from electra_dist.config.rules import RUN_FOLDERS, check_new_run, check_targets_are_separate, keys_without_effect
from electra_dist.config.sections.objective import OBJECTIVES
from electra_dist.errors import UserError
from electra_dist.run import folder

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = CONFIGS / "demo_cpu.yaml"


def test_large_is_the_papers() -> None:
    c = load_config(CONFIGS / "large_25pct_mask.yaml")
    assert c.model.discriminator.model_dump() == {
        "hidden_size": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": 4096,
    }
    assert c.model.generator.model_dump() == {
        "hidden_size": 256,
        "num_layers": 24,
        "num_heads": 4,
        "intermediate_size": 1024,
    }
    assert (c.data.seq_len, c.objective.mask_prob, c.train.global_batch, c.train.num_steps) == (
        512,
        0.25,
        2048,
        400_000,
    )
    o = c.optimizer
    assert (o.lr, o.warmup_steps, o.eps, o.weight_decay, o.clip_norm) == (2e-4, 10_000, 1e-6, 0.01, 1.0)
    assert (c.model.hidden_dropout, c.model.attention_dropout, c.objective.rtd_weight) == (0.1, 0.1, 50.0)
    assert c.data.corpus.startswith("s3://")


def test_the_table_of_objectives_has_the_names_that_a_config_may_use() -> None:
    assert [*OBJECTIVES] == [*get_args(ObjectiveConfig.model_fields["name"].annotation)]


def test_every_field_has_a_description() -> None:
    def undescribed(section: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            inner = getattr(field.annotation, "model_fields", None)
            if inner is not None:
                found += undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                found.append(prefix + name)
        return found

    assert undescribed(Config) == []


def test_identity_ignores_what_may_change_at_a_restart() -> None:
    base = load_config(DEMO)
    same = load_config(DEMO, ["train.micro_batch=8", "engine.zero_stage=3", "log.every_steps=3", "run_dir=elsewhere"])
    other = load_config(DEMO, ["seed=43"])
    assert same.identity_sha256() == base.identity_sha256() != other.identity_sha256()


def test_phases_of_the_data_belong_to_the_identity_only_if_there_are_any() -> None:
    plain = load_config(DEMO)
    phased = load_config(DEMO, ["data.phases=[{corpus: later, from_step: 9}]"])
    moved = load_config(DEMO, ["data.phases=[{corpus: later, from_step: 10}]"])
    assert set(plain.identity()["data"]) == {"seq_len", "shuffle_window_shards"}  # as in runs before there were phases
    assert phased.identity()["data"]["phase_steps"] == [9]
    assert len({config.identity_sha256() for config in (plain, phased, moved)}) == 3
    assert plain.data.training_corpora() == [("data.corpus", 0, plain.data.corpus)]
    assert phased.data.training_corpora()[1] == ("data.phases[0].corpus", 9, "later")


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{corpus: a, from_step: 9}, {corpus: b, from_step: 9}]", "from_step 9 of b does not come after from_step 9"),
        ("[{corpus: a, from_step: 9}, {corpus: a, from_step: 10}]", "name the corpus a more than once; name each"),
        ("[{corpus: a, from_step: 0}]", r"data\.phases\.0\.from_step`: input should be greater than 0"),
        ("[{corpus: a, from: 3}]", r"unknown key `data\.phases\.0\.from`; did you mean `data\.phases\.0\.from_step`"),
        ("[{corpus: a, from_step: 999999999}]", "from_step of a is 999,999,999, which the run does not reach"),
    ],
)
def test_phases_that_cannot_be_meant_are_refused_in_one_line(phases: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        check_new_run(load_config(DEMO, [f"data.phases={phases}"]))
    assert "\n" not in str(refusal.value)


def test_the_keys_of_a_trapezoid_belong_to_the_identity_of_that_shape_only() -> None:
    config = load_config(CONFIGS / "small.yaml")
    assert config.identity()["optimizer"].keys().isdisjoint({"shape", "decay_steps"})
    unused = load_config(CONFIGS / "small.yaml", ["optimizer.decay_steps=5"])
    assert unused.identity() == config.identity()
    assert keys_without_effect(unused) == {"optimizer.decay_steps": "only optimizer.shape: trapezoid uses it"}
    trapezoid = load_config(CONFIGS / "small.yaml", ["optimizer.shape=trapezoid", "optimizer.decay_steps=5"])
    assert (
        trapezoid.identity()["optimizer"] | {"shape": "trapezoid", "decay_steps": 5}
        == (trapezoid.identity()["optimizer"])
    )
    assert keys_without_effect(trapezoid) == {}


def test_a_trapezoid_whose_slopes_do_not_fit_into_the_run_is_refused() -> None:
    settings = ["optimizer.shape=trapezoid", "train.num_steps=100", "optimizer.warmup_steps=90"]
    check_new_run(load_config(CONFIGS / "small.yaml", settings))
    with pytest.raises(
        UserError, match=r"optimizer\.warmup_steps 90 and the 20 steps of decay are longer than the run"
    ):
        check_new_run(load_config(CONFIGS / "small.yaml", [*settings, "optimizer.decay_steps=20"]))


@pytest.mark.parametrize(
    "targets",
    [
        ["T", "T/."],
        ["T", "T/"],
        ["other", "T", "link"],
        ["T", "file://TMP/T"],
        ["T", "link/new/../."],
        ["T", "T/inner"],
        ["link/inner", "T"],
        ["s3://b/run", "s3://b/run/"],
        ["s3://b/run", "T", "s3://b//run"],
        ["s3://b", "s3://b/run"],
        ["run"],
        ["T", "run/heartbeats"],
        ["run/cache/checkpoints"],
        ["cache"],
        ["corpus"],
        ["s3://b/heldout/"],
    ],
)
def test_a_place_that_is_named_twice_or_used_otherwise_is_no_checkpoint_target(
    tmp_path: Path, targets: list[str]
) -> None:
    (tmp_path / "T").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "T")
    (tmp_path / "corpus-link").symlink_to(tmp_path / "corpus")
    settings = [f"run_dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache", f"data.corpus={tmp_path}/corpus-link"]
    settings += ["data.heldout=s3://b/heldout"]

    def config(targets: list[str]) -> Config:
        urls = [url.replace("TMP", str(tmp_path)) if "://" in url else f"{tmp_path}/{url}" for url in targets]
        return load_config(DEMO, [*settings, f"checkpoint.targets={urls}"])

    with pytest.raises(UserError, match=r"^checkpoint\.targets: ") as refusal:
        check_targets_are_separate(config(targets))
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=r"^checkpoint\.targets: "):
        check_new_run(config(targets))
    for good in ([], ["run/checkpoints", "s3://b/run"], ["T", "T2", "s3://b/run", "s3://b/run-2", "s3://c/run"]):
        check_targets_are_separate(config(good))


def test_every_folder_of_a_run_is_known_to_the_check_of_targets() -> None:
    names = {value for key, value in vars(folder).items() if key.endswith("_DIR")}
    assert set(RUN_FOLDERS) == names | {CACHE_DIR}


_SAME_TOWERS = "model.generator={hidden_size: 128, num_layers: 4, num_heads: 4, intermediate_size: 512}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.generator_only_steps=5", "model.sharing=none"], "they must be of one size"),
        (["objective.generator_only_steps=5", _SAME_TOWERS], "model.sharing is embeddings"),
        (["objective.name=mlm", "model.sharing=none"], "has one tower only"),
        (["objective.generator=uniform", "objective.temperature=1", "model.sharing=gdes"], "has one tower only"),
        (["objective.name=electric", "model.sharing=all", _SAME_TOWERS], "two causal towers"),
        (
            ["objective.generator=frozen", "train.init_generator_from=x", "model.sharing=gdes"],
            "has tables and layers of its own",
        ),
        (["optimizer.name=lamb", "engine.zero_stage=1"], "set engine.zero_stage: 0"),
        (["optimizer.name=lamb", "engine.zero_stage=0", "optimizer.implementation=deepspeed"], "apex and foreach"),
        (["optimizer.name=muon", "engine.zero_stage=1"], "set engine.zero_stage: 0"),
        (
            ["optimizer.name=muon", "engine.zero_stage=0", "optimizer.implementation=apex"],
            "has the implementation foreach",
        ),
        (["checkpoint.keep_best=1", "data.heldout=null"], "without data.heldout no checkpoint"),
        (["model.type_vocab_size=1"], "two segments"),
    ],
)
def test_sections_that_contradict_each_other_are_refused_when_the_config_is_read(
    overrides: list[str], message: str
) -> None:
    """So that a dry run and a submission refuse them, too, and not only the ranks of the queued job."""
    with pytest.raises(UserError, match=message) as error:
        load_config(DEMO, overrides)

    assert "\n" not in str(error.value)

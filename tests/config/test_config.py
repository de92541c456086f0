"""The config itself: the paper's values, descriptions, and what belongs to a run's identity."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from electra_dist.config import Config, ObjectiveConfig, OptimizerConfig
from electra_dist.config.load import load_config
from electra_dist.config.rules import keys_without_effect
from electra_dist.config.sections.objective import OBJECTIVES
from electra_dist.config.sections.training import OPTIMIZERS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = CONFIGS / "demo_cpu_bert.yaml"


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


def test_the_tables_of_objectives_and_optimizers_have_the_names_that_a_config_may_use() -> None:
    assert [*OBJECTIVES] == [*get_args(ObjectiveConfig.model_fields["name"].annotation)]
    assert [*OPTIMIZERS] == [*get_args(OptimizerConfig.model_fields["name"].annotation)]


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

"""The rules of a config: what contradicts what, and what is refused for a new run."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from electra_dist.config import CACHE_DIR, Config
from electra_dist.config.load import load_config
from electra_dist.config.rules import (
    RUN_FOLDERS,
    check_new_run,
    check_targets_are_separate,
    keys_without_effect,
)
from electra_dist.errors import UserError
from electra_dist.run import folder

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = CONFIGS / "demo_cpu_bert.yaml"
_SAME_TOWERS = "model.generator={hidden_size: 128, num_layers: 4, num_heads: 4, intermediate_size: 512}"
_CONSTANT = "objective.temperature=1"
_MODERN = "model.architecture=modern"
_STAGE_0 = "engine.zero_stage=0"
_FROZEN = ("objective.generator=frozen", "train.init_generator_from=x")

# Overrides of the demo -> the section that the error names, or "", and a part of its message.
CONTRADICTIONS = [
    ([_MODERN, "model.embedding_size=64"], "model", "set model.embedding_size: 128"),
    ([_MODERN, "model.generator.num_heads=32"], "model", "heads of an even width"),
    (["model.sharing=all"], "model", "two towers of the same shape"),
    (["model.generator_embedding_size=16"], "model", "needs sharing `none`"),
    (["model.generator_dropout=0.1", "model.sharing=all", _SAME_TOWERS], "model", "does not go with sharing `all`"),
    (
        ["objective.rtd_balance=0.5", "objective.name=rtd_masked_only"],
        "objective",
        "rtd_balance needs objective `rtd`",
    ),
    (
        ["objective.name=mlm", "objective.generator=uniform", _CONSTANT],
        "objective",
        "does not go with objective `mlm`",
    ),
    (["objective.generator_sha256=abc"], "objective", "generator_sha256 needs generator `frozen`"),
    (
        ["objective.name=rtd_masked_only", "objective.generator_only_steps=5"],
        "objective",
        "needs objective `rtd` and a trained generator",
    ),
    (
        ["objective.discriminator_mlm_weight=1", "objective.name=mlm"],
        "objective",
        "discriminator_mlm_weight needs objective",
    ),
    (
        ["objective.discriminator_mlm_weight=1", "objective.name=adversarial"],
        "objective",
        "discriminator_mlm_weight needs objective",
    ),
    (
        ["objective.discriminator_mlm_weight=1", "objective.generator_only_steps=3"],
        "objective",
        "discriminator_mlm_weight needs objective",
    ),
    (
        ["objective.name=adversarial", "objective.disallow_correct=true"],
        "objective",
        "which may sample the true token",
    ),
    (["objective.generator=unigram"], "objective", "temperature cannot be a schedule"),
    (
        ["objective.generator=uniform", _CONSTANT, "objective.random_share=0.5"],
        "objective",
        "random_share does not go with objective `rtd` and generator `uniform`",
    ),
    (["objective.name=electric", "objective.random_share=0.5"], "objective", "random_share does not go with"),
    (
        ["data.phases=[{corpus: a, from_step: 9}, {corpus: b, from_step: 9}]"],
        "data",
        "does not come after from_step 9",
    ),
    (["data.phases=[{corpus: corpora/demo, from_step: 9}]"], "data", "name the corpus corpora/demo more than once"),
    (["engine.overlap_communication=true", "engine.zero_stage=2"], "engine", "works at zero_stage 1, not at 2"),
    (
        ["engine.overlap_communication=true", "engine.offload_optimizer=true"],
        "engine",
        "does not work with offload_optimizer",
    ),
    (["engine.compile=true", "engine.zero_stage=3"], "engine", "compile needs whole parameters"),
    (["data.seq_len=129"], "", "exceeds model.max_positions 128"),
    (["train.micro_batch=3"], "", "train.micro_batch 3 does not divide"),
    (["engine.attention=flex", "model.attention_dropout=0.1"], "", "flex supports neither"),
    (["engine.attention=flex", "model.generator_dropout=0.1"], "", "flex supports neither"),
    (["engine.attention=flex", "objective.name=electric"], "", "flex supports neither"),
    (["engine.attention=flash", "objective.name=electric"], "", "flash does not support the one-directional"),
    (["model.type_vocab_size=1"], "", "two segments"),
    ([_MODERN, "objective.name=electric"], "", "attention in one direction"),
    ([_MODERN, "engine.compile=true", "model.hidden_dropout=0.1"], "", "needs model.hidden_dropout: 0"),
    ([_MODERN, "engine.compile=true", "model.generator_dropout=0.1"], "", "needs model.hidden_dropout: 0"),
    (["engine.attention=flash"], "", "flash computes in bf16 or fp16 only"),
    (["objective.generator_only_steps=5", "model.sharing=none"], "", "they must be of one size"),
    (["objective.generator_only_steps=5", _SAME_TOWERS], "", "model.sharing is embeddings"),
    ([*_FROZEN, "model.sharing=gdes"], "", "has tables and layers of its own"),
    (["objective.name=mlm", "model.sharing=none"], "", "has one tower only"),
    (["objective.generator=uniform", _CONSTANT, "model.sharing=gdes"], "", "has one tower only"),
    (["objective.name=electric", "model.sharing=all", _SAME_TOWERS], "", "two causal towers"),
    (["optimizer.name=lamb", "engine.zero_stage=1"], "", "engine.zero_stage is 1; set engine.zero_stage: 0"),
    (["optimizer.name=lamb", _STAGE_0, "optimizer.implementation=deepspeed"], "", "apex and foreach"),
    (["optimizer.name=muon", "engine.zero_stage=1"], "", "engine.zero_stage is 1; set engine.zero_stage: 0"),
    (["optimizer.name=muon", "engine.zero_stage=3"], "", "engine.zero_stage is 3; set engine.zero_stage: 0"),
    (["optimizer.name=muon", _STAGE_0, "optimizer.implementation=apex"], "", "has the implementation foreach"),
    (["optimizer.generator={}", "model.sharing=all", _SAME_TOWERS], "", "optimizer.generator needs a generator"),
    (["engine.overlap_communication=true"], "", "needs train.precision: bf16, not fp32"),
    (["checkpoint.keep_best=1", "data.heldout=null"], "", "without data.heldout no checkpoint"),
    (["objective.generator=frozen"], "", "frozen needs train.init_generator_from"),
    (["train.init_generator_from=x"], "", "init_generator_from needs init_from"),
]
ACCEPTED = [
    ["optimizer.name=lamb", _STAGE_0],
    ["optimizer.name=muon", _STAGE_0],
    ["engine.zero_stage=3"],
    [_MODERN, "engine.compile=true"],
    ["model.sharing=all", _SAME_TOWERS],
    ["objective.generator_only_steps=5", "model.sharing=none", _SAME_TOWERS],
    [*_FROZEN],
    ["train.init_from=x", "train.init_generator_from=y"],
    ["objective.random_share=0.5"],
    ["objective.discriminator_mlm_weight=1"],
    ["objective.rtd_balance=0.5", "model.generator_dropout=0"],
]


@pytest.mark.parametrize(("overrides", "section", "message"), CONTRADICTIONS)
def test_contradictions_are_refused_in_one_line_when_the_config_is_read(
    overrides: list[str], section: str, message: str
) -> None:
    """So that a dry run and a submission refuse them, too, and not only the ranks of the queued job."""
    with pytest.raises(UserError) as error:
        load_config(DEMO, overrides)

    line = str(error.value)
    assert "\n" not in line
    assert message in line
    assert (f": `{section}`: " in line) == bool(section)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=lambda overrides: " ".join(overrides)[:60])
def test_what_does_not_contradict_itself_is_accepted(overrides: list[str]) -> None:
    load_config(DEMO, overrides)


def test_a_config_that_is_made_without_a_file_obeys_the_rules() -> None:
    tree = load_config(DEMO).model_dump(mode="json")
    tree["engine"]["overlap_communication"] = True
    tree["engine"]["zero_stage"] = 2
    with pytest.raises(ValidationError, match="works at zero_stage 1, not at 2"):
        Config.model_validate(tree)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{corpus: a, from_step: 9}, {corpus: b, from_step: 9}]", "from_step 9 of b does not come after"),
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


@pytest.mark.parametrize(
    "overrides", [[], [_CONSTANT, "objective.disallow_correct=true"], ["objective.temperature=2"]]
)
def test_noise_of_electric_from_another_distribution_than_its_loss_assumes_is_refused(overrides: list[str]) -> None:
    """The demo has a falling temperature."""
    check_new_run(load_config(DEMO, ["objective.name=electric", _CONSTANT]))
    with pytest.raises(UserError, match=r"^objective\.name: electric learns .* set objective\.temperature: 1 and"):
        check_new_run(load_config(DEMO, ["objective.name=electric", *overrides]))


@pytest.mark.parametrize("key", ["optimizer.weight_decay", "optimizer.generator.weight_decay"])
def test_lamb_without_decay_is_refused_because_it_scales_no_update(key: str) -> None:
    """`test_lamb.py` has the rule: a group without decay gets Adam's steps."""
    check_new_run(load_config(DEMO, ["optimizer.name=lamb", _STAGE_0, f"{key}=1e-6"]))
    check_new_run(load_config(DEMO, ["optimizer.name=adamw", _STAGE_0, f"{key}=0"]))
    with pytest.raises(UserError, match=r"^optimizer\.name: lamb scales .* to 1e-6 or more$"):
        check_new_run(load_config(DEMO, ["optimizer.name=lamb", _STAGE_0, f"{key}=0"]))


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


@pytest.mark.parametrize("run_dir", ["corpora/demo", "./corpora/demo/heldout/"])
def test_the_folder_of_a_corpus_is_no_run_dir(run_dir: str) -> None:
    with pytest.raises(UserError, match=r"^run_dir: \S+ is the folder of data\.(corpus|heldout), "):
        check_new_run(load_config(DEMO, [f"run_dir={run_dir}"]))
    check_new_run(load_config(DEMO, ["run_dir=corpora/demo/run"]))


@pytest.mark.parametrize(
    ("settings", "has_effect"),
    [
        (["log.eval_every_steps=0"], False),  # after the last step only
        (["log.eval_every_steps=100"], True),
        (["log.eval_every_steps=300"], True),  # both at step 600
        (["log.eval_every_steps=501"], False),
        (["log.eval_every_steps=100", "checkpoint.every_steps=auto"], False),
        (["log.eval_every_steps=100", "checkpoint.every_steps=auto", "checkpoint.keep_every_steps=300"], True),
        (["log.eval_every_steps=100", "checkpoint.every_steps=auto", "checkpoint.keep_steps=[150, 300]"], True),
        (["log.eval_every_steps=100", "checkpoint.every_steps=auto", "checkpoint.keep_steps=[150, 1000]"], False),
    ],
)
def test_a_best_checkpoint_needs_a_step_with_a_save_and_an_evaluation(settings: list[str], has_effect: bool) -> None:
    run = ["train.num_steps=1000", "checkpoint.every_steps=200", "checkpoint.keep_best=1"]
    reported = keys_without_effect(load_config(DEMO, [*run, *settings]))
    assert ("checkpoint.keep_best" not in reported) == has_effect


def test_every_folder_of_a_run_is_known_to_the_check_of_targets() -> None:
    names = {value for key, value in vars(folder).items() if key.endswith("_DIR")}
    assert set(RUN_FOLDERS) == names | {CACHE_DIR}

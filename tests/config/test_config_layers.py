"""Layers of a config: chains of `extends`, keys that are set twice, booleans, and the files of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from electra_dist.config.load import CONFIGS_DIR, find_config_file, load_config, sources
from electra_dist.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = CONFIGS / "demo_cpu_bert.yaml"


def refusal(path: Path, *overrides: str) -> str:
    """Return the one line with which a config is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_chain_of_three_files_gives_each_value_of_the_nearest_one(tmp_path: Path) -> None:
    """The result equals that of one file with the merged keys, and `sources` names the file of each value."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "mine").mkdir()
    middle = tmp_path / "mine" / "middle.yaml"
    middle.write_text("extends: ../configs/demo_cpu_bert.yaml\nseed: 1\ntrain: {num_steps: 300, micro_batch: 8}\n")
    last = tmp_path / "last.yaml"
    last.write_text("extends: mine/middle.yaml\ntrain: {num_steps: 200}\n")
    merged = load_config(DEMO, ["seed=1", "train.num_steps=200", "train.micro_batch=8"])
    assert load_config(last) == merged
    origin = sources(last)
    assert origin["train.num_steps"].endswith("last.yaml")
    assert origin["train.micro_batch"].endswith("middle.yaml")
    assert origin["train.global_batch"].endswith("demo_cpu_bert.yaml")
    assert origin["optimizer.eps"].endswith("defaults.yaml")


def test_files_that_extend_one_another_are_refused_with_the_whole_chain(tmp_path: Path) -> None:
    names = ("a.yaml", "b.yaml", "c.yaml")
    for name, extended in zip(names, ("b.yaml", "c.yaml", "./a.yaml")):
        (tmp_path / name).write_text(f"extends: {extended}\n")
    message = refusal(tmp_path / "a.yaml")
    positions = [message.index(str(tmp_path / name)) for name in names]
    assert positions[1:] == sorted(positions[1:]) and "circle" in message
    assert message.count("->") == 3


@pytest.mark.parametrize(
    ("text", "line", "first"),
    [
        ("seed: 1\ntrain:\n  num_steps: 3\n  num_steps: 4\n", 4, 3),
        ("train: {num_steps: 3}\nseed: 1\ntrain: {micro_batch: 4}\n", 3, 1),
        ('seed: 1\n"seed": 2\n', 2, 1),
    ],
)
def test_a_key_that_is_set_twice_is_refused_with_file_and_both_lines(
    tmp_path: Path, text: str, line: int, first: int
) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    message = refusal(file)
    assert f"{file}:{line}:" in message and "twice" in message and f"line {first}" in message


def test_a_key_that_is_set_twice_in_an_override_is_refused() -> None:
    assert "`seed` is set twice" in refusal(DEMO, "optimizer={seed: 1, seed: 2}")


@pytest.mark.parametrize(
    "override",
    [
        "train.num_steps=true",
        "optimizer.lr=true",
        "engine.zero_stage=true",
        "checkpoint.every_steps=yes",
        "train.skip_steps=[3, true]",
        "objective.temperature=true",
        "objective.temperature={from: true, to: 1, shape: linear}",
        "optimizer.generator={lr: true}",
        "run_dir=true",
    ],
)
def test_a_boolean_is_no_number_and_no_text(override: str) -> None:
    key = override.partition("=")[0]
    message = refusal(DEMO, override)
    assert f"`{key}" in message and "boolean" in message


def test_a_key_that_is_a_boolean_still_takes_one() -> None:
    assert load_config(DEMO, ["engine.compile=true"]).engine.compile is True
    assert load_config(DEMO, ["engine.compile=1"]).engine.compile is True


def test_heldout_rows_beside_the_corpus_need_one_key() -> None:
    moved = load_config(CONFIGS / "large_25pct_mask.yaml", ["data.corpus=s3://mine/text/"])
    assert moved.data.heldout == "s3://mine/text/heldout"
    apart = load_config(CONFIGS / "large_25pct_mask.yaml", ["data.heldout=/data/heldout"])
    assert (apart.data.corpus, apart.data.heldout) == ("s3://electra-corpus/33b-512", "/data/heldout")


def test_files_of_the_package_are_found_from_any_folder_and_yield_to_files_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/small.yaml") == load_config(CONFIGS / "small.yaml")
    assert sources("configs/small.yaml")["train.num_steps"] == str(CONFIGS / "small.yaml")
    (tmp_path / "mine").mkdir()
    (tmp_path / "defaults.yaml").touch()  # a file of the working folder is never extended by its name alone
    extending = tmp_path / "mine" / "run.yaml"
    extending.write_text("extends: defaults.yaml\n")
    assert "there is no file" in refusal(extending)
    extending.write_text("extends: configs/small.yaml\nseed: 3\n")
    assert load_config(extending) == load_config(CONFIGS / "small.yaml", ["seed=3"])
    (tmp_path / CONFIGS_DIR).mkdir()
    own = Path(CONFIGS_DIR, "small.yaml")
    own.write_text(f"extends: {DEMO}\n")
    assert load_config("configs/small.yaml") == load_config(DEMO)
    for path in (Path("small.yaml"), Path("/nowhere/configs/defaults.yaml"), Path("configs/nowhere.yaml")):
        assert find_config_file(path) == path


MERGES = "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 24))
ALIASES = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 24))


@pytest.mark.parametrize(
    "text",
    ["a0: &a0 {k: 1}\n" + MERGES, "a0: &a0 [1, 2]\n" + ALIASES, "a: &a [*a]\n", "a: &a {<<: *a}\n", "[" * 3000],
    ids=["merges", "aliases", "list in itself", "mapping in itself", "nested lists"],
)
def test_a_short_file_that_stands_for_a_huge_value_is_refused_before_it_is_made(tmp_path: Path, text: str) -> None:
    """The number of mappings that are made is that of the file, which is counted here instead of their time."""
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(f"{file}") and "not valid YAML" in message


def test_merge_keys_and_aliases_of_a_usual_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"extends: {DEMO}\n"
        "model:\n"
        "  generator: &tower {hidden_size: 128, num_layers: 2, num_heads: 4, intermediate_size: 512}\n"
        "  discriminator: {<<: *tower, num_layers: 3}\n"
    )
    model = load_config(file).model
    assert model.discriminator == model.generator.model_copy(update={"num_layers": 3})


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("# " + "x" * (1 << 20))
    assert f"{file}: has more than the 1,048,576 bytes" in refusal(file)


@pytest.mark.parametrize(
    "number",
    [
        "1" * 4301,
        "-" + "1" * 5000,
        "1" + ":59" * 3000,
        "1" + ":59" * 3000 + ".5",
        "0x" + "f" * 4000,
        "0b" + "1" * 20000,
    ],
    ids=["digits", "negative", "base 60", "base 60 with a fraction", "hexadecimal", "binary"],
)
def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path, number: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"extends: {DEMO}\nseed: {number}\n")
    assert "not valid YAML (a number has" in refusal(file)
    assert "not valid YAML" in refusal(DEMO, f"seed={number}")
    quoted = refusal(DEMO, f"seed='{number}'")
    assert "`seed`" in quoted


def test_a_number_in_base_60_is_read_as_yaml_defines_it() -> None:
    assert load_config(DEMO, ["seed=1:30"]).seed == 90


@pytest.mark.parametrize("extended", ["loop.yaml", "loop/base.yaml"])
def test_a_loop_of_links_is_a_missing_file(tmp_path: Path, extended: str) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run.yaml").write_text(f"extends: {extended}\n")
    assert f"there is no file {tmp_path / extended}" in refusal(tmp_path / "run.yaml")
    assert "cannot be read" in refusal(tmp_path / "loop.yaml")

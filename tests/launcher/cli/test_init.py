"""`electra-dist init` writes a config that is the packaged one of its size, with the user's own paths."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from electra_launcher.cli.plans import Size
from typer.testing import CliRunner

from electra_dist.config.load import load_config


@pytest.mark.parametrize("size", list(Size))
def test_the_config_differs_from_the_packaged_one_in_its_paths_only(
    size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = load_config(size.config).model_dump()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "my model", "--size", size.value])
    assert done.exit_code == 0, done.output
    file = Path("my model/pretrain.yaml")
    written = load_config(file).model_dump()
    packaged["run_dir"] = "my model/run"
    packaged["data"] |= {"corpus": "my model/corpus", "heldout": "my model/corpus/heldout"}
    assert written == packaged
    lines = file.read_text().splitlines()
    assert lines[2] == f"extends: {size.config}" and "comes with the package" in lines[1]
    keys = [number for number, line in enumerate(lines) if re.match(r" *(?!extends)\w+: ", line)]
    assert len(keys) > 10 and all(lines[number - 1].lstrip().startswith("# ") for number in keys)
    assert "add --text-field COLUMN to both corpus commands" in done.output
    assert ("takes three minutes on two CPU cores" in done.output) == (size is Size.TINY)
    assert "--vocab 'my model/vocab.txt'" in done.output and "--config 'my model/pretrain.yaml'" in done.output


def test_the_printed_commands_make_a_corpus_of_more_words_than_the_smallest_model_has_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(6000)]
    Path("TEXT").mkdir()
    Path("TEXT/all.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=60)) for _ in range(500)))
    printed = CliRunner().invoke(app, ["init", "new", "--size", "tiny"]).output
    vocabulary, build = (line.split()[1:] for line in printed.splitlines() if "electra-dist corpus" in line)
    for command in (vocabulary, [*build, "--workers", "1"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output + str(done.exception)
    assert len(Path("new/vocab.txt").read_text().splitlines()) == 4096
    assert Path("new/corpus/heldout/corpus.json").exists()


def test_a_config_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pretrain.yaml").write_text("mine")
    done = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert "there is a config already; edit it, or give another folder" in str(done.exception)
    assert (tmp_path / "pretrain.yaml").read_text() == "mine"

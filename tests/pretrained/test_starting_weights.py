"""A run that begins with other weights: they are the ones it begins with, what they lack is said, and only once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.real_runs import REPOSITORY, SEQ_LEN, step_records

from electra_dist.checkpoint.restore_state import assemble
from electra_dist.config import Config, ModelConfig, ObjectiveConfig
from electra_dist.config_file import dump_yaml, load_config
from electra_dist.data.row_order import RowOrder
from electra_dist.data.shard import Shard
from electra_dist.errors import UserError
from electra_dist.model.initial_weights import build_towers
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.pretrained import run_weights
from electra_dist.pretrained.export_run import export_run
from electra_dist.pretrained.load_encoder import _tower_state
from electra_dist.pretrained.starting_weights import load_source
from launcher.cli.checkpoint_paths import find_targets

MakeConfig = Callable[..., Path]
Pretrain = Callable[..., subprocess.CompletedProcess[str]]
MOMENTS = "optimizer: moments are not taken over; they start at zero"


def expected_first_losses(config: Config, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """MLM and RTD loss of a model with `weights` on the rows of step 0, masked and sampled as in that step."""
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    module = build_objective(config.model, config.objective, special, seed=0)
    module.load_state_dict(weights)
    rows_per_shard = [70, 33, 48, 90, 15]
    _, shards, rows = RowOrder(rows_per_shard, config.seed, config.data.shuffle_window_shards).locate(np.arange(16))
    ids = np.zeros((16, SEQ_LEN), np.int64)
    for place, (shard, row) in enumerate(zip(shards, rows)):
        opened = Shard(Path(config.data.corpus) / f"shard-{shard:06d}.tar", SEQ_LEN, np.dtype(np.uint16))
        ids[place] = opened.rows(np.array([row]))[0]
        opened.close()
    given = StepInput(torch.from_numpy(ids), torch.arange(16), 0, config.seed, 1.0, 1.0)
    with torch.no_grad():
        sums = Sums(*module(given).sums.tolist())
    return sums.mlm_loss_sum / sums.mlm_weight, sums.rtd_loss_sum / sums.rtd_weight


@pytest.mark.multiproc
def test_a_run_begins_with_the_weights_of_a_run_or_an_export(
    tiny_config: MakeConfig, pretrain: Pretrain, tmp_path: Path
) -> None:
    pretrain(tiny_config("source", **{"train.num_steps": 30, "data.heldout": None}), 1)
    source = tmp_path / "source"
    export_run(source, tmp_path / "export")
    weights = assemble(find_targets(str(source)))[1]
    short = {"train.num_steps": 2, "seed": 8, "data.heldout": None}
    for name, ranks, stage, origin in (("again", 1, 1, source), ("exported", 2, 3, tmp_path / "export")):
        config = tiny_config(name, **short, **{"engine.zero_stage": stage, "train.init_from": str(origin)})
        done = pretrain(config, ranks)
        first = step_records(tmp_path / name)[0]
        expected = expected_first_losses(load_config(config), weights)
        assert (first["mlm_loss"], first["rtd_loss"]) == pytest.approx(expected, rel=1e-5)
        assert "start at zero" in done.stdout and "random values" not in done.stdout
        assert "init_from: the weights of" in (tmp_path / name / "log.txt").read_text()
    shutil.rmtree(tmp_path / "export")  # not needed any more: the run has a checkpoint of its own
    again = pretrain(config, 1)
    assert "nothing to do" in again.stdout and "init_from" not in again.stdout


def fake_run(folder: Path, config: Config, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    monkeypatch.setattr(run_weights, "assemble", lambda targets, step: (SimpleNamespace(step=1234), state, []))
    return folder


def changed(config: Config, objective: str, **model: Any) -> Config:
    shape = ModelConfig.model_validate({**config.model.model_dump(), **model})
    return config.model_copy(update={"model": shape, "objective": ObjectiveConfig(name=objective)})  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes", "all"])
@pytest.mark.parametrize("wanted", ["embeddings", "gdes"])
def test_weights_fit_whatever_the_towers_share(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, wanted: str
) -> None:
    config = load_config(tiny_config())
    same = {"generator": config.model.discriminator.model_dump()}
    theirs, ours = changed(config, "rtd", sharing=sharing, **same), changed(config, "rtd", sharing=wanted, **same)
    state = build_towers(theirs.model, 1, theirs.objective).state_dict()
    state = {f"towers.{name}": value + 0.01 * torch.randn_like(value) for name, value in state.items()}
    run = fake_run(tmp_path / "run", theirs, state, monkeypatch)
    towers = build_towers(ours.model, 2, ours.objective)
    notes = load_source(towers, config.train.model_copy(update={"init_from": str(run)}))
    assert notes[0] == f"the weights of {run} after 1,234 steps" and notes[-1] == MOMENTS
    expected = _tower_state(state, theirs.model, "discriminator")
    found = _tower_state(towers.state_dict(), ours.model, "discriminator")
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7)


def test_what_another_objective_lacks_is_named(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config())
    theirs, ours = changed(config, "mlm"), changed(config, "rtd", max_positions=16)
    state = build_towers(theirs.model, 1, theirs.objective).state_dict()
    run = fake_run(tmp_path / "run", theirs, state, monkeypatch)
    towers, untouched = build_towers(ours.model, 2), build_towers(ours.model, 2)
    train = config.train.model_copy(update={"init_from": str(run)})
    notes = load_source(towers, train)
    assert [note.partition(":")[0] for note in notes[1:]] == [
        "generator",
        "generator_head",
        "discriminator_head",
        "optimizer",
    ]
    assert "start with random values" in notes[1]
    assert torch.equal(towers.embeddings.position.weight, state["embeddings.position.weight"][:16])
    assert torch.equal(towers.generator_head.dense.weight, untouched.generator_head.dense.weight)
    deeper = changed(config, "mlm", discriminator={**config.model.discriminator.model_dump(), "num_layers": 3})
    with pytest.raises(UserError, match="num_hidden_layers is 2, but the config's discriminator has 3"):
        load_source(build_towers(deeper.model, 2, deeper.objective), train)


def test_the_source_is_part_of_what_a_run_is_and_no_source_changes_nothing(tiny_config: MakeConfig) -> None:
    plain = load_config(tiny_config())
    other = load_config(tiny_config(), ["train.init_from=x"])
    assert set(plain.identity()["train"]) == {"num_steps", "global_batch", "precision"}
    assert other.identity_sha256() != plain.identity_sha256()


def test_a_wrong_source_is_one_line_and_nothing_is_written(tiny_config: MakeConfig, tmp_path: Path) -> None:
    empty, alien, narrow = tmp_path / "empty", tmp_path / "alien", tmp_path / "narrow"
    for folder in (empty, alien, narrow):
        folder.mkdir()
    for folder in (alien, narrow):
        (folder / "config.json").write_text(json.dumps({"model_type": "electra", "vocab_size": 300}))
    (alien / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw0\n")
    for given, said in (
        ([f"train.init_from={empty}"], "neither a run (config.yaml), nor an export"),
        ([f"train.init_from={alien}"], "is not the vocabulary of data.corpus"),
        ([f"train.init_from={narrow}"], "embedding_size is None, but the config's discriminator has 24"),
        ([f"train.init_generator_from={empty}"], "init_generator_from needs init_from"),
    ):
        command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(tiny_config())]
        done = subprocess.run(
            [*command, *(part for each in given for part in ("--set", each))],
            capture_output=True,
            text=True,
            timeout=120,
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, len(errors)) == (78, 1), done.stderr
        assert said in errors[0]
        assert not (tmp_path / "run").exists()

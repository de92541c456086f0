"""Runs that start from the weights of another model (`train.init_from`), and sources that are refused."""

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
from electra_kernels.operation_types import SpecialIds
from electra_launcher.cli.checkpoint import find_targets
from support.real_runs import REPOSITORY, SEQ_LEN, step_records

from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.config import Config, ModelConfig, ObjectiveConfig
from electra_dist.config.load import dump_yaml, load_config
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.errors import UserError
from electra_dist.model.towers import build_towers
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.pretrained import weights as weights_module
from electra_dist.pretrained.encoder import _tower_state
from electra_dist.pretrained.export import export_run
from electra_dist.pretrained.weights import load_source

MakeConfig = Callable[..., Path]
Pretrain = Callable[..., subprocess.CompletedProcess[str]]

EXIT_USER_ERROR = 78  # exit code of an error that the user must fix
GLOBAL_BATCH = 16  # rows of a step of the tiny config
ROWS_PER_SHARD = [70, 33, 48, 90, 15]  # of the tiny corpus
MOMENTS_NOTE = "optimizer: moments are not taken over; they start at zero"


def rows_of_first_step(config: Config) -> torch.Tensor:
    """Return the ids of the rows of step 0, int64 [GLOBAL_BATCH, SEQ_LEN], read from the shards of the tiny corpus."""
    order = RowOrder([CorpusOrder(ROWS_PER_SHARD, config.seed, config.data.shuffle_window_shards)])
    _, shard_numbers, row_numbers = order.locate(np.arange(GLOBAL_BATCH))
    ids = np.zeros((GLOBAL_BATCH, SEQ_LEN), np.int64)
    for index, (shard_number, row_number) in enumerate(zip(shard_numbers, row_numbers)):
        shard = Shard(Path(config.data.corpus) / f"shard-{shard_number:06d}.tar", SEQ_LEN, np.dtype(np.uint16))
        ids[index] = shard.rows(np.array([row_number]))[0]
        shard.close()
    return torch.from_numpy(ids)


def expected_first_losses(config: Config, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the MLM and RTD loss of a model with `weights` on the rows of step 0, masked and sampled as in it."""
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    module = build_objective(config.model, config.objective, special, seed=0)
    module.load_state_dict(weights)
    step_input = StepInput(rows_of_first_step(config), torch.arange(GLOBAL_BATCH), 0, config.seed, 1.0, 1.0)
    with torch.no_grad():
        sums = Sums(*module(step_input).sums.tolist())
    return sums.mlm_loss_sum / sums.mlm_weight, sums.rtd_loss_sum / sums.rtd_weight


@pytest.mark.multiproc
def test_the_first_losses_of_a_run_are_those_of_the_weights_that_it_starts_from(
    tiny_config: MakeConfig, pretrain: Pretrain, tmp_path: Path
) -> None:
    """The source is a run, or its export; the losses are computed from its weights outside the training loop.

    Once the new run has a checkpoint of its own, the source may be deleted.
    """
    pretrain(tiny_config("source", **{"train.num_steps": 30, "data.heldout": None}), 1)
    source = tmp_path / "source"
    export = tmp_path / "export"
    export_run(source, export)
    weights = assemble(find_targets(str(source)))[1]

    short = {"train.num_steps": 2, "seed": 8, "data.heldout": None}
    for name, ranks, stage, init_from in (("from_run", 1, 1, source), ("from_export", 2, 3, export)):
        config = tiny_config(name, **short, **{"engine.zero_stage": stage, "train.init_from": str(init_from)})

        done = pretrain(config, ranks)

        first_record = step_records(tmp_path / name)[0]
        first_losses = (first_record["mlm_loss"], first_record["rtd_loss"])
        assert first_losses == pytest.approx(expected_first_losses(load_config(config), weights), rel=1e-5)
        assert "start at zero" in done.stdout  # the optimizer's moments
        assert "random values" not in done.stdout  # no parameter is missing in the source
        assert "init_from: the weights of" in (tmp_path / name / "log.txt").read_text()

    shutil.rmtree(export)
    second_start = pretrain(config, 1)
    assert "nothing to do" in second_start.stdout
    assert "init_from" not in second_start.stdout


def fake_run(folder: Path, config: Config, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the folder of a run with `config`, and let the reader of checkpoints return `state` of step 1234."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    chosen = SimpleNamespace(state=SimpleNamespace(step=1234), weights=state, steps=(1234,), damaged=[])
    monkeypatch.setattr(weights_module, "read_chosen", lambda *arguments: chosen)
    return folder


def with_objective(config: Config, objective: str, **model_changes: Any) -> Config:
    """Return `config` with another objective and with changes to its section `model`."""
    model = ModelConfig.model_validate({**config.model.model_dump(), **model_changes})
    return config.model_copy(update={"model": model, "objective": ObjectiveConfig(name=objective)})  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes", "all"])
@pytest.mark.parametrize("wanted", ["embeddings", "gdes"])
def test_the_discriminator_is_the_same_whatever_parameters_source_and_run_share_between_towers(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, wanted: str
) -> None:
    config = load_config(tiny_config())
    equal_towers = {"generator": config.model.discriminator.model_dump()}  # sharing all needs towers of one shape
    source_config = with_objective(config, "rtd", sharing=sharing, **equal_towers)
    run_config = with_objective(config, "rtd", sharing=wanted, **equal_towers)
    initial_state = build_towers(source_config.model, 1, source_config.objective).state_dict()
    source_state = {}
    for name, value in initial_state.items():
        source_state[f"towers.{name}"] = value + 0.01 * torch.randn_like(value)
    source = fake_run(tmp_path / "source", source_config, source_state, monkeypatch)

    towers = build_towers(run_config.model, 2, run_config.objective)
    notes = load_source(towers, config.train.model_copy(update={"init_from": str(source)}))

    assert notes[0] == f"the weights of {source} after 1,234 steps"
    assert notes[-1] == MOMENTS_NOTE
    expected = _tower_state(source_state, source_config.model, "discriminator")
    loaded = _tower_state(towers.state_dict(), run_config.model, "discriminator")
    assert expected.keys() == loaded.keys()
    for name in expected:
        # gdes stores the discriminator's table as a difference, which costs a rounding.
        torch.testing.assert_close(loaded[name], expected[name], rtol=0, atol=1e-7)


def test_parts_that_the_source_lacks_are_noted_and_keep_their_random_values(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was trained with MLM, which has no generator; the new run has RTD and fewer positions."""
    config = load_config(tiny_config())
    source_config = with_objective(config, "mlm")
    run_config = with_objective(config, "rtd", max_positions=16)
    source_state = build_towers(source_config.model, 1, source_config.objective).state_dict()
    source = fake_run(tmp_path / "source", source_config, source_state, monkeypatch)
    train = config.train.model_copy(update={"init_from": str(source)})

    towers = build_towers(run_config.model, 2)
    random_towers = build_towers(run_config.model, 2)
    notes = load_source(towers, train)

    noted_parts = [note.partition(":")[0] for note in notes[1:]]
    assert noted_parts == ["generator", "generator_head", "discriminator_head", "optimizer"]
    assert "start with random values" in notes[1]
    first_positions = source_state["embeddings.position.weight"][:16]
    assert torch.equal(towers.embeddings.position.weight, first_positions)
    assert torch.equal(towers.generator_head.dense.weight, random_towers.generator_head.dense.weight)

    three_layers = {**config.model.discriminator.model_dump(), "num_layers": 3}
    deeper = with_objective(config, "mlm", discriminator=three_layers)
    with pytest.raises(UserError, match="num_hidden_layers is 2, but the config's discriminator has 3"):
        load_source(build_towers(deeper.model, 2, deeper.objective), train)


def test_the_identity_of_a_run_contains_init_from_only_if_it_is_set(tiny_config: MakeConfig) -> None:
    """A run without a source is identified as if the field did not exist, so its checkpoints stay valid."""
    without_source = load_config(tiny_config())
    with_source = load_config(tiny_config(), ["train.init_from=x"])

    assert set(without_source.identity()["train"]) == {"num_steps", "global_batch", "precision"}
    assert with_source.identity_sha256() != without_source.identity_sha256()


def test_a_source_that_does_not_fit_is_a_one_line_error_and_nothing_is_written(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    other_vocabulary = tmp_path / "other_vocabulary"
    no_embedding_size = tmp_path / "no_embedding_size"
    for folder in (empty, other_vocabulary, no_embedding_size):
        folder.mkdir()
    for folder in (other_vocabulary, no_embedding_size):
        (folder / "config.json").write_text(json.dumps({"model_type": "electra", "vocab_size": 300}))
    (other_vocabulary / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw0\n")

    for override, expected_message in (
        (f"train.init_from={empty}", "neither a run (config.yaml), nor an export"),
        (f"train.init_from={other_vocabulary}", "is not the vocabulary of data.corpus"),
        (
            f"train.init_from={no_embedding_size}",
            "embedding_size is None, but the config's discriminator has 24",
        ),
        (f"train.init_generator_from={empty}", "init_generator_from needs init_from"),
    ):
        command = [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(tiny_config())]

        done = subprocess.run([*command, "--set", override], capture_output=True, text=True, timeout=120)

        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == EXIT_USER_ERROR, done.stderr
        assert len(errors) == 1, done.stderr
        assert expected_message in errors[0]
        assert not (tmp_path / "run").exists()

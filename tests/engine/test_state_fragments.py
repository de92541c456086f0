"""Fragments, save and load with real DeepSpeed engines of every ZeRO stage, on one rank in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.reader import load_newest
from electra_dist.checkpoint.writer import CheckpointWriter
from electra_dist.config import CheckpointConfig, Config
from electra_dist.config.load import load_config
from electra_dist.engine.engine import Engine
from electra_dist.engine.state_fragments import held_fragments, owned_fragments, parameter_shapes
from electra_dist.store.open_store import open_store

STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]


class Toy(nn.Module):
    """Small model with odd sizes, a tied weight, a LayerNorm and parameters without weight decay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(37, 12)
        self.dense = nn.Linear(12, 7)
        self.norm = nn.LayerNorm(7)
        self.back = nn.Linear(7, 12)
        self.tied = self.word

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.back(self.norm(self.dense(self.word(ids))))
        return (hidden @ self.tied.weight.t()).float().logsumexp(-1).mean()


@pytest.fixture
def config(tiny_config: Callable[..., Path]) -> Config:
    """The config of a tiny run."""
    return load_config(tiny_config())


def build(config: Config, stage: int, precision: str) -> Engine:
    """Return an engine of the toy model at a ZeRO stage and precision."""
    tree = config.model_dump()
    tree["engine"]["zero_stage"], tree["train"]["precision"] = stage, precision
    config = Config.model_validate(tree)
    return Engine(Toy(), config.train, config.engine, config.optimizer)  # type: ignore[arg-type]


def run_steps(engine: Engine, first: int, last: int) -> list[float]:
    """Train the steps from `first` up to `last`, exclusive, and return the loss of each step's last micro-batch."""
    losses = []
    for step in range(first, last):
        for micro in range(engine.num_micro_batches):
            ids = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(100 * step + micro))
            loss = engine.deepspeed(ids)
            engine.backward(loss / engine.num_micro_batches)
        losses.append(float(loss.detach()))
        engine.step(1e-2)
    return losses


def state_of(engine: Engine, step: int) -> RunState:
    """Return the run state of a checkpoint of the engine at `step`."""
    return RunState(
        step=step,
        attempt=1,
        identity_sha256="0" * 64,
        corpus_fingerprint="c",
        world_size=1,
        zero_stage=engine.zero_stage,
        shapes=parameter_shapes(engine.deepspeed.module),
        shared={"tied.weight": "word.weight"},
        versions={},
        bit_settings={},
    )


def save(engine: Engine, folder: Path, step: int) -> None:
    """Save a checkpoint of the engine to `folder` and wait until it is committed."""
    writer = CheckpointWriter([open_store(str(folder))], 0, CheckpointConfig(keep_last=9))
    writer.save(state_of(engine, step), owned_fragments(engine))
    writer.close()


def load(engine: Engine, folder: Path) -> tuple[int | None, list[str]]:
    """Load the newest checkpoint into the engine; return its step (None: there is none) and the notes of the load."""
    fragments = held_fragments(engine)
    state, notes, _ = load_newest([open_store(str(folder))], fragments, state_of(engine, 0))
    if state is None:
        return None, notes
    engine.layout.publish()
    return state.step, notes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_restored_engine_gives_the_losses_of_the_uninterrupted_one_bit_for_bit(
    config: Config, tmp_path: Path, stage: int, precision: str
) -> None:
    uncut = build(config, stage, precision)
    run_steps(uncut, 0, 3)
    save(uncut, tmp_path, 3)
    expected = run_steps(uncut, 3, 6)
    uncut.close()
    fresh = build(config, stage, precision)
    assert load(fresh, tmp_path) == (3, [])
    assert run_steps(fresh, 3, 6) == expected
    fresh.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_loads_checkpoints_of_every_stage_exactly(config: Config, tmp_path: Path, precision: str) -> None:
    for source in range(4):
        writer = build(config, source, precision)
        run_steps(writer, 0, 2)
        folder = tmp_path / f"{source}"
        save(writer, folder, 2)
        weights = assemble([open_store(str(folder))])[1]
        for target in range(4):
            engine = build(config, target, precision)
            assert load(engine, folder) == (2, [])
            save(engine, tmp_path / f"{source}-{target}", 2)
            again = assemble([open_store(str(tmp_path / f"{source}-{target}"))])[1]
            assert weights.keys() == again.keys()
            assert all(torch.equal(weights[n], again[n]) for n in weights)
            engine.close()
        writer.close()


@pytest.mark.usefixtures("one_rank")
def test_param_groups_keep_their_decay_after_a_stage_3_load(config: Config, tmp_path: Path) -> None:
    engine = build(config, 3, "fp32")
    run_steps(engine, 0, 1)
    save(engine, tmp_path, 1)
    load(engine, tmp_path)
    assert sorted({g["weight_decay"] for g in engine.optimizer.param_groups}) == [0.0, 0.01]
    engine.close()

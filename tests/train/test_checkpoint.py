"""Fragments, commit protocol and verified load, on real DeepSpeed engines of every stage in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from electra_dist.checkpoint.fragments import held_fragments, owned_fragments, parameter_shapes, publish
from electra_dist.checkpoint.load import assemble, load_newest
from electra_dist.checkpoint.manifest import MANIFEST, SET_ASIDE, RunState, committed, folder_name
from electra_dist.checkpoint.save import CheckpointWriter, Fenced, begin_attempt
from electra_dist.checkpoint.tensor_file import write_tensor_file
from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.store import open_store
from electra_dist.train.engine import Engine

STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]


class Toy(nn.Module):
    """Odd sizes, a tied weight, a LayerNorm, a parameter group without decay."""

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
    return load_config(tiny_config())


def build(config: Config, stage: int, precision: str) -> Engine:
    tree = config.model_dump()
    tree["engine"]["zero_stage"], tree["train"]["precision"] = stage, precision
    return Engine(Toy(), Config.model_validate(tree))


def run_steps(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for micro in range(engine.num_micro_batches):
            ids = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(100 * step + micro))
            loss = engine.forward(ids)
            engine.backward(loss / engine.num_micro_batches)
            if micro < engine.num_micro_batches - 1:
                engine.step_micro_batch()
        losses.append(float(loss.detach()))
        engine.step(1e-2)
    return losses


def state_of(engine: Engine, step: int, attempt: int = 1) -> RunState:
    return RunState(
        step=step,
        attempt=attempt,
        identity_sha256="0" * 64,
        corpus_fingerprint="c",
        world_size=1,
        zero_stage=engine.zero_stage,
        shapes=parameter_shapes(engine.deepspeed.module),
        shared={"tied.weight": "word.weight"},
        versions={},
    )


def save(engine: Engine, folder: Path, step: int, keep_last: int = 9, attempt: int = 1) -> None:
    writer = CheckpointWriter(open_store(str(folder)), folder / "staging", 0, keep_last)
    writer.save(state_of(engine, step, attempt), owned_fragments(engine.deepspeed.module, engine.optimizer))
    writer.close()


def load(engine: Engine, folder: Path) -> tuple[int | None, list[str]]:
    fragments = held_fragments(engine.deepspeed.module, engine.optimizer)
    found, notes = load_newest(open_store(str(folder)), folder / "staging", fragments, state_of(engine, 0))
    if found:
        publish(engine.optimizer)
    return (found.step if found else None), notes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "precision"), STAGES)
def test_restored_engine_repeats_the_uninterrupted_one_bit_for_bit(
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
def test_any_stage_loads_any_other_exactly(config: Config, tmp_path: Path, precision: str) -> None:
    for source in range(4):
        writer = build(config, source, precision)
        run_steps(writer, 0, 2)
        folder = tmp_path / f"{source}"
        save(writer, folder, 2)
        weights = assemble(open_store(str(folder)), folder / "staging")[1]
        for target in range(4):
            engine = build(config, target, precision)
            assert load(engine, folder) == (2, [])
            save(engine, tmp_path / f"{source}-{target}", 2)
            again = assemble(open_store(str(tmp_path / f"{source}-{target}")), folder / "staging")[1]
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


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped byte": lambda f: flip_a_byte(f / "rank-00000.safetensors"),
    "truncated": lambda f: (f / "rank-00000.safetensors").write_bytes(b"abc"),
    "missing file": lambda f: (f / "rank-00000.safetensors").unlink(),
    "manifest not JSON": lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:-9]),
    "swapped step": lambda f: (f / MANIFEST).write_bytes((f.parent / folder_name(1, 1) / MANIFEST).read_bytes()),
    "a parameter too few": lambda f: drop_a_fragment(f / MANIFEST),
}


def drop_a_fragment(path: Path) -> None:
    tree = json.loads(path.read_text())
    tree["parts"][0]["fragments"].pop()
    path.write_text(json.dumps(tree))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.replace(" ", "_"))
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_used(
    config: Config, tmp_path: Path, damage: str
) -> None:
    engine = build(config, 1, "fp32")
    save(engine, tmp_path, 1)
    run_steps(engine, 0, 1)
    save(engine, tmp_path, 2)
    newest = tmp_path / folder_name(2, 1)
    DAMAGES[damage](newest)
    step, notes = load(engine, tmp_path)
    assert step == 1
    assert len(notes) == 1 and folder_name(2, 1) in notes[0]
    assert (newest / SET_ASIDE).exists() and not (newest / MANIFEST).exists()
    engine.close()


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_of_another_run_is_not_loaded(config: Config, tmp_path: Path) -> None:
    engine = build(config, 1, "fp32")
    save(engine, tmp_path, 1)
    fragments = held_fragments(engine.deepspeed.module, engine.optimizer)
    other = state_of(engine, 0).model_copy(update={"corpus_fingerprint": "another"})
    found, notes = load_newest(open_store(str(tmp_path)), tmp_path / "staging", fragments, other)
    assert found is None
    assert "another corpus" in notes[0]
    engine.close()


@pytest.mark.usefixtures("one_rank")
def test_retention_keeps_the_newest_and_removes_leftovers(config: Config, tmp_path: Path) -> None:
    engine = build(config, 1, "fp32")
    leftover = tmp_path / folder_name(1, 1) / "rank-00000.safetensors"
    leftover.parent.mkdir()
    leftover.write_bytes(b"a dead attempt's")
    for step in range(2, 7):
        save(engine, tmp_path, step, keep_last=2, attempt=2)
    assert [step for step, _, _ in committed(open_store(str(tmp_path)))] == [5, 6]
    assert not leftover.exists()
    engine.close()


@pytest.mark.usefixtures("one_rank")
def test_succeeded_attempt_cannot_commit(config: Config, tmp_path: Path) -> None:
    engine = build(config, 1, "fp32")
    store = open_store(str(tmp_path))
    assert [begin_attempt(store), begin_attempt(store)] == [1, 2]
    with pytest.raises(Fenced):
        save(engine, tmp_path, 1, attempt=1)
    save(engine, tmp_path, 1, attempt=2)
    assert committed(store) == [(1, 2, folder_name(1, 2))]
    engine.close()


def test_assemble_without_a_checkpoint_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is none yet"):
        assemble(open_store(str(tmp_path)), tmp_path / "staging")


def test_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {"a|b|0": torch.randn(5), "empty": torch.empty(0), "matrix": torch.randn(3, 4)}
    size, _ = write_tensor_file(tmp_path / "x.safetensors", tensors)
    assert size == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)

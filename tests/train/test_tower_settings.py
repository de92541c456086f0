"""Real runs with settings of single towers (own optimizer settings, joint MLM, frozen generators) repeat exactly."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.checkpoint import find_targets
from support.real_runs import go_back, step_records

from electra_dist.checkpoint.chosen_weights import assemble
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import plan_sections
from electra_dist.pretrained.export import export_run
from electra_dist.pretrained.weights import with_generator_digest
from electra_dist.run.folder import open_run

Pretrain = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], list[tuple]]
MakeConfig = Callable[..., Path]

pytestmark = pytest.mark.multiproc

DECOUPLED = {
    "optimizer.generator": {"lr": 5e-4, "warmup_steps": 4, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 0.05},
    "optimizer.clip_norm": 0.5,
    "objective.discriminator_mlm_weight": 1.0,
}


def without_norm(records: list[tuple]) -> list[tuple]:
    """Return the records without the gradient norm, whose sum over partitions depends on the number of ranks."""
    return [record[:4] + record[5:] for record in records]


def test_a_cut_run_with_two_optimizer_settings_repeats_bit_for_bit_on_another_number_of_ranks(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    settings = {
        "train.num_steps": 9,
        "train.precision": "bf16",
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 9,
    }
    config = tiny_config("run", **settings, **DECOUPLED)
    run_dir = tmp_path / "run"
    pretrain(config, 1)
    expected = losses(run_dir)

    go_back(run_dir, 4)
    pretrain(config, 2)

    assert len(expected) == 9
    assert without_norm(losses(run_dir)) == without_norm(expected)
    records = step_records(run_dir)
    assert [record["generator_lr"] for record in records[:5]] == pytest.approx(
        [5e-4 * min(1, step / 4) * (1 - step / 9) for step in range(5)]
    )
    assert all(record["token_loss"] > 0 for record in records)


@pytest.mark.drill
def test_a_run_with_a_frozen_generator_repeats_bit_for_bit_and_is_bound_to_its_weights(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    """The generator is the large tower of an mlm run; then the same weights from that run's export; then others."""
    small_tower = {"hidden_size": 16, "num_layers": 2, "num_heads": 1, "intermediate_size": 32}
    pretrain(
        tiny_config(
            "source",
            **{
                "objective.name": "mlm",
                "model.discriminator": small_tower,
                "train.num_steps": 12,
                "data.heldout": None,
            },
        ),
        1,
    )
    settings = {
        "objective.generator": "frozen",
        "train.init_generator_from": str(tmp_path / "source"),
        "train.num_steps": 9,
        "train.precision": "bf16",
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 9,
    }
    config = tiny_config("run", **settings)
    run_dir = tmp_path / "run"
    pretrain(config, 1)
    expected = losses(run_dir)
    go_back(run_dir, 4)
    pretrain(config, 2)
    assert len(expected) == 9
    assert without_norm(losses(run_dir)) == without_norm(expected)

    records = step_records(run_dir)
    assert all(
        0 < record["mlm_loss"] < 7 and record["loss"] == pytest.approx(50 * record["rtd_loss"]) for record in records
    )
    state, weights, *_ = assemble(find_targets(str(run_dir)))
    assert not any("generator" in name for name in (*weights, *state.shapes))
    resolved = open_run(run_dir)
    assert len(resolved.objective.generator_sha256 or "") == 64
    plan = [row for section in plan_sections(make_plan(resolved)) for row in section.rows]
    assert any(row[0] == "generator's training" and "12 steps of" in row[2] for row in plan)

    # An export has the same weights, so the same digest; weights that changed are refused.
    export_run(tmp_path / "source", tmp_path / "export")
    train = resolved.train.model_copy(update={"init_generator_from": str(tmp_path / "export" / "discriminator")})
    objective = resolved.objective.model_copy(update={"generator_sha256": None})
    exported = with_generator_digest(resolved.model_copy(update={"train": train, "objective": objective}))
    assert exported.objective.generator_sha256 == resolved.objective.generator_sha256
    shutil.rmtree(max((tmp_path / "source" / "checkpoints").glob("step-*")))
    refused = pretrain(config, 1, check=False)
    assert refused.returncode == 78
    assert "objective.generator_sha256 was" in refused.stderr
    assert refused.stderr.count("\n") <= 2


@pytest.mark.drill
def test_a_run_with_muon_repeats_bit_for_bit_from_every_cut_and_on_another_number_of_ranks(
    tiny_config: MakeConfig, pretrain: Pretrain, losses: Losses, tmp_path: Path
) -> None:
    """One step of the run is skipped."""
    settings = {
        "optimizer.name": "muon",
        "optimizer.generator": {"lr": 5e-4},  # clips by norms in float64, which do not depend on the number of ranks
        "engine.zero_stage": 0,
        "train.num_steps": 9,
        "train.skip_steps": [5],
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": 9,
    }
    config = tiny_config("run", **settings)
    run_dir = tmp_path / "run"
    pretrain(config, 2)
    expected = losses(run_dir)
    assert len(expected) == 8
    for cut in (7, 4, 1):
        go_back(run_dir, cut)
        pretrain(config, 2)
        assert losses(run_dir) == expected
    go_back(run_dir, 3)
    pretrain(config, 1)
    assert without_norm(losses(run_dir)) == without_norm(expected)

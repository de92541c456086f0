"""Real runs of the architecture `modern` on 1 and 2 ranks: a restart does not change their results."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import go_back

from electra_dist.pretrained.export_run import export_run

MODERN = {
    "model.architecture": "modern",
    "model.embedding_size": 32,
    "model.generator": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 48},
    "model.discriminator": {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 48},
    "model.local_window": 8,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "train.num_steps": 12,
    "checkpoint.every_steps": 5,
    "checkpoint.keep_last": 3,
}

pytestmark = pytest.mark.multiproc


@pytest.mark.drill
@pytest.mark.parametrize("stage", [1, 3])
def test_a_restarted_run_repeats_the_losses_of_the_uninterrupted_one_bit_for_bit(
    stage: int,
    tiny_config: Callable[..., Path],
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
) -> None:
    settings = {**MODERN, "engine.zero_stage": stage}
    config, run_dir = tiny_config("run", **settings), tmp_path / "run"
    pretrain(config, 2)
    uninterrupted = losses(run_dir)
    assert len(uninterrupted) == 12

    go_back(run_dir, 5)
    pretrain(config, 2)
    repeated = losses(run_dir)
    assert repeated == uninterrupted

    refused = pretrain(config, 1, "model.architecture=bert", check=False)
    assert refused.returncode == 78
    assert "model" in refused.stderr + refused.stdout

    folders = export_run(run_dir, tmp_path / "export").folders
    assert sorted(folders) == ["discriminator", "generator"]
    from_export = {**settings, "train.init_from": str(tmp_path / "export"), "train.num_steps": 2}
    pretrain(tiny_config("continued", **from_export), 1)
    first_loss = losses(tmp_path / "continued")[0][1]
    assert first_loss < uninterrupted[0][1]

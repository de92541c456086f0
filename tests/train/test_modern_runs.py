"""Real runs of the architecture `modern` on 1 and 2 ranks: a restart does not change their results."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.modern_models import hugging_face_config
from support.real_runs import VOCAB_SIZE, go_back
from transformers import ModernBertForMaskedLM

from electra_dist.config import ModelConfig
from electra_dist.config.load import load_config
from electra_dist.pretrained.export import export_run

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
    assert "Traceback" not in refused.stderr + refused.stdout

    folders = export_run(run_dir, tmp_path / "export").folders
    assert sorted(folders) == ["discriminator", "generator"]
    from_export = {**settings, "train.init_from": str(tmp_path / "export"), "train.num_steps": 2}
    pretrain(tiny_config("continued", **from_export), 1)
    first_loss = losses(tmp_path / "continued")[0][1]
    assert first_loss < uninterrupted[0][1]


@pytest.mark.drill
def test_one_two_and_four_ranks_have_the_same_losses_to_rounding(
    tiny_config: Callable[..., Path],
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
) -> None:
    by_ranks = {}
    for ranks in (1, 2, 4):
        settings = {**MODERN, "train.num_steps": 6, "train.micro_batch": 4}
        pretrain(tiny_config(f"ranks-{ranks}", **settings), ranks)
        by_ranks[ranks] = [record[1:4] for record in losses(tmp_path / f"ranks-{ranks}")]
    for ranks in (2, 4):
        assert len(by_ranks[ranks]) == 6
        for numbers, expected in zip(by_ranks[ranks], by_ranks[1]):
            assert numbers == pytest.approx(expected, rel=1e-4)


@pytest.mark.drill
def test_a_run_goes_on_from_a_folder_of_transformers_and_another_one_from_it_with_longer_windows(
    tiny_config: Callable[..., Path],
    pretrain: Callable[..., subprocess.CompletedProcess[str]],
    losses: Callable[[Path], list[tuple]],
    tmp_path: Path,
) -> None:
    """The folder is a masked language model, as ModernBERT and Ettin are released; both towers start from it."""
    tower = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 48}
    settings = {**MODERN, "model.generator": tower, "train.num_steps": 2, "checkpoint.every_steps": 2}
    model: ModelConfig = load_config(tiny_config("first", **settings)).model
    torch.manual_seed(3)
    theirs = ModernBertForMaskedLM(hugging_face_config(model, model.discriminator))
    theirs.save_pretrained(tmp_path / "released")
    sources = {
        "train.init_from": str(tmp_path / "released"),
        "train.init_generator_from": str(tmp_path / "released"),
    }

    log = pretrain(tiny_config("first", **settings, **sources), 1)

    assert f"the weights of {tmp_path / 'released'}" in log.stdout + log.stderr
    exported = export_run(tmp_path / "first", tmp_path / "export").folders["generator"]
    ours = ModernBertForMaskedLM.from_pretrained(exported)
    assert ours.config.vocab_size == VOCAB_SIZE
    difference = (ours.model.layers[1].mlp.Wi.weight - theirs.model.layers[1].mlp.Wi.weight).abs().max()
    assert 0 < difference < 0.01  # two small updates away from the weights of the folder

    extended = {
        **settings,
        "train.init_from": str(tmp_path / "first"),
        "model.max_positions": 4096,
        "model.global_rope_theta": 1e6,
    }
    pretrain(tiny_config("extended", **extended), 1)
    assert len(losses(tmp_path / "extended")) == 2

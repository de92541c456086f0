"""The global norm of the gradients with which the optimizer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from electra_dist.engine.foreach_optimizers import ForeachAdamW
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import fit
from electra_dist.pretrained.encoder import Pretrained


def norms_of_steps(encoder: Pretrained, data: Path, clip_norm: float, patch: pytest.MonkeyPatch) -> list[float]:
    """Return the global norm of all gradients at each optimizer step of a short training."""
    task = TextTask(TextSpec(name="custom", text_a="text", text_b=None, label="label"), data)
    settings = FinetuneConfig(epochs=4, batch=4, max_length=8, clip_norm=clip_norm)
    norms: list[float] = []
    step_of_optimizer = ForeachAdamW.step

    def recording_step(self: ForeachAdamW, *args: object) -> object:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.cat([gradient.flatten().double() for gradient in gradients]).norm().item())
        return step_of_optimizer(self, *args)  # type: ignore[arg-type]

    with patch.context() as context:
        context.setattr(ForeachAdamW, "step", recording_step)
        fit(task.model(encoder, settings, 0), encoder.tower.num_layers, task.examples(encoder, settings), settings, 0)
    return norms


def test_gradients_above_the_limit_are_scaled_down_to_it_and_others_are_not_changed(
    encoder: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}.tsv").write_text("text\tlabel\n" + "the dog\tyes\nthe bird\tno\n" * 4)

    unclipped = norms_of_steps(encoder, tmp_path, 1e9, monkeypatch)
    limit = unclipped[0] / 2
    clipped = norms_of_steps(encoder, tmp_path, limit, monkeypatch)

    assert len(clipped) == len(unclipped) == 8
    assert clipped[0] == pytest.approx(limit, rel=1e-4)  # the weights, and so the gradients, are the same at first
    assert max(clipped) <= limit * (1 + 1e-4)
    not_limited = norms_of_steps(encoder, tmp_path, 2 * max(unclipped), monkeypatch)
    assert not_limited == unclipped
    assert FinetuneConfig().clip_norm == 1.0  # google-research/electra, model/optimization.py

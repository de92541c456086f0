"""Check the shipped `modern` configs: their parameters and FLOPs are those of Hugging Face's ModernBERT modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.modern_models import hugging_face_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import ModernBertForMaskedLM, ModernBertForTokenClassification

from electra_dist.compare.comparison_config import CompareConfig
from electra_dist.compare.comparison_runs import make_plan
from electra_dist.config.load import load_config, load_section
from electra_dist.config.rules import keys_without_effect
from electra_dist.model.counts import parameter_counts, token_flops

CONFIGS = Path(__file__).parents[2] / "configs"
# Whole millions of parameters of the released ModernBERT models of these shapes, with their token head.
PUBLISHED = {"modern_150m": 149, "modern_400m": 395}


def forward_flops(module: torch.nn.Module, num_tokens: int) -> int:
    """Return the FLOPs of a forward pass of one row of `num_tokens` tokens, as torch counts them.

    Args:
        module: a Hugging Face module on the meta device, which computes nothing.
        num_tokens: tokens of the row.
    """
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(inputs_embeds=torch.zeros(*ids.shape, module.config.hidden_size, device="meta"))
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["modern_base", "modern_large", "modern_150m", "modern_400m", "modern_base_8192"])
def test_parameters_and_flops_are_those_of_hugging_faces_modules(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    model = config.model
    counts = parameter_counts(model)
    num_tokens = 48  # within a window, where Hugging Face's module computes the same pairs of tokens
    flops = token_flops(model, num_tokens, config.objective)
    with torch.device("meta"):
        discriminator = ModernBertForTokenClassification(
            hugging_face_config(model, model.discriminator, num_labels=1)
        ).eval()
        masked_lm = ModernBertForMaskedLM(hugging_face_config(model, model.discriminator)).eval()

    assert counts.discriminator == discriminator.num_parameters()
    # Training costs three forward passes.
    assert flops.discriminator == pytest.approx(3 * forward_flops(discriminator, num_tokens) / num_tokens, rel=1e-6)
    if name in PUBLISHED:
        assert masked_lm.num_parameters() // 10**6 == PUBLISHED[name]
    if model.generator.hidden_size == model.embedding_size:
        with torch.device("meta"):
            generator = ModernBertForMaskedLM(hugging_face_config(model, model.generator)).eval()
        tables = model.vocab_size * model.embedding_size + model.embedding_size  # counted with the discriminator
        assert counts.generator_only == generator.num_parameters() - tables
    assert keys_without_effect(config) == {}


def test_the_second_config_of_a_pair_reads_as_many_tokens_a_step_and_goes_on_from_the_first() -> None:
    first, second = (load_config(CONFIGS / f"modern_base_{length}.yaml") for length in (512, 8192))
    assert second.train.init_from == first.run_dir
    assert second.data.seq_len * second.train.global_batch == first.data.seq_len * first.train.global_batch
    changed = {"max_positions", "global_rope_theta"}
    assert second.model.model_dump(exclude=changed) == first.model.model_dump(exclude=changed)
    assert (second.data.seq_len, second.model.global_rope_theta) == (8192, 160_000.0)


def test_the_arms_of_the_comparison_have_equal_flops_and_layers_of_equal_size() -> None:
    file = CONFIGS / "compare_tiny_modern.yaml"
    plan = make_plan(load_section(file, CompareConfig), file)
    assert [run.name for run in plan.runs[:2]] == ["bert-seed1", "modern-seed1"]
    for run in plan.runs:
        assert run.flops(run.marks[-1]) == pytest.approx(plan.budget_flops, rel=1e-3)
    bert, modern = (run.config for run in plan.runs[:2])
    assert modern.model.architecture == "modern"
    assert (bert.objective, bert.data, bert.optimizer.lr) == (modern.objective, modern.data, modern.optimizer.lr)
    size_of = {}
    for config in (bert, modern):
        tables = config.model.embedding_size * config.model.vocab_size
        size_of[config.model.architecture] = parameter_counts(config.model).discriminator - tables
    assert size_of["modern"] == pytest.approx(size_of["bert"], rel=0.02)

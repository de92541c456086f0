"""FLOPs against the published figures and against torch's own counter; peaks only for devices that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.config.load import load_config
from electra_dist.gpu_models import peak_flops
from electra_dist.model.counts import mfu, run_flops, token_flops

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "discriminator", "generator", "total"),
    [
        ("large_25pct_mask", 1.969, 0.200, 2.169),
        ("base_size", None, None, 0.668),
        ("small", None, None, 0.070),
    ],
)
def test_published_figures(name: str, discriminator: float | None, generator: float | None, total: float):
    config = load_config(CONFIGS / f"{name}.yaml")
    flops = token_flops(config.model, config.data.seq_len, config.objective)
    assert round(flops.total / 1e9, 3) == total
    if discriminator is not None:
        assert round(flops.discriminator / 1e9, 3) == discriminator
        assert round(flops.generator / 1e9, 3) == generator


def test_forward_count_equals_torchs_counter_on_hugging_faces_modules():
    seq_len, rows = 16, 2
    tower = TowerConfig(hidden_size=32, num_layers=3, num_heads=4, intermediate_size=96)
    model = ModelConfig(vocab_size=200, embedding_size=48, discriminator=tower, generator=tower)
    hf = ElectraConfig(
        vocab_size=200,
        embedding_size=48,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        attn_implementation="eager",
    )
    ids = torch.zeros(rows, seq_len, dtype=torch.long)
    detection = token_flops(model, seq_len, ObjectiveConfig()).discriminator
    everywhere = token_flops(model, seq_len, ObjectiveConfig(name="all_tokens_mlm")).discriminator
    copy_gate = 3 * 2 * 32
    for module, expected in (
        (ElectraForPreTraining(hf), detection),
        (ElectraForMaskedLM(hf), everywhere - copy_gate),  # Hugging Face predicts at every position, too
    ):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(ids)
        assert 3 * counter.get_total_flops() == expected * rows * seq_len


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_peaks(name: str, teraflops: float):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "Quadro GV100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "AMD Instinct MI300X",
    ],
)
def test_unknown_devices_have_no_peak(name: str):
    assert peak_flops(name) is None


def test_mfu():
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert mfu(1_000_000, 2.169e9, 8, 989.4e12) == pytest.approx(0.27403, rel=1e-4)


def test_objectives_cost_what_they_compute():
    config = load_config(CONFIGS / "small.yaml")
    model, width, vocab = config.model, 128, 30522

    def flops(**fields: Any) -> Any:
        return token_flops(model, 128, ObjectiveConfig(mask_prob=0.15, **fields))

    rtd, head = flops(), 3 * (2 * 256 * width + 2 * width * vocab)
    detection = 3 * (2 * 256**2 + 2 * 256)
    assert flops(name="rtd_masked_only") == flops(name="adversarial") == rtd
    assert flops(generator="unigram").generator == flops(name="mlm").generator == 0
    assert flops(name="mlm").discriminator == pytest.approx(rtd.discriminator - detection + 0.15 * head)
    assert flops(name="replace_mlm").total == pytest.approx(flops(name="mlm").discriminator + rtd.generator)
    assert flops(name="all_tokens_mlm").discriminator == pytest.approx(rtd.discriminator - detection + head + 3 * 512)
    small_head = 2 * 64 * width + 2 * width * vocab
    both = 2 * (rtd.generator / 3 - 0.15 * small_head) + 2 * 2 * 64 * width + 2 * width * vocab
    assert flops(name="electric").generator == pytest.approx(3 * both)


def test_two_stages_cost_one_tower_after_the_other():
    tower = {"hidden_size": 256, "num_layers": 12, "num_heads": 4, "intermediate_size": 1024}
    settings = [f"model.generator={tower}", "model.sharing=none", "objective.generator_only_steps=250000"]
    config = load_config(CONFIGS / "small.yaml", settings)
    both = token_flops(config.model, 128, ObjectiveConfig(mask_prob=0.15))
    tokens = 128 * 128 * 1e6
    expected = tokens * (both.generator / 4 + (both.discriminator + both.generator / 3) * 3 / 4)
    assert run_flops(config) == pytest.approx(expected, rel=1e-9)

"""The GPU benchmark's own code, on the CPU at toy sizes, with nothing installed but what docs/gpu.md names."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpu_parts import attention, operations
from gpu_parts.recording import Setup
from gpu_parts.steps import SPECIAL, StepBench
from hugging_face import HuggingFace
from torch.nn.attention.flex_attention import flex_attention

from electra_dist.config import ObjectiveConfig
from electra_dist.objectives.masking import mask_rows

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARK = REPOSITORY / "benchmarks" / "gpu.py"


@pytest.mark.sample
def test_the_smoke_run_needs_nothing_but_what_is_listed(
    tmp_path: Path, bare_python: Callable[[Sequence[str]], Path]
) -> None:
    (listed,) = re.findall(r"pip download .* wheels (.*)", (REPOSITORY / "docs" / "gpu.md").read_text())
    search_path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    command = [str(bare_python(listed.split())), str(BENCHMARK), "--smoke", "--output", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": search_path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "out").glob("gpu-smoke-*.json")
    record = json.loads(file.read_text())
    assert list(record)[-13:] == [
        *("ceilings", "profile", "attention", "deepspeed", "steps", "values", "integers"),
        *("heads", "operations", "fusions", "rivals", "more_steps", "modern"),
    ]
    parts = ("ceilings", "profile", "steps", "heads", "operations", "fusions", "more_steps", "modern")
    times = [row for part in parts for row in record[part] if "kernels" not in row]
    assert {row["operation"] for row in times} >= {"copy", "head M=24", "discriminator tail", "step B=1", "step B=4"}
    ours = {"ours, compiled layers (reference)", "ours without mlm_head", "ours, activations again"}
    assert ours <= {row["by"] for row in times}
    assert all(row["ms"] >= 0 for row in times)
    assert {row["dtype"] for row in record["values"]} == {"float32", "bfloat16"}
    assert all(row["right"] for part in ("values", "integers") for row in record[part])
    compiled = [row for row in times if "compiled" in row["by"]]
    assert len(compiled) == 6
    assert all(row["graphs"] > 0 for row in compiled)  # none became eager silently
    assert [row["by"] for row in record["attention"] if "ms" in row] == ["plain"]
    # Deepspeed and transformers are not listed: their cases say so, and the run goes on.
    assert all("not installed" in row["skipped"] for part in ("deepspeed", "rivals") for row in record[part])
    assert "step B=4" in done.stdout


@pytest.mark.drill  # imports deepspeed and transformers, and compiles more
def test_the_smoke_run_with_all_packages(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("gpu-smoke-*.json")
    record = json.loads(file.read_text())
    assert not [row for rows in record.values() if isinstance(rows, list) for row in rows if "failed" in row]
    assert len([row for row in record["deepspeed"] if row["ms"] > 0]) == 2
    assert [row["by"] for row in record["rivals"] if "ms" in row] == [
        "Hugging Face",
        "Hugging Face, gathered",
    ]


def test_large_has_the_slots_of_the_model() -> None:
    ids = torch.randint(5, 30522, (1, operations.LARGE.seq_len))
    masking = mask_rows(ids, SPECIAL, ObjectiveConfig(mask_prob=0.25), 1, 0, torch.arange(1))
    assert masking.position_BN.shape[1] == operations.LARGE.slots == 130
    assert operations.LARGE.masked[0] == operations.LARGE.batch * 130


def test_the_rival_passes_a_mask_of_its_own_type_and_never_waits() -> None:
    """A GPU's attention kernels refuse an fp32 mask with bf16 queries; `meta` tensors refuse to be read."""
    bench = StepBench(Setup("cpu", smoke=True, backends=("reference",)))
    masks: list[tuple[torch.dtype, torch.dtype]] = []
    attend = F.scaled_dot_product_attention

    def recorded(query: torch.Tensor, *args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        masks.append((attn_mask.dtype, query.dtype))
        return attend(query, *args, attn_mask=attn_mask, **kwargs)

    rival = HuggingFace(bench.towers, bench.config.objective, SPECIAL, gathered=True, packed=True)
    rival = rival.to("meta", torch.bfloat16)
    with mock.patch.object(F, "scaled_dot_product_attention", recorded):
        loss, _, _ = rival(bench.ids(2).to("meta"), torch.arange(2, device="meta"), 0, 1)
    loss.backward()
    assert len(masks) == 4  # two layers in each tower
    assert all(mask in (query, torch.bool) for mask, query in masks)


def test_attention_of_the_comparison_equals_float64_by_definition() -> None:
    """Softmax written out for each example alone, against the packed rows that all contenders get."""
    examples = attention.pack(2, 48, [16, 20], "cpu", torch.float64)
    query, key, value = torch.randn(3, 2, 3, 48, 64, dtype=torch.float64)
    out = attention.with_bias(attention.SDPBackend.MATH)(query, key, value, examples, 0.0)
    begin = 0
    for length in (16, 20, 12):
        part = slice(begin, begin + length)
        scores = query[:, :, part] @ key[:, :, part].transpose(2, 3) / 8
        torch.testing.assert_close(out[:, :, part], scores.softmax(-1) @ value[:, :, part])
        begin += length
    assert examples.begin_E.tolist() == [0, 16, 36, 48, 64, 84, 96]
    assert examples.longest == 20


def test_flex_and_the_bias_hide_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = attention.pack(2, 256, [100, 60], "cpu", torch.float32)
    query, key, value = torch.randn(3, 2, 3, 256, 64)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)  # compiled, it needs a GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being slow uncompiled
        out = attention.flex(query, key, value, examples, 0.0)
    plain = attention.with_bias(attention.SDPBackend.MATH)(query, key, value, examples, 0.0)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", [attention.flash_varlen, attention.our_flash])
def test_flash_takes_the_operator_as_torch_declares_it(attend: attention.Attention) -> None:
    examples = attention.pack(2, 48, [16, 20], "cpu", torch.bfloat16)
    examples = examples._replace(begin_E=examples.begin_E.to("meta"))
    inputs = [torch.randn(2, 3, 48, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    out = attend(*inputs, examples, 0.1)
    assert out.shape == inputs[0].shape
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in inputs]


@pytest.mark.parametrize(("drops", "right"), [(0.1, True), (0.0, False), (0.125, False)])
def test_a_backend_with_another_dropout_is_found(drops: float, right: bool) -> None:
    """One that ignores dropout, and one that rounds p = 0.1 to 2/16, as some cuDNN kernels do."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, examples: Any, p: float) -> torch.Tensor:
        probabilities = (query @ key.transpose(2, 3)).softmax(-1)
        return F.dropout(probabilities, drops) @ value

    torch.manual_seed(0)
    assert attention.dropped_share(attend, 2, 0.1, "cpu", torch.float32)["right"] == right

"""The scaling model: bytes against the collectives of real steps, time and fabrics against sums by hand."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import REPOSITORY, free_port

from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.planning.multi_node_scaling import (
    Cluster,
    bytes_on_wire,
    parse_fabric,
    persistent_parameters,
    scale,
    step_seconds,
)
from electra_dist.planning.plan_tables import print_plan

WORKER = Path(__file__).parent / "wire_worker.py"
SENT = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}  # shares of (W - 1) / W


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    done = subprocess.run([*command, str(WORKER)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("COUNTED")).split(" ", 1)[1])


@pytest.mark.multiproc
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_those_of_real_steps(counted: dict[str, Any], stage: int, precision: Any) -> None:
    [run] = [r for r in counted["runs"] if (r["stage"], r["precision"]) == (stage, precision)]
    ranks = 2
    sent = sum(SENT[name] * size * (ranks - 1) / ranks for name, size in run["calls"])
    predicted = bytes_on_wire(
        sum(run["sizes"]),
        stage,
        precision,
        ranks,
        micro_batches=counted["micro_batches"],
        persistent=persistent_parameters(run["sizes"]),
    )
    # Beside the model's tensors only norms, flags and padding to equal parts.
    assert predicted <= sent <= predicted * 1.001


def test_one_rank_sends_nothing_and_many_send_nearly_all() -> None:
    assert bytes_on_wire(10**6, 1, "bf16", 1) == 0
    assert bytes_on_wire(10**6, 1, "bf16", 4) == 3 * 2 * 10**6 * 3 / 4
    assert bytes_on_wire(10**6, 0, "bf16", 10**6) == pytest.approx(8e6, rel=1e-5)  # autocast: fp32 gradients


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400Gb", 50e9), ("8x400Gb", 400e9), ("50GB", 50e9), ("2.5Gbit", 312.5e6), ("1Tb", 125e9)],
)
def test_fabrics(text: str, bytes_per_s: float) -> None:
    assert parse_fabric(text) == bytes_per_s


@pytest.mark.parametrize("text", ["400", "fast", "400Kb", "x400Gb", ""])
def test_what_is_no_fabric_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--fabric"):
        parse_fabric(text)


def _cluster(**changed: Any) -> Cluster:
    fields = {
        "nodes": 8,
        "gpu": "H200",
        "gpus_per_node": 8,
        "fabric_bytes_per_s": 50e9,
        "gpu_tokens_per_s": 200_000.0,
        "gpu_hour_price": None,
    }
    return Cluster(**{**fields, **changed})


def test_a_plan_by_hand() -> None:
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml")
    one, *_, eight = scale(config, _cluster())
    assert [one.nodes, one.ranks, one.micro_batches] == [1, 8, 8]
    assert [eight.nodes, eight.ranks, eight.micro_batches] == [8, 64, 1]
    # 2048 rows of 512 over 64 GPUs of 200,000 tokens/s; 354.65 M parameters of 2 bytes, sent three times.
    assert eight.compute_s == pytest.approx(2048 * 512 / 64 / 200_000)
    assert eight.wire_bytes == pytest.approx(3 * 2 * 354.65e6 * 63 / 64, rel=1e-4)
    assert eight.communication_s == pytest.approx(eight.wire_bytes / 50e9)
    assert one.communication_s == pytest.approx(one.wire_bytes / 450e9)  # NVLink: no fabric between
    assert eight.step_s == step_seconds(eight.compute_s, eight.wire_bytes, 50e9)
    assert eight.days == pytest.approx(400_000 * eight.step_s / 86_400)
    assert eight.gpu_hours == pytest.approx(64 * 24 * eight.days)
    assert one.efficiency > eight.efficiency > 0.5


def test_what_cannot_be_planned_is_refused() -> None:
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml")
    with pytest.raises(UserError, match="24 GPUs do not share"):
        scale(config, _cluster(nodes=3))
    with pytest.raises(UserError, match="links within a node is not known"):
        scale(config, _cluster(gpu="L4"))


def test_the_printed_plan_says_what_it_assumes() -> None:
    out = io.StringIO()
    config = load_config(REPOSITORY / "configs" / "large_25pct_mask.yaml")
    print_plan(config, stream=out, cluster=_cluster(gpu_hour_price=2.0))
    text = out.getvalue()
    assert "Scaling on H200, 400 Gb/s a node" in text
    for words in ("cost", "200k tok/s a GPU, given", "nothing of one is hidden", "latency"):
        assert words in text

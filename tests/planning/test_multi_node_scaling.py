"""The scaling model: bytes against the collectives of real steps; time and bandwidth against sums by hand."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import REPOSITORY, free_port

from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.planning.multi_node_scaling import Cluster, bytes_on_wire, parse_fabric, scale
from electra_dist.planning.plan import make_plan
from electra_dist.planning.plan_page import print_plan

WORKER = Path(__file__).parent / "wire_worker.py"
LARGE_CONFIG = REPOSITORY / "configs" / "large_25pct_mask.yaml"
WITHOUT_OVERLAP = "engine.overlap_communication=false"

# How often a ring sends each element of a message, in units of (W - 1) / W for W ranks. An all-reduce is a
# reduce-scatter followed by an all-gather.
RING_PASSES = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}
PERSISTENT = 100_000  # elements; DeepSpeed's stage3_param_persistence_threshold


@pytest.fixture(scope="module")
def measured_steps() -> dict[str, Any]:
    """Collectives of one real step of two ranks, for every ZeRO stage and precision; see wire_worker.py.

    `runs` has the stage, the precision, `sizes` (elements of each parameter tensor) and `calls`, which are pairs of
    the collective's name and the bytes of its whole message. `micro_batches` is the number of micro-batches in a step.
    """
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    command = [deepspeed, "--num_gpus", "2", "--master_port", str(free_port()), str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result_line = next(line for line in done.stdout.splitlines() if line.startswith("COUNTED"))
    return json.loads(result_line.removeprefix("COUNTED "))


@pytest.mark.multiproc
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_predicted_bytes_equal_those_of_the_collectives_of_a_real_step(
    measured_steps: dict[str, Any], stage: int, precision: Any
) -> None:
    ranks = 2
    [run] = [run for run in measured_steps["runs"] if (run["stage"], run["precision"]) == (stage, precision)]

    predicted = bytes_on_wire(
        sum(run["sizes"]),
        stage,
        precision,
        ranks,
        micro_batches=measured_steps["micro_batches"],
        persistent=sum(size for size in run["sizes"] if size < PERSISTENT),
    )

    sent = sum(RING_PASSES[name] * num_bytes * (ranks - 1) / ranks for name, num_bytes in run["calls"])
    # A step also sends norms, flags and padding to equal parts: less than a thousandth.
    assert predicted <= sent <= predicted * 1.001


def test_one_rank_sends_nothing_and_many_ranks_send_almost_every_element() -> None:
    # ZeRO 1 in bf16 sends each element three times in 2 bytes; each of 4 ranks sends 3/4 of a message.
    assert bytes_on_wire(10**6, 1, "bf16", 1) == 0
    assert bytes_on_wire(10**6, 1, "bf16", 4) == 3 * 2 * 10**6 * 3 / 4
    # Stage 0 in bf16 is autocast: it sends fp32 gradients, 4 bytes, twice.
    assert bytes_on_wire(10**6, 0, "bf16", 10**6) == pytest.approx(8e6, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400Gb", 50e9), ("8x400Gb", 400e9), ("50GB", 50e9), ("2.5Gbit", 312.5e6), ("1Tb", 125e9)],
)
def test_a_bandwidth_is_read_in_bits_or_bytes_with_the_number_of_links(text: str, bytes_per_s: float) -> None:
    assert parse_fabric(text) == bytes_per_s


@pytest.mark.parametrize("text", ["400", "fast", "400Kb", "x400Gb", ""])
def test_a_text_that_is_not_a_bandwidth_is_refused_with_the_name_of_the_option(text: str) -> None:
    with pytest.raises(UserError, match="--fabric"):
        parse_fabric(text)


def h200_cluster(**changes: Any) -> Cluster:
    """Return a cluster of 8 nodes of 8 H200, each of 200,000 tokens/s, with 400 Gb/s (50 GB/s) per node."""
    fields = {
        "nodes": 8,
        "gpu": "H200",
        "gpus_per_node": 8,
        "fabric_bytes_per_s": 50e9,
        "gpu_tokens_per_s": 200_000.0,
        "gpu_hour_price": None,
    }
    return Cluster(**{**fields, **changes})


def test_the_plan_of_electra_large_on_one_and_eight_nodes_equals_the_sums_by_hand() -> None:
    """A step has 2048 rows of 512 tokens; ZeRO 1 in bf16 sends gradients of 4 bytes twice and weights of 2 bytes once.

    There are 354.65 M parameters. Links and memories reach 80 % of their bandwidth. With one micro-batch, the update
    moves 26 bytes for each parameter (10 for the sum, 16 for exchange and norm), and 38 bytes more for each parameter
    that the GPU updates. It then waits for 80 launches of 10 us.
    """
    network_bytes_per_s = 0.8 * 50e9
    nvlink_bytes_per_s = 0.8 * 450e9

    plans = scale(load_config(LARGE_CONFIG, [WITHOUT_OVERLAP, "train.micro_batch=32"]), h200_cluster())

    one_node = plans[0]
    eight_nodes = plans[-1]
    assert [one_node.nodes, one_node.ranks, one_node.micro_batches] == [1, 8, 8]
    assert [eight_nodes.nodes, eight_nodes.ranks, eight_nodes.micro_batches] == [8, 64, 1]

    assert eight_nodes.compute_s == pytest.approx(2048 * 512 / 64 / 200_000)
    assert eight_nodes.wire_bytes == pytest.approx((2 * 4 + 2) * 354.65e6 * 63 / 64, rel=1e-4)
    assert eight_nodes.communication_s == pytest.approx(eight_nodes.wire_bytes / network_bytes_per_s)
    assert one_node.communication_s == pytest.approx(one_node.wire_bytes / nvlink_bytes_per_s)
    assert eight_nodes.update_s == pytest.approx(354.65e6 * (26 + 38 / 64) / (0.8 * 4.8e12) + 0.0008, rel=1e-4)

    parts_s = eight_nodes.compute_s + eight_nodes.communication_s + eight_nodes.update_s
    assert eight_nodes.step_s == pytest.approx(parts_s)
    assert eight_nodes.days == pytest.approx(400_000 * eight_nodes.step_s / 86_400)
    assert eight_nodes.gpu_hours == pytest.approx(64 * 24 * eight_nodes.days)
    assert one_node.efficiency > eight_nodes.efficiency > 0.4


def test_few_rows_of_a_micro_batch_take_the_time_of_their_launches() -> None:
    """48 layers have 52 operators each, 380 are beside them, and a launch takes 10 us: 28.76 ms, or 5,752 tokens."""
    plans = {
        rows: scale(load_config(LARGE_CONFIG, [f"train.micro_batch={rows}"]), h200_cluster())[0] for rows in (4, 8, 32)
    }

    assert plans[4].compute_s == pytest.approx(2048 / 8 / 4 * 0.02876)
    assert plans[8].compute_s == pytest.approx(plans[4].compute_s / 2)
    assert plans[32].compute_s == pytest.approx(2048 * 512 / 8 / 200_000)
    assert plans[4].utilisation < plans[8].utilisation < plans[32].utilisation < 1


def test_on_many_gpus_the_plan_has_the_smaller_micro_batch_that_training_uses() -> None:
    """512 GPUs have 4 of 2,048 rows each; the config's micro-batch has 64."""
    config = load_config(LARGE_CONFIG)
    fitted = load_config(LARGE_CONFIG, ["train.micro_batch=4"])
    assert scale(config, h200_cluster(nodes=64))[-1] == scale(fitted, h200_cluster(nodes=64))[-1]
    assert scale(config, h200_cluster(nodes=64))[-1].micro_batches == 1


@pytest.mark.parametrize("fabric_bytes_per_s", [50e9, 400e9])
def test_overlap_hides_gradients_behind_two_thirds_of_the_last_micro_batch_and_no_weights(
    fabric_bytes_per_s: float,
) -> None:
    cluster = h200_cluster(fabric_bytes_per_s=fabric_bytes_per_s)
    plain = scale(load_config(LARGE_CONFIG, [WITHOUT_OVERLAP]), cluster)[-1]

    overlapped = scale(load_config(LARGE_CONFIG), cluster)[-1]

    gradient_s = plain.communication_s * 8 / 10
    hidden_s = min(gradient_s, 2 / 3 * plain.compute_s)
    assert overlapped.communication_s == pytest.approx(plain.communication_s - hidden_s)
    assert overlapped.step_s == pytest.approx(plain.step_s - hidden_s)


def test_a_cluster_that_cannot_share_the_batch_or_has_unknown_links_is_refused() -> None:
    config = load_config(LARGE_CONFIG)

    with pytest.raises(UserError, match="24 GPUs do not share"):
        scale(config, h200_cluster(nodes=3))
    with pytest.raises(UserError, match="links within a node is not known"):
        scale(config, h200_cluster(gpu="L4"))


def test_the_printed_plan_states_the_assumptions_of_the_scaling_model() -> None:
    stream = io.StringIO()

    print_plan(make_plan(load_config(LARGE_CONFIG), cluster=h200_cluster(gpu_hour_price=2.0)), stream)

    text = stream.getvalue()
    assert "Scaling on H200, 400 Gb/s a node" in text
    phrases = ("cost", "200k tok/s a GPU, given", "nothing of one is hidden", "latency", "MFU", "starts an operator")
    for phrase in phrases:
        assert phrase in text

"""Predict the time of a step of a large model on one H200 from counts. It is a prediction, never a measurement.

    PYTHONPATH=tests python tests/pretended_gpu/predict.py                        # 64 rows, as the paper trained
    PYTHONPATH=tests python tests/pretended_gpu/predict.py --mode fast            # large_fast.yaml
    PYTHONPATH=tests python tests/pretended_gpu/predict.py --mode "fast, flash3"  # the same with FlashAttention 3
    PYTHONPATH=tests python tests/pretended_gpu/predict.py --mode "large modern"  # modern_400m.yaml, not compiled
    PYTHONPATH=tests python tests/pretended_gpu/predict.py --set products=700     # with another assumption

Counted are the sizes of all products, the copies and the number of kernels (`recorded.json`, from the pretended GPU),
and the bytes of all other kernels (`support/rehearsal.py`, on torch's device `meta`). Assumed are speeds; each is
printed with its range and the part of `benchmarks/gpu.py` that will test it. A part takes the sum over its kernels of
the longer of its FLOPs and its bytes.

Limits: rows are full, and each holds one example, for which attention costs most. In windows, attention is taken to
compute whole blocks of 128 keys. What Inductor would fuse is not counted: `large modern` is eager, and its config is
compiled. Evaluation, checkpoints and waits for data are left out. The columns `best` and `worst` take all assumptions
at one end of their ranges, which is wider than likely.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pretended_gpu.drill import MODES
from support.rehearsal import DeviceCall, Figures, Launch, build, rehearse, step_input

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.gpu_models import peak_flops
from electra_dist.model.counts import mfu, parameter_counts, token_flops
from electra_dist.planning.multi_node_scaling import Cluster, scale

REPOSITORY = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).resolve().parent / "recorded.json"
GPU = "H200"


class Subject(NamedTuple):
    """What is predicted."""

    recorded: str  # mode of the drill whose counts are used
    attention: str = "flash"  # whose speeds are assumed


SUBJECTS = {
    "large": Subject("large"),
    "large 128": Subject("large 128"),
    "fast": Subject("fast"),
    "fast, flash3": Subject("fast", attention="flash3"),
    "fast 128": Subject("fast 128"),
    "fast 128, flash3": Subject("fast 128", attention="flash3"),
    "large modern": Subject("large modern"),
}
FABRIC = 8 * 50e9  # bytes per second of a node with eight links of 400 Gb/s
_UPDATE_BYTES = 42  # a parameter: norm, clipping, AdamW on fp32 masters and moments, the bf16 weight
_SUM_BYTES = 18  # a parameter whose gradient no product adds: cast to fp32, then added


class Assumption(NamedTuple):
    """Speed or cost that no GPU has confirmed, with the range in which it is expected."""

    value: float
    bad: float
    good: float
    unit: str
    meaning: str
    tested_by: str  # part of benchmarks/gpu.py


ASSUMPTIONS = {
    "products": Assumption(620, 540, 700, "TFLOP/s", "matrix products of the model in bf16", "ceilings"),
    "bandwidth": Assumption(4.2, 3.9, 4.5, "TB/s", "a copy in device memory (data sheet: 4.8)", "ceilings"),
    "elementwise": Assumption(0.85, 0.75, 0.95, "of the copy", "torch's element-wise kernels and sums", "profile"),
    "norms": Assumption(0.65, 0.5, 0.85, "of the copy", "this project's kernels", "operations"),
    "attention_forward": Assumption(200, 170, 240, "TFLOP/s", "FlashAttention with dropout", "attention"),
    "attention_backward": Assumption(150, 110, 185, "TFLOP/s", "its backward pass in a fixed order", "attention"),
    "plain_forward": Assumption(280, 220, 340, "TFLOP/s", "FlashAttention without dropout", "attention"),
    "plain_backward": Assumption(210, 165, 260, "TFLOP/s", "its backward pass in a fixed order", "attention"),
    "flash3_forward": Assumption(400, 320, 480, "TFLOP/s", "FlashAttention 3", "attention"),
    "flash3_backward": Assumption(300, 230, 380, "TFLOP/s", "its backward pass in a fixed order", "attention"),
    "gap": Assumption(1.2, 2.0, 0.5, "us", "start of a kernel after the one before it", "profile"),
    "waits": Assumption(0.5, 2.0, 0.0, "ms", "the device waits for the host at an update", "deepspeed"),
}
_PRODUCTS = ("aten.mm.", "aten.addmm", "aten._addmm")
_NAME_OF_PRODUCT = re.compile(r" m(\d+) n(\d+) k(\d+) in(\w+) out(\w+)")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Kernels that move more than their arguments once: the row kernel reads the logits twice and writes their gradient.
# Those of modern read what they overwrite, and the rotary one leaves the value, a third of its argument, alone.
_PASSES = {"row_kernel": 3, "gelu_gradient_kernel": 1.5, "geglu_backward_kernel": 5 / 3, "rotary_kernel": 4 / 3}
# The part of a kernel, and the assumed speed of those like it.
_PART_OF_KERNEL = {
    "norm_forward_kernel": ("dropout + add + norm", "norms"),
    "norm_backward_kernel": ("dropout + add + norm", "norms"),
    "gelu_gradient_kernel": ("GELU", "elementwise"),
    "geglu_forward_kernel": ("GeGLU", "elementwise"),
    "geglu_backward_kernel": ("GeGLU", "elementwise"),
    "rotary_kernel": ("rotary positions", "elementwise"),
    "join_gradients_kernel": ("bias sums, gradients of qkv", "elementwise"),
    "sum_strips_kernel": ("bias sums, gradients of qkv", "elementwise"),
}
_BLOCK = 128  # queries, and keys, that FlashAttention multiplies at once for heads of width 64
# Columns that a kernel writes of the partial sums that the kernels of a layer share: an argument, how often it counts.
_SUMMED_COLUMNS = {"norm_backward_kernel": ("hidden", 3), "gelu_gradient_kernel": ("width", 1)}


def predict(
    config: Config, figures: Figures, recorded: Mapping[str, Any], speeds: Mapping[str, float], attention: str
) -> Counter[str]:
    """Return the predicted milliseconds of each part of a micro-batch, the update's share included.

    `attention` is "flash" or "flash3".
    """
    parts: Counter[str] = Counter()
    bytes_per_ms = speeds["bandwidth"] * 1e9
    summed = 0  # parameters whose gradients products add to the sums
    for name, count in recorded["products"].items():
        match = _NAME_OF_PRODUCT.search(name)
        assert match is not None, name
        m, n, k = (int(number) for number in match.groups()[:3])
        out = _BYTES[match[5]]
        is_sum = match[4] != "fp32" and match[5] == "fp32" and config.model.padded_vocab_size not in (m, n)
        num_bytes = _BYTES[match[4]] * (m * k + k * n) + out * m * n * (2 if is_sum else 1)
        by_flops, by_bytes = 2e-9 * m * n * k / speeds["products"], num_bytes / bytes_per_ms
        part = "products limited by FLOPs" if by_flops > by_bytes else "products limited by memory"
        parts[part] += count * max(by_flops, by_bytes)
        summed += count * m * n if is_sum else 0
    for call in figures.device_calls:
        if not call.name.startswith(_PRODUCTS):
            _add_call(parts, call, config, speeds, attention)
    for launch in figures.launches:
        part, speed = _PART_OF_KERNEL.get(launch.kernel, ("kernels of the heads", "norms"))
        parts[part] += _moved_bytes(launch) / (bytes_per_ms * speeds[speed])
    num_parameters = parameter_counts(config.model, config.objective).total
    parts["other gradient sums"] = _SUM_BYTES * max(0, num_parameters - summed) / bytes_per_ms
    micro_batch = recorded["micro_batch"]
    parts["copies"] = 2 * micro_batch["copied_mb"] * 1e6 / bytes_per_ms
    num_kernels = sum(micro_batch[kind] for kind in ("launch", "product", "copies", "fill"))
    parts["gaps between kernels"] = num_kernels * speeds["gap"] / 1e3
    update_ms = _UPDATE_BYTES * num_parameters / bytes_per_ms + speeds["waits"]
    parts["update, its share"] = update_ms * config.train.micro_batch / config.train.global_batch
    return parts


def _add_call(
    parts: Counter[str], call: DeviceCall, config: Config, speeds: Mapping[str, float], attention: str
) -> None:
    """Add the time of an operator of torch that is no product to its part."""
    if "attention" in call.name:
        kind = "flash3" if attention == "flash3" else "attention" if config.model.attention_dropout else "plain"
        hidden = max(shape[-2] * shape[-1] for shape in call.shapes if len(shape) == 3)
        tokens = config.train.micro_batch * config.data.seq_len
        flops = 4.0 * tokens * _mean_keys(config) * hidden  # forward; the backward pass has 2.5 times as many
        if "backward" in call.name:
            parts["attention"] += 2.5e-9 * flops / speeds[f"{kind}_backward"]
        else:
            parts["attention"] += 1e-9 * flops / speeds[f"{kind}_forward"]
        return
    ms = call.num_bytes / (speeds["bandwidth"] * speeds["elementwise"] * 1e9)
    if "gelu" in call.name:
        parts["GELU"] += ms
    elif call.name in ("aten.sum.dim_IntList", "aten.stack.default", "aten.cat.default"):
        parts["bias sums, gradients of qkv"] += ms
    else:
        parts["small operators"] += ms


def _mean_keys(config: Config) -> float:
    """Return how many keys a query is multiplied by, on average over the layers, of which both towers have as many."""
    model, seq_len = config.model, config.data.seq_len
    num_layers = model.discriminator.num_layers
    # The window of a block of queries reaches into the blocks of keys on both sides.
    num_blocks = 1 + 2 * math.ceil(model.local_window // 2 / _BLOCK)
    in_window = min(seq_len, num_blocks * _BLOCK)
    num_global = sum(model.is_global(number) for number in range(num_layers))
    return (num_global * seq_len + (num_layers - num_global) * in_window) / num_layers


def _moved_bytes(launch: Launch) -> float:
    """Return the bytes that a Triton launch moves: its tensors, and of shared partial sums what it writes."""
    shared = written = 0
    if launch.kernel in _SUMMED_COLUMNS:
        num_strips, num_columns = launch.tensors["partials_ptr"]
        argument, times = _SUMMED_COLUMNS[launch.kernel]
        shared = 4 * num_strips * num_columns
        written = 4 * num_strips * times * launch.words[argument]
    return (launch.num_bytes - shared) * _PASSES.get(launch.kernel, 1) + written


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prediction of a mode with its assumptions."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mode", choices=SUBJECTS, default="large")
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace an assumption")
    options.add_argument("--record", type=Path, default=RECORD, help="record of the drill")
    arguments = options.parse_args(argv)
    chosen = {}
    for setting in arguments.set:
        name, _, value = setting.partition("=")
        if name not in ASSUMPTIONS:
            options.error(f"--set {setting}: choose one of {', '.join(ASSUMPTIONS)}")
        chosen[name] = float(value)
    subject = SUBJECTS[arguments.mode]
    mode = MODES[subject.recorded]
    rows = [override for override in mode.overrides if override.startswith("train.micro_batch=")]
    config = load_config(REPOSITORY / "configs" / mode.file, rows)  # the update's share is that of the file's batch
    module = build(config)
    rehearse(module, lambda: step_input(config, module, 1))  # what a process tries once and remembers does not count
    figures = rehearse(module, lambda: step_input(config, module, config.train.micro_batch))
    recorded = json.loads(arguments.record.read_text(encoding="ascii"))[mode.name]
    columns = []
    for end in ("value", "good", "bad"):
        speeds = {name: getattr(assumption, end) for name, assumption in ASSUMPTIONS.items()}
        columns.append(predict(config, figures, recorded, speeds | chosen, subject.attention))
    num_rows = config.train.micro_batch
    print(f"PREDICTED, not measured: {mode.file}, {num_rows} rows x {config.data.seq_len}, one {GPU}\n")
    print(f"| part, ms | likely | best | worst |\n|{' --- |' * 4}")
    for name, _ in columns[0].most_common():
        print(f"| {name} | " + " | ".join(f"{column[name]:.1f}" for column in columns) + " |")
    totals = [sum(column.values()) for column in columns]
    print("| **sum** | " + " | ".join(f"{total:.1f}" for total in totals) + " |")
    rates = [1e3 * num_rows * config.data.seq_len / total for total in totals]
    print("| **thousand tokens/s** | " + " | ".join(f"{rate / 1e3:.0f}" for rate in rates) + " |")
    flops = token_flops(config.model, config.data.seq_len, config.objective).total
    shares = [mfu(rate, flops, 1, peak_flops(GPU)) for rate in rates]
    print("| MFU | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    cluster = Cluster(
        nodes=8,
        gpu=GPU,
        gpus_per_node=8,
        fabric_bytes_per_s=FABRIC,
        gpu_tokens_per_s=rates[0],
        gpu_hour_price=None,
    )
    many = scale(config, cluster)[-1]
    exposed = many.communication_s / many.step_s
    print(f"\n64 {GPU}, links of 400 Gb/s: {exposed:.1%} of a step is communication that nothing hides")
    print("\nassumed, with the range and what will test it:")
    for name, (value, bad, good, unit, meaning, tested_by) in ASSUMPTIONS.items():
        shown = chosen.get(name, value)
        print(f"  {name:19s}{shown:g} ({bad:g} to {good:g}) {unit}: {meaning}; benchmarks/gpu.py, part {tested_by}")


if __name__ == "__main__":
    main()

"""Predict the time of a micro-batch of ELECTRA-Large on one H200 from counts. It is a prediction, never a measurement.

    python benchmarks/predict_gpu.py                                  # 64 rows, as the paper trained
    python benchmarks/predict_gpu.py configs/large_fast.yaml          # no attention dropout, a shorter generator
    python benchmarks/predict_gpu.py --set product_tflops=760 --json

The counts are exact: every operator and every kernel launch of one micro-batch, with the shapes and bytes of its
tensors, comes from a rehearsal on torch's device `meta` (tests/support/rehearsal.py). The speeds are assumptions. Each
is printed with its range and with the part of `benchmarks/gpu.py` that will test it. A part's time is the sum over its
calls of the largest of bytes / bandwidth, FLOPs / speed and the shortest time of a kernel.

Limits: rows are full, and each holds one example, for which attention costs most. Micro-batches are alike; the
optimizer's update is shared by all of a step. Communication, evaluation and waits for data are left out. The columns
`best` and `worst` take all assumptions at the good and at the bad end of their ranges, which is wider than likely.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))  # the rehearsal is part of the tests

from support.rehearsal import DeviceCall, Figures, Launch, build, rehearse, step_input  # noqa: E402

from electra_dist.config import Config  # noqa: E402
from electra_dist.config_file import load_config  # noqa: E402
from electra_dist.model.flops import mfu, peak_flops, token_flops  # noqa: E402
from electra_dist.model.parameter_counts import parameter_counts  # noqa: E402

DEFAULT_CONFIG = REPOSITORY / "configs" / "large_25pct_mask.yaml"
GPU = "H200"
_ADAM_BYTES = 30  # a parameter: fp32 gradient, master copy and two moments read, three of them and bf16 written


@dataclass(frozen=True)
class Assumption:
    """A speed or cost that no GPU has confirmed, with the range in which it is expected."""

    value: float
    bad: float
    good: float
    unit: str
    meaning: str
    tested_by: str  # part of benchmarks/gpu.py


ASSUMPTIONS = {
    "product_tflops": Assumption(700, 600, 790, "TFLOP/s", "matrix products of the model in bf16", "ceilings"),
    "bandwidth": Assumption(4.3, 3.9, 4.5, "TB/s", "a copy in device memory (data sheet: 4.8)", "ceilings"),
    "elementwise_share": Assumption(0.9, 0.75, 1.0, "of the copy", "torch's elementwise kernels and sums", "profile"),
    "norm_share": Assumption(0.75, 0.5, 0.9, "of the copy", "our dropout + add + norm kernels", "operations"),
    "flash_forward": Assumption(240, 170, 320, "TFLOP/s", "FlashAttention, dropout, heads of 64", "attention"),
    "flash_backward": Assumption(185, 110, 230, "TFLOP/s", "its backward pass; a fixed order may cost", "attention"),
    "plain_forward": Assumption(320, 240, 400, "TFLOP/s", "FlashAttention without dropout", "attention"),
    "plain_backward": Assumption(240, 180, 300, "TFLOP/s", "its backward pass", "attention"),
    "efficient": Assumption(92, 76, 116, "TFLOP/s", "torch's EFFICIENT attention kernel with dropout", "attention"),
    "shortest_kernel": Assumption(2.5, 4.0, 1.5, "us", "time of a kernel that does almost nothing", "profile"),
    "gap": Assumption(0.7, 1.5, 0.2, "us", "idle time between two kernels", "profile"),
    "accumulation": Assumption(26, 30, 10, "bytes", "a parameter, DeepSpeed's fp32 gradient sums", "deepspeed"),
    "waits": Assumption(1.0, 3.0, 0.0, "ms", "waits of DeepSpeed for the device, timer off", "deepspeed"),
    "host_operator": Assumption(14, 20, 8, "us", "host time of an operator, views included", "profile"),
    "engine_operators": Assumption(1184, 1500, 300, "calls", "DeepSpeed's operators a micro-batch", "deepspeed"),
}
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten._addmm")
_HEAD_KERNELS = ("row_kernel", "tail_", "scatter_add", "replace")
# Kernels that work in place move more than their arguments once: the row kernel reads the logits twice and writes
# their gradient; GELU's gradient reads two tensors of one size and overwrites one of them.
_PASSES = {"row_kernel": 3, "gelu_gradient_kernel": 1.5}
# Columns that a kernel writes of the fp32 partial sums that the kernels of a layer share: an argument, and how often
# it counts.
_SUMMED_COLUMNS = {"norm_backward_kernel": ("hidden", 3), "gelu_gradient_kernel": ("width", 1)}
_DISCRIMINATOR, _GENERATOR, _HEADS = "discriminator products", "generator products", "products of the heads"
_ATTENTION, _NORMS = "attention", "dropout + add + norm"
_KERNELS_OF_HEADS, _GELU = "kernels of the heads", "GELU"
_BIASES, _SUMS = "bias gradients", "residual sums, qkv gradients"
_REST = "masks, embeddings, small operators"


class Prediction:
    """Predicted milliseconds of one micro-batch by part, under one choice of all assumptions."""

    def __init__(self, config: Config, rows: int, figures: Figures, speeds: Mapping[str, float]) -> None:
        """Predict the time of a step as the sum of the times of its operators, kernels and waits.

        Args:
            config: the config of the run.
            rows: rows of the micro-batch.
            figures: operators, launches, FLOPs and bytes of that micro-batch, counted on `meta` tensors without a GPU.
            speeds: the assumed value of each entry in the table of assumptions, by name, for example "bandwidth".
        """
        self.config = config
        self.rows = rows
        self.speeds = speeds
        self.milliseconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.product_flops = 0
        for call in figures.device_calls:
            self._add(*self._of_call(call))
        for launch in figures.launches:
            self._add(*self._of_launch(launch))
        num_kernels = self.counts.total()
        num_parameters = parameter_counts(config.model, config.objective).total
        micro_batches_per_step = max(1, config.train.global_batch // rows)
        bytes_per_ms = speeds["bandwidth"] * 1e9
        self.milliseconds["fp32 gradient sums (DeepSpeed)"] = speeds["accumulation"] * num_parameters / bytes_per_ms
        update_ms = _ADAM_BYTES * num_parameters / bytes_per_ms
        self.milliseconds["update, its share"] = update_ms / micro_batches_per_step
        self.milliseconds["gaps between kernels"] = num_kernels * speeds["gap"] / 1e3
        self.milliseconds["waits (DeepSpeed)"] = speeds["waits"]
        self.host_ms = (figures.operators.total() + speeds["engine_operators"]) * speeds["host_operator"] / 1e3

    @property
    def device_ms(self) -> float:
        """Predicted time of the device, the sum of all parts."""
        return sum(self.milliseconds.values())

    @property
    def step_ms(self) -> float:
        """Predicted time of the micro-batch: that of the device or of the host, whichever is longer."""
        return max(self.device_ms, self.host_ms)

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second, pads included."""
        return 1e3 * self.rows * self.config.data.seq_len / self.step_ms

    def summary(self) -> dict[str, Any]:
        """Return the sums as JSON values; `mfu` is the share of the GPU's bf16 peak."""
        flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
        return {
            "device_ms": self.device_ms,
            "host_ms": self.host_ms,
            "step_ms": self.step_ms,
            "tokens_per_s": self.tokens_per_s,
            "mfu": mfu(self.tokens_per_s, flops, 1, peak_flops(GPU)),
        }

    def _add(self, part: str, ms: float) -> None:
        """Add one kernel's time to a part; no kernel takes less than the shortest one."""
        self.milliseconds[part] += max(ms, self.speeds["shortest_kernel"] / 1e3)
        self.counts[part] += 1

    def _memory_ms(self, num_bytes: float, share: float = 1.0) -> float:
        """Return the milliseconds of moving some bytes at a share of the copy's bandwidth."""
        return num_bytes / (self.speeds["bandwidth"] * share * 1e9)

    def _of_call(self, call: DeviceCall) -> tuple[str, float]:
        """Return the part to which an operator of torch belongs, and its milliseconds."""
        if call.name.startswith(_PRODUCTS):
            return self._of_product(call)
        if "attention" in call.name:
            return _ATTENTION, self._attention_ms(call)
        ms = self._memory_ms(call.num_bytes, self.speeds["elementwise_share"])
        if "gelu" in call.name:
            return _GELU, ms
        if call.name == "aten.sum.dim_IntList":
            return _BIASES, ms
        if call.name in ("aten.add.Tensor", "aten.stack.default", "aten.cat.default", "aten.clone.default"):
            return _SUMS, ms
        return _REST, ms

    def _of_product(self, call: DeviceCall) -> tuple[str, float]:
        """Return the part of a matrix product [m, k] x [k, n], by its sizes, and its milliseconds."""
        matrices = [shape for shape in call.shapes if len(shape) == 2]
        num_bytes: float = call.num_bytes
        if call.name.endswith("out"):
            # The argument that receives the result is not read.
            elements = [math.prod(shape) for shape in call.shapes]
            num_bytes *= 1 - elements[-1] / sum(elements)
            del matrices[-2]
        first, second, result = matrices[-3:]
        flops = 2 * result[0] * result[1] * first[1]
        self.product_flops += flops
        ms = max(flops / (self.speeds["product_tflops"] * 1e9), self._memory_ms(num_bytes))
        sizes = {*first, *second}
        model = self.config.model
        tokens = self.rows * self.config.data.seq_len
        generator_width = model.generator.hidden_size
        if tokens not in sizes and tokens not in result:
            return _HEADS, ms  # of the masked positions
        if {*sizes, *result} & {generator_width, 3 * generator_width}:
            return _GENERATOR, ms
        return _DISCRIMINATOR, ms

    def _attention_ms(self, call: DeviceCall) -> float:
        """Return the milliseconds of an attention kernel: 4 T S H FLOPs forward, 2.5 times as many backward."""
        is_backward = "backward" in call.name
        hidden = max(shape[-2] * shape[-1] for shape in call.shapes if len(shape) == 3 or len(shape) == 4)
        tokens = self.rows * self.config.data.seq_len
        if "efficient" in call.name:
            hidden = next(shape[1] * shape[3] for shape in call.shapes if len(shape) == 4)
            speed = self.speeds["efficient"]
        else:
            kind = "flash" if self.config.model.attention_dropout else "plain"
            speed = self.speeds[f"{kind}_backward" if is_backward else f"{kind}_forward"]
        forward_flops = 4 * tokens * self.config.data.seq_len * hidden
        flops = 2.5 * forward_flops if is_backward else forward_flops
        return flops / (speed * 1e9)

    def _of_launch(self, launch: Launch) -> tuple[str, float]:
        """Return the part to which a Triton launch belongs, and its milliseconds."""
        num_bytes = _moved_bytes(launch)
        if launch.kernel.startswith(_HEAD_KERNELS):
            return _KERNELS_OF_HEADS, self._memory_ms(num_bytes, self.speeds["norm_share"])
        if "gelu" in launch.kernel:
            return _GELU, self._memory_ms(num_bytes, self.speeds["elementwise_share"])
        if "norm" in launch.kernel or "strip" in launch.kernel:
            return _NORMS, self._memory_ms(num_bytes, self.speeds["norm_share"])
        return _REST, self._memory_ms(num_bytes, self.speeds["elementwise_share"])


def _moved_bytes(launch: Launch) -> float:
    """Return the bytes that a Triton launch reads and writes.

    They are those of its tensors, each as often as the kernel passes over it, and of the partial sums only the columns
    that the kernel writes.
    """
    buffer_bytes = 0
    written_bytes = 0
    if launch.kernel in _SUMMED_COLUMNS:
        num_strips, num_columns = launch.tensors["partials_ptr"]
        argument, times = _SUMMED_COLUMNS[launch.kernel]
        buffer_bytes = 4 * num_strips * num_columns
        written_bytes = 4 * num_strips * times * launch.words[argument]
    return (launch.num_bytes - buffer_bytes) * _PASSES.get(launch.kernel, 1) + written_bytes


def predict(config: Config, rows: int, chosen: Mapping[str, float]) -> dict[str, Any]:
    """Return the prediction of one config as a JSON object: parts, sums, their ranges, and the assumptions.

    Args:
        config: the run, in bf16.
        rows: rows of the micro-batch.
        chosen: assumptions that replace the defaults; they have no range.
    """
    module = build(config)
    # What a process tries once and remembers must not count.
    rehearse(module, lambda: step_input(config, module, 1))
    figures = rehearse(module, lambda: step_input(config, module, rows))

    def under(choice: str) -> Prediction:
        """Return the prediction with all assumptions at one end of their ranges: "value", "good" or "bad"."""
        ranged = {name: getattr(assumption, choice) for name, assumption in ASSUMPTIONS.items()}
        return Prediction(config, rows, figures, ranged | chosen)

    likely, best, worst = under("value"), under("good"), under("bad")
    parts = [
        {
            "name": name,
            "calls": likely.counts[name],
            "ms": ms,
            "best_ms": best.milliseconds[name],
            "worst_ms": worst.milliseconds[name],
        }
        for name, ms in sorted(likely.milliseconds.items(), key=lambda item: -item[1])
    ]
    assumptions = {
        name: {
            "value": chosen.get(name, each.value),
            "range": [min(each.bad, each.good), max(each.bad, each.good)],
            "unit": each.unit,
            "meaning": each.meaning,
            "tested_by": f"benchmarks/gpu.py, part {each.tested_by}",
        }
        for name, each in ASSUMPTIONS.items()
    }
    return {
        "kind": "prediction from counts; nothing was measured",
        "gpu": GPU,
        "run": config.run_dir,
        "rows": rows,
        "seq_len": config.data.seq_len,
        "attention": {"backend": module.attention.backend, "dropout": config.model.attention_dropout},
        "counts": {
            "operators": figures.operators.total(),
            "kernels": likely.counts.total(),
            "product_flops": likely.product_flops,
            "peak_bytes": figures.peak_bytes,
        },
        "parts": parts,
        **likely.summary(),
        "best": best.summary(),
        "worst": worst.summary(),
        "assumptions": assumptions,
    }


def print_table(prediction: Mapping[str, Any]) -> None:
    """Print a prediction as text."""
    attention = prediction["attention"]
    print(
        f"PREDICTION, not a measurement: {prediction['run']}, {prediction['rows']} rows x {prediction['seq_len']}, "
        f"one {prediction['gpu']}, eager, attention {attention['backend']} with dropout {attention['dropout']:g}"
    )
    print(f"\n{'part':38s}{'calls':>7s}{'ms':>8s}{'best':>8s}{'worst':>8s}")
    for part in prediction["parts"]:
        times = f"{part['ms']:8.1f}{part['best_ms']:8.1f}{part['worst_ms']:8.1f}"
        print(f"{part['name']:38s}{part['calls'] or '':>7}{times}")
    for name in ("device_ms", "host_ms", "step_ms"):
        ends = f"{prediction['best'][name]:8.1f}{prediction['worst'][name]:8.1f}"
        print(f"{name.replace('_ms', ', sum'):38s}{'':>7s}{prediction[name]:8.1f}{ends}")
    for name, scale in (("tokens_per_s", 1e-3), ("mfu", 100)):
        ends = f"{scale * prediction['best'][name]:8.1f}{scale * prediction['worst'][name]:8.1f}"
        label = {"tokens_per_s": "thousand tokens/s", "mfu": "MFU, %"}[name]
        print(f"{label:38s}{'':>7s}{scale * prediction[name]:8.1f}{ends}")
    counts = prediction["counts"]
    print(f"\ncounted: {counts['operators']:,} operators of torch, {counts['kernels']:,} kernels, ", end="")
    print(f"{counts['peak_bytes'] / 1e9:.1f} GB of activations and gradients at the peak")
    print("\nassumed, with the range and what will test it:")
    for name, each in prediction["assumptions"].items():
        low, high = each["range"]
        value = f"{each['value']:g} ({low:g} to {high:g}) {each['unit']}"
        print(f"  {name:18s}{value:34s}{each['meaning']}; {each['tested_by']}")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, and print the prediction as a table or as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("config", nargs="?", type=Path, default=DEFAULT_CONFIG, help="YAML file of a run in bf16")
    options.add_argument("--rows", type=int, default=64, help="rows of a micro-batch (default: %(default)s)")
    options.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="replace an assumption; may be repeated"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = options.parse_args(argv)
    chosen = {}
    for setting in arguments.set:
        name, _, value = setting.partition("=")
        if name not in ASSUMPTIONS:
            options.error(f"--set {setting}: choose one of {', '.join(ASSUMPTIONS)}")
        chosen[name] = float(value)
    prediction = predict(load_config(arguments.config, []), arguments.rows, chosen)
    if arguments.json:
        print(json.dumps(prediction, indent=1))
    else:
        print_table(prediction)


if __name__ == "__main__":
    main()

"""Cases of the rehearsal, and the record of their numbers, tests/rehearsal/recorded.json.

    PYTHONPATH=tests python -m support.rehearsal_cases        # runs all cases and rewrites the record (half a minute)

A case is a config, a dtype and a way to run: eager or compiled, training or evaluation. Its numbers, for one
micro-batch, are

    operators         operators of torch that the host calls, views and allocations among them
    on_device         those that compute on the device, and the launches of Triton's kernels
    uploads           copies from the host to the device
    peak_kB_per_row   activations and gradients at their peak, divided by the rows, in 1,000 bytes
    launches          of each Triton kernel
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.rehearsal import META, Figures, build, rehearse, scheduled_values, step_input

from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.engine import micro_batch
from electra_dist.model.encoder import compile_layers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.masking import num_slots, wanted_counts

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "tests" / "rehearsal" / "recorded.json"
REFRESH = "PYTHONPATH=tests python -m support.rehearsal_cases"
STAGES = 10  # two-stage training: steps of the generator alone

_SMALL_TOWER = "{hidden_size: 256, num_layers: 12, num_heads: 4, intermediate_size: 1024}"
_FEW_LAYERS = ("model.discriminator.num_layers=2", "model.generator.num_layers=2")
_TWO_STAGE = (f"objective.generator_only_steps={STAGES}", f"model.generator={_SMALL_TOWER}", "model.sharing=none")

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "rtd": (),
    "rtd gdes": ("model.sharing=gdes",),
    "rtd all": ("model.sharing=all", f"model.generator={_SMALL_TOWER}"),
    "rtd reference": ("objective.masking=reference", "objective.disallow_correct=true", "objective.temperature=2"),
    "rtd_masked_only": ("objective.name=rtd_masked_only",),
    "mlm": ("objective.name=mlm",),
    "replace_mlm": ("objective.name=replace_mlm",),
    "all_tokens_mlm": ("objective.name=all_tokens_mlm",),
    "electric": ("objective.name=electric",),
    "adversarial": ("objective.name=adversarial",),
    "uniform": ("objective.generator=uniform", "objective.disallow_correct=true"),
    "unigram": ("objective.generator=unigram",),
    "two_stage first": _TWO_STAGE,
    "two_stage second": _TWO_STAGE,
}
# Parameters that a stage of two-stage training does not train.
UNTRAINED = {
    "two_stage first": ("towers.discriminator",),
    "two_stage second": ("towers.generator", "towers.embeddings"),
}


@dataclass(frozen=True)
class Case:
    """One micro-batch that is rehearsed."""

    name: str  # key in the record
    file: str = "small.yaml"  # in configs/
    overrides: tuple[str, ...] = ()
    dtype: str = "bf16"
    rows: int = 8
    step: int = 0
    compiled: bool = False
    evaluation: bool = False
    measurement: bool = False  # the random input of `train.micro_batch: auto`
    untrained: tuple[str, ...] = ()

    def config(self) -> Config:
        """Return the case's config."""
        return load_config(REPOSITORY / "configs" / self.file, [*self.overrides, f"train.precision={self.dtype}"])


def _objective_cases() -> list[Case]:
    """Return each objective in bf16 at full size; in fp32, in evaluation and compiled with two layers a tower."""
    cases = []
    for name, overrides in OBJECTIVES.items():
        step = STAGES if name.endswith("second") else 0
        common: dict[str, Any] = {"step": step, "untrained": UNTRAINED.get(name, ())}
        cases.append(Case(f"{name} bf16", overrides=overrides, **common))
        common["overrides"] = (*overrides, *_FEW_LAYERS)
        cases.append(Case(f"{name} fp32, 2 layers", dtype="fp32", **common))
        cases.append(Case(f"{name} evaluation, 2 layers", evaluation=True, **common))
        cases.append(Case(f"{name} compiled, 2 layers", compiled=True, **common))
    return cases


_SCHEDULED = (
    "objective.temperature={from: 4, to: 1, shape: exponential, tau: 0.15}",
    "objective.mask_prob={from: 0.3, to: 0.15, shape: linear}",
    "objective.mlm_weight={from: 1, to: 0.5, shape: cosine}",
    "objective.rtd_weight={from: 0, to: 50, shape: step, over: 0.3}",
    "objective.random_share={from: 1, to: 0, shape: linear, over: 0.3}",
)
_RECOMPUTE = ("engine.activation_checkpointing=true",)
_MODERN_LAYERS = ("model.discriminator.num_layers=4", "model.generator.num_layers=4")  # two of them global
LARGE = "large_25pct_mask.yaml"
MODERN = "modern_400m.yaml"
CASES = {
    case.name: case
    for case in [
        *_objective_cases(),
        Case("rtd fp16", dtype="fp16"),
        Case("rtd bf16 scheduled", overrides=_SCHEDULED),
        Case("rtd bf16 recompute", overrides=_RECOMPUTE),
        Case("rtd compiled fp32, 2 layers", dtype="fp32", overrides=_FEW_LAYERS, compiled=True),
        Case("rtd compiled recompute, 2 layers", overrides=(*_RECOMPUTE, *_FEW_LAYERS), compiled=True),
        Case("rtd compiled evaluation, 2 layers", overrides=_FEW_LAYERS, compiled=True, evaluation=True),
        Case("rtd bf16 without dropout", overrides=("model.hidden_dropout=0", "model.attention_dropout=0")),
        Case("rtd bf16 micro-batch measurement", measurement=True),
        Case("ELECTRA-Large rtd bf16", file=LARGE),
        Case("modern bf16, 4 layers", file=MODERN, overrides=_MODERN_LAYERS),
        Case("modern evaluation, 4 layers", file=MODERN, overrides=_MODERN_LAYERS, evaluation=True),
        Case("modern compiled, 4 layers", file=MODERN, overrides=_MODERN_LAYERS, compiled=True),
    ]
}


def run(case: Case) -> Figures:
    """Rehearse a case and return what was counted.

    Raises `rehearsal.Stray` if a GPU would refuse something, or a parameter that the case trains has no gradient.
    """
    _fill_caches()
    config = case.config()
    mask_prob = config.objective.mask_prob
    if isinstance(mask_prob, float):  # what a process computes once is not counted
        most_masked = num_slots(mask_prob, config.data.seq_len)
        in_float32 = config.objective.masking == "reference"
        wanted_counts(mask_prob, most_masked, config.data.seq_len, META, in_float32=in_float32)
    module = build(config)
    if case.evaluation:
        module = module.eval()
    if case.compiled:
        compile_layers(module, backend="aot_eager")

    scheduled = scheduled_values(config, case.step)

    def measured_input() -> StepInput:
        """Return the input with which `train.micro_batch: auto` measures."""
        return micro_batch._random_input(config, module, META, case.rows)

    def training_input() -> StepInput:
        """Return the input that training makes."""
        return step_input(config, module, case.rows, case.step, scheduled)

    make_input: Callable[[], StepInput] = measured_input if case.measurement else training_input
    # A graph that an earlier case compiled serves a later one of the same shapes.
    figures = rehearse(module, make_input, backward=not case.evaluation, allow_unused=case.untrained)
    assert not torch._dynamo.utils.counters["graph_break"]
    return figures


@functools.cache
def _fill_caches() -> None:
    """Run a small micro-batch once, because what a process tries once and remembers would count in its first case."""
    for dtype in ("bf16", "fp16", "fp32"):
        config = load_config(REPOSITORY / "configs" / "small.yaml", [*_FEW_LAYERS, f"train.precision={dtype}"])
        module = build(config)
        rehearse(module, functools.partial(step_input, config, module, 1))


def numbers(case: Case, figures: Figures) -> dict[str, Any]:
    """Return the numbers of a case as the record has them."""
    launches = {kernel.removesuffix("_kernel"): count for kernel, count in figures.kernel_counts.items()}
    return {
        "operators": figures.operators.total(),
        "on_device": len(figures.device_calls) + len(figures.launches),
        "uploads": figures.uploads,
        "peak_kB_per_row": round(figures.peak_bytes / case.rows / 1e3),
        "launches": launches,
    }


def write_record() -> None:
    """Run all cases and write their numbers, one case a line, with the version of torch."""
    lines = [f' "torch": {json.dumps(torch.__version__.split("+")[0])}']
    for name, case in CASES.items():
        lines.append(f" {json.dumps(name)}: {json.dumps(numbers(case, run(case)))}")
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")
    print(f"{RECORD}: wrote {len(CASES)} cases")


def count_cases(compiled: bool) -> dict[str, Any]:
    """Run the compiled cases, or the others, in a process of their own; return the numbers of each, or its error.

    What other tests have changed in this process, such as a mode of torch, would be counted, too. Beside `numbers`, a
    case has `compiled_norms`, the calls of the custom operator that only compiled layers make.
    """
    command = [sys.executable, "-m", "support.rehearsal_cases", "--print", "compiled" if compiled else "eager"]
    search_path = os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search_path}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


def print_cases(compiled: bool) -> None:
    """Run the compiled cases, or the others, and print one line of JSON, which `count_cases` reads."""
    counted: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.compiled != compiled:
            continue
        try:
            figures = run(case)
            compiled_norms = figures.operators["electra.dropout_add_norm.default"]
            counted[name] = numbers(case, figures) | {"compiled_norms": compiled_norms}
        except Exception as error:  # noqa: BLE001  The test of this case shows it; the other cases go on.
            counted[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(counted))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--print"]:
        print_cases(compiled=sys.argv[2] == "compiled")
    else:
        write_record()

"""Training steps of ELECTRA-Large on one GPU: whole, profiled, with one change, by others. Parts of `gpu.py`.

A step consists of forward, backward of both losses and fused AdamW, all in bf16, with the config's dropout. MFU is the
FLOPs that `model/counts.py` counts, divided by the time and by the listed peak of the GPU. Rows hold packed examples.
Hugging Face's step has the same weights, masks and distribution of samples.

Limits: no data loading; no fp32 master weights, except under DeepSpeed.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from gpu_parts.recording import Case, Row, Rows, host_ms, profile_kernels, time_and_peak
from torch._dynamo.utils import counters

from electra_dist.collectives import Choice
from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.corpus.builder.chunk_processor import make_rows
from electra_dist.gpu_models import peak_flops
from electra_dist.model.attention import BACKENDS
from electra_dist.model.attention_choice import choose_attention
from electra_dist.model.counts import token_flops
from electra_dist.model.encoder import Encoder, compile_layers
from electra_dist.model.towers import ElectraTowers, build_towers
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train.step_operators import part_of

_CONFIGS = Path(__file__).parents[2] / "configs"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FUSIONS = ("mlm_head", "discriminator_tail", "layer_passes", "slots")  # modules of electra_kernels
_TOY = ["model.vocab_size=300", "model.max_positions=32", "data.seq_len=32"]
# Architecture -> its config, and settings of a model that trains a step in milliseconds on a CPU. With `modern`, the
# windows of local attention are shorter than the rows.
_MODELS = {
    "bert": (
        _CONFIGS / "large_25pct_mask.yaml",
        [
            *_TOY,
            "model.embedding_size=64",
            "model.discriminator={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}",
            "model.generator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}",
            "model.hidden_dropout=0",
        ],
    ),
    "modern": (
        _CONFIGS / "modern_base.yaml",
        [
            *_TOY,
            "model.embedding_size=32",
            "model.discriminator={hidden_size: 32, num_layers: 3, num_heads: 2, intermediate_size: 48}",
            "model.generator={hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 48}",
            "model.local_window=8",
        ],
    ),
}
_MICRO_BATCHES = 2  # of a step under DeepSpeed, so that gradients are accumulated once, as in training
_LEARNING_RATE = 1e-5


class StepBench:
    """Config and initial weights of one model, which every variant copies, and the timer of its training steps."""

    def __init__(self, device: str, backend: str, smoke: bool, architecture: str = "bert") -> None:
        """Load the config of an architecture ("bert" or "modern"), or its toy in fp32 if `smoke`."""
        file, toy_settings = _MODELS[architecture]
        self.config: Config = load_config(file, toy_settings if smoke else [])
        self.device = device
        self.backend = backend
        self.smoke = smoke
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.batches = (1, 2, 4) if smoke else (32, 64, 128)

    @functools.cached_property
    def towers(self) -> ElectraTowers:
        """Return the initial weights, which are built when they are first needed."""
        return build_towers(self.config.model, 1)

    @functools.cached_property
    def peak(self) -> float | None:
        """Return the dense bf16 peak of the GPU in FLOP/s; None if it is not listed, and in the smoke run."""
        return None if self.smoke else peak_flops(torch.cuda.get_device_name())

    @functools.cached_property
    def attention(self) -> Choice:
        """Return the attention backend that a run of this config would choose on this device."""
        return choose_attention(self.config, self.device)

    def module(
        self, backend: str, *, compiled: bool = False, dtype: torch.dtype | None = None
    ) -> ReplacedTokenDetection:
        """Return a new module in training mode with a copy of the initial weights, on the device."""
        module = ReplacedTokenDetection(copy.deepcopy(self.towers), self.config.objective, SPECIAL, backend)
        module = module.to(self.device, dtype or self.dtype).train()
        module.attention = BACKENDS[self.attention.name]
        if compiled:
            compile_layers(module, backend="aot_eager" if self.smoke else "inductor")
        return module

    def adamw(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a step without DeepSpeed: torch's AdamW, fused on a GPU."""
        return torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, fused=not self.smoke)

    def ids(self, batch: int) -> torch.Tensor:
        """Return packed rows of random examples of any length, int64 [batch, S]; equal calls give equal rows."""
        generator = torch.Generator().manual_seed(0)
        seq_len = self.config.data.seq_len
        examples = []
        for _ in range(8 * batch):  # More examples than fit into the rows.
            length = int(torch.randint(5, seq_len + 1, (), generator=generator))
            example = torch.randint(5, self.config.model.vocab_size, (length,), generator=generator)
            example[0], example[length // 2], example[-1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
            examples.append(example.tolist())
        rows, _ = make_rows(examples, seq_len, SPECIAL.pad, np.uint16, "rows")
        return torch.from_numpy(rows[:batch].astype(np.int64)).to(self.device)

    def time(self, operation: str, by: str, batch: int, step: Callable[[], object]) -> Row:
        """Time a training step of `batch` rows and return its row of the table.

        `host_ms` is the time until the host has queued the step, and `peak_bytes` is beside weights and moments.
        """
        row: Row = {"operation": operation, "by": by, **time_and_peak(step, repeats=5, warm_up=3)}
        row["host_ms"] = host_ms(step, 1 if self.smoke else 3)
        row["tokens_per_s"] = 1e3 * batch * self.config.data.seq_len / row["ms"]
        if self.peak:
            flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
            row["mfu"] = row["tokens_per_s"] * flops / self.peak
        return row

    def case(self, by: str, batch: int, make: Callable[[], Objective], *, compiled: bool = False) -> Case:
        """Return the case that times the training step of a module of ours, which `make` builds in the case.

        A row of compiled layers has `graphs`, their number, and is wrong if it is 0: the step then ran eagerly.
        """
        operation = f"step B={batch}"

        def run() -> Rows:
            module = make()
            optimizer = self.adamw(module)
            given = step_input(module, self.ids(batch))
            counters.clear()
            row = self.time(operation, by, batch, lambda: train(module, optimizer, given))
            row["attention"] = module.attention.name
            if not compiled:
                return [row]
            row["graphs"] = counters["stats"]["unique_graphs"]
            return [row | {"right": row["graphs"] > 0}]

        return Case(operation, by, "compiled step" if compiled else "step", run)


def step_input(module: Objective, ids_BS: torch.Tensor) -> StepInput:
    """Return the input of step 0, with the given rows as its whole global batch."""
    scale_2 = 1.0 / module.loss_counts(ids_BS).sum(0)
    return module.step_input(ids_BS, ids_BS.cpu().numpy(), 0, (1, 0), scale_2)


def train(module: Objective, optimizer: torch.optim.Optimizer, given: StepInput) -> None:
    """Take one training step of our module: forward, backward of both losses, and update."""
    module(given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step_cases(
    bench: StepBench, batches: Sequence[int], backends: Sequence[str], name: str = "ours"
) -> Iterator[Case]:
    """Yield the training step for each micro-batch and backend, eager and with compiled layers."""
    for batch in batches:
        for backend in backends:
            for compiled in (False, True):
                by = f"{name}, compiled layers ({backend})" if compiled else f"{name} ({backend})"
                make = functools.partial(bench.module, backend, compiled=compiled)
                yield bench.case(by, batch, make, compiled=compiled)


def profile_cases(bench: StepBench) -> Iterator[Case]:
    """Yield one eager step of the benchmark's middle micro-batch: its time, then its kernels."""
    batch = bench.batches[1]
    by = f"ours ({bench.backend})"
    yield bench.case(by, batch, functools.partial(bench.module, bench.backend))
    yield Case(f"step B={batch}", "ours, profile", "step", functools.partial(_profile, bench, batch))


def _profile(bench: StepBench, batch: int) -> Rows:
    """Sum the kernels of one step by part of the step, as `electra-dist speed` does; name the ten longest kernels."""
    module = bench.module(bench.backend)
    given = step_input(module, bench.ids(batch))
    optimizer = bench.adamw(module)
    for _ in range(3):  # The optimizer's states are made, and kernels compiled, before the profile.
        train(module, optimizer, given)
    spent, launches, host_operators = profile_kernels(lambda: train(module, optimizer, given))
    spent_by_part: Counter[str] = Counter()
    launches_by_part: Counter[str] = Counter()
    for kernel, ms in spent.items():
        spent_by_part[part_of(kernel)] += ms
        launches_by_part[part_of(kernel)] += launches[kernel]
    names = [kernel[:120] for kernel, _ in spent.most_common() if part_of(kernel) == "attention"]
    attention: Row = {"by": bench.attention.name, "kernels": names, "reason": bench.attention.reason}
    counts = {"launches": launches.total(), "host_operators": host_operators}
    rows: Rows = [
        {"operation": f"profile B={batch}", "by": "sum of all kernels", "ms": spent.total(), **counts},
        {"operation": "attention kernels", **attention},
    ]
    for part, ms in spent_by_part.most_common():
        rows.append({"operation": "kernels", "by": part, "ms": ms, "launches": launches_by_part[part]})
    for kernel, ms in spent.most_common(10):
        rows.append({"operation": "kernel", "by": kernel[:120], "ms": ms, "launches": launches[kernel]})
    return rows


def fusion_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the training step with one change at a time, which shows the effect of each alone; first without any."""
    batch = bench.batches[1]

    def with_change(by: str, change: Callable[[ReplacedTokenDetection], None] = lambda module: None) -> Case:
        def make() -> ReplacedTokenDetection:
            module = bench.module(bench.backend)
            change(module)
            return module

        return bench.case(by, batch, make)

    yield with_change("ours")
    for name in FUSIONS:
        case = with_change(f"ours without {name}")
        yield case._replace(run=functools.partial(_run_by_reference, name, case.run))
    yield with_change("ours, activations again", _recompute)


def _run_by_reference(name: str, run: Callable[[], Rows]) -> Rows:
    """Run a case while one fused operation uses its reference, whatever backend its callers pass."""
    kernel = importlib.import_module(f"electra_kernels.{name}")
    original_resolve = kernel.resolve
    kernel.resolve = lambda *_, **__: "reference"  # type: ignore[attr-defined]
    try:
        return run()
    finally:
        kernel.resolve = original_resolve  # type: ignore[attr-defined]


def _recompute(module: ReplacedTokenDetection) -> None:
    """Make a module keep only the inputs of its layers and recompute the activations in the backward pass."""
    for submodule in module.modules():
        if isinstance(submodule, Encoder):
            submodule.recompute = True


def engine_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the optimizer step by this project's engine at the middle and the largest micro-batch."""
    for batch in bench.batches[1:]:
        operation = f"DeepSpeed step B={batch} x {_MICRO_BATCHES}"
        yield Case(operation, "ours", "engine step", functools.partial(_time_engine, bench, operation, batch))


def _time_engine(bench: StepBench, operation: str, batch: int) -> Rows:
    if importlib.util.find_spec("deepspeed") is None:
        return [{"operation": operation, "by": "ours", "skipped": "deepspeed is not installed"}]
    from electra_dist.engine.engine import Engine
    from electra_dist.engine.process_group import init_distributed

    init_distributed()
    global_batch = batch * _MICRO_BATCHES
    precision = "fp32" if bench.smoke else bench.config.train.precision
    settings = {"micro_batch": batch, "global_batch": global_batch, "precision": precision}
    train_config = bench.config.train.model_copy(update=settings)
    # The engine casts the parameters itself, so the module is in fp32 here.
    module = bench.module(bench.backend, dtype=torch.float32)
    engine = Engine(module, train_config, bench.config.engine, bench.config.optimizer)
    given = step_input(module, bench.ids(batch))

    def step() -> None:
        for _ in range(_MICRO_BATCHES):
            engine.backward(engine.forward(given).loss)
        engine.step(_LEARNING_RATE)

    with contextlib.closing(engine):
        row = bench.time(operation, "ours", global_batch, step)
    return [row | {"optimizer": engine.optimizer_name}]


def rival_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the joint step of Hugging Face's modules from the same weights, which is skipped if they are missing.

    In the case named "gathered", the generator's head is computed at the masked positions only.
    """
    operation = f"step B={bench.batches[1]}"
    for gathered in (False, True):
        by = f"Hugging Face{', gathered' if gathered else ''}"
        yield Case(operation, by, "step", functools.partial(_time_rival, bench, operation, by, gathered))


def _time_rival(bench: StepBench, operation: str, by: str, gathered: bool) -> Rows:
    if importlib.util.find_spec("transformers") is None:
        skipped = "transformers is not installed; install it to compare with Hugging Face"
        return [{"operation": operation, "by": by, "skipped": skipped}]
    from hugging_face import HuggingFace

    batch = bench.batches[1]
    ids_BS = bench.ids(batch)
    row_B = torch.arange(batch, device=bench.device)
    objective = bench.config.objective
    model = HuggingFace(copy.deepcopy(bench.towers), objective, SPECIAL, gathered=gathered, packed=True)
    model = model.to(bench.device, bench.dtype).train()
    optimizer = bench.adamw(model)

    def step() -> None:
        losses = model(ids_BS, row_B, 0, 1)
        (objective.mlm_weight * losses.mlm + objective.rtd_weight * losses.rtd).backward()
        optimizer.step()
        optimizer.zero_grad()

    return [bench.time(operation, by, batch, step)]

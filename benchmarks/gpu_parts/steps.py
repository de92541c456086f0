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
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from gpu_parts.recording import Case, Row, Rows, Setup, host_ms, profile_kernels, time_and_peak
from measure import REPOSITORY, TOY
from torch._dynamo.utils import counters

from electra_dist.collectives import Choice
from electra_dist.config.load import load_config
from electra_dist.corpus.builder.examples import make_rows
from electra_dist.gpu_models import peak_flops
from electra_dist.model.attention import BACKENDS
from electra_dist.model.attention_choice import choose_attention
from electra_dist.model.counts import token_flops
from electra_dist.model.encoder import Encoder, compile_layers
from electra_dist.model.towers import ElectraTowers, build_towers
from electra_dist.objectives.base import Objective, StepInput
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train.step_operators import part_of

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FUSIONS = ("mlm_head", "discriminator_tail", "layer_passes", "slots")  # modules of electra_kernels
_SMALL = ["model.vocab_size=300", "model.max_positions=32", "data.seq_len=32"]
# Architecture -> its config, and settings of a model that trains a step in milliseconds on a CPU. With `modern`, the
# windows of local attention are shorter than the rows.
_MODELS = {
    "bert": ("large_25pct_mask.yaml", [*TOY, *_SMALL, "model.hidden_dropout=0"]),
    "modern": (
        "modern_base.yaml",
        [
            *_SMALL,
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

    def __init__(self, setup: Setup, architecture: str = "bert") -> None:
        """Load the config of an architecture ("bert" or "modern"), or its toy for the smoke run."""
        file, toy_settings = _MODELS[architecture]
        self.config = load_config(REPOSITORY / "configs" / file, toy_settings if setup.smoke else [])
        self.setup = setup
        self.backend = setup.backends[0]
        self.batches = (1, 2, 4) if setup.smoke else (32, 64, 128)

    @functools.cached_property
    def towers(self) -> ElectraTowers:
        """Return the initial weights, which are built when they are first needed."""
        return build_towers(self.config.model, 1)

    @functools.cached_property
    def attention(self) -> Choice:
        """Return the attention backend that a run of this config would choose on this device."""
        return choose_attention(self.config, self.setup.device)

    def module(
        self, backend: str, *, compiled: bool = False, dtype: torch.dtype | None = None
    ) -> ReplacedTokenDetection:
        """Return a new module in training mode with a copy of the initial weights, on the device."""
        module = ReplacedTokenDetection(copy.deepcopy(self.towers), self.config.objective, SPECIAL, backend)
        module = module.to(self.setup.device, dtype or self.setup.dtype).train()
        module.attention = BACKENDS[self.attention.name]
        if compiled:
            compile_layers(module, backend="aot_eager" if self.setup.smoke else "inductor")
        return module

    def adamw(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a step without DeepSpeed: torch's AdamW, fused on a GPU."""
        return torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, fused=not self.setup.smoke)

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
        return torch.from_numpy(rows[:batch].astype(np.int64)).to(self.setup.device)

    def time(self, batch: int, step: Callable[[], object]) -> Row:
        """Time a training step of `batch` rows and return its row of the table.

        `host_ms` is the time until the host has queued the step, and `peak_bytes` is beside weights and moments.
        """
        row = time_and_peak(step, repeats=5, warm_up=3)
        row["host_ms"] = host_ms(step, 1 if self.setup.smoke else 3)
        row["tokens_per_s"] = 1e3 * batch * self.config.data.seq_len / row["ms"]
        peak = None if self.setup.smoke else peak_flops(torch.cuda.get_device_name())
        if peak:  # None if the GPU is not listed.
            flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
            row["mfu"] = row["tokens_per_s"] * flops / peak
        return row

    def case(self, by: str, batch: int, make: Callable[[], Objective], *, compiled: bool = False) -> Case:
        """Return the case that times the training step of a module of ours, which `make` builds in the case.

        A row of compiled layers has `graphs`, their number, and is wrong if it is 0: the step then ran eagerly.
        """

        def run() -> Rows:
            module = make()
            optimizer = self.adamw(module)
            given = step_input(module, self.ids(batch))
            counters.clear()
            row = self.time(batch, lambda: train(module, optimizer, given))
            row["attention"] = module.attention.name
            if not compiled:
                return [row]
            row["graphs"] = counters["stats"]["unique_graphs"]
            return [row | {"right": row["graphs"] > 0}]

        return Case(f"step B={batch}", by, "compiled step" if compiled else "step", run)


bench_of = functools.cache(StepBench)  # The initial weights are built once for all parts.


def step_input(module: Objective, ids_BS: torch.Tensor) -> StepInput:
    """Return the input of step 0, with the given rows as its whole global batch."""
    scale_2 = 1.0 / module.loss_counts(ids_BS).sum(0)
    return module.step_input(ids_BS, ids_BS.cpu().numpy(), 0, (1, 0), scale_2)


def train(module: Objective, optimizer: torch.optim.Optimizer, given: StepInput) -> None:
    module(given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def large_steps(setup: Setup) -> Iterator[Case]:
    bench = bench_of(setup)
    return _step_cases(bench, bench.batches[2:], [bench.backend])


def more_steps(setup: Setup) -> Iterator[Case]:
    bench = bench_of(setup)
    return _step_cases(bench, bench.batches[:2], list(dict.fromkeys((bench.backend, "reference"))))


def modern_steps(setup: Setup) -> Iterator[Case]:
    bench = bench_of(setup, "modern")
    return _step_cases(bench, bench.batches, [bench.backend], "ours, modern")


def _step_cases(
    bench: StepBench, batches: Sequence[int], backends: Sequence[str], name: str = "ours"
) -> Iterator[Case]:
    """Yield the training step for each micro-batch and backend, eager and with compiled layers."""
    for batch in batches:
        for backend in backends:
            for compiled in (False, True):
                by = f"{name}, compiled layers ({backend})" if compiled else f"{name} ({backend})"
                make = functools.partial(bench.module, backend, compiled=compiled)
                yield bench.case(by, batch, make, compiled=compiled)


def profile_cases(setup: Setup) -> Iterator[Case]:
    """Yield one eager step of the benchmark's middle micro-batch: its time, then its kernels."""
    bench = bench_of(setup)
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


def fusion_cases(setup: Setup) -> Iterator[Case]:
    """Yield the training step with one change at a time, which shows the effect of each alone; first without any."""
    bench = bench_of(setup)

    batch, module = bench.batches[1], functools.partial(bench.module, bench.backend)
    yield bench.case("ours", batch, module)
    for name in FUSIONS:
        case = bench.case(f"ours without {name}", batch, module)
        yield case._replace(run=functools.partial(_run_by_reference, name, case.run))
    yield bench.case("ours, activations again", batch, functools.partial(_recomputing, bench))


def _run_by_reference(name: str, run: Callable[[], Rows]) -> Rows:
    """Run a case while one fused operation uses its reference, whatever backend its callers pass."""
    # A mock object in place of the function would slow each call.
    with mock.patch(f"electra_kernels.{name}.resolve", lambda *_, **__: "reference"):  # noqa: PT008
        return run()


def _recomputing(bench: StepBench) -> ReplacedTokenDetection:
    """Return a module that keeps only the inputs of its layers and recomputes the activations in the backward pass."""
    module = bench.module(bench.backend)
    for submodule in module.modules():
        if isinstance(submodule, Encoder):
            submodule.recompute = True
    return module


def engine_cases(setup: Setup) -> Iterator[Case]:
    """Yield the optimizer step by this project's engine at the middle and the largest micro-batch."""
    bench = bench_of(setup)
    for batch in bench.batches[1:]:
        run = functools.partial(_time_engine, bench, batch)
        yield Case(f"DeepSpeed step B={batch} x {_MICRO_BATCHES}", "ours", "engine step", run)


def _time_engine(bench: StepBench, batch: int) -> Rows:
    if importlib.util.find_spec("deepspeed") is None:
        return [{"skipped": "deepspeed is not installed"}]
    from electra_dist.engine.engine import Engine
    from electra_dist.engine.process_group import init_distributed

    init_distributed()
    global_batch = batch * _MICRO_BATCHES
    precision = "fp32" if bench.setup.smoke else bench.config.train.precision
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
        row = bench.time(global_batch, step)
    return [row | {"optimizer": engine.optimizer_name}]


def rival_cases(setup: Setup) -> Iterator[Case]:
    """Yield the joint step of Hugging Face's modules from the same weights, which is skipped if they are missing.

    In the case named "gathered", the generator's head is computed at the masked positions only.
    """
    bench = bench_of(setup)
    for by, gathered in (("Hugging Face", False), ("Hugging Face, gathered", True)):
        yield Case(f"step B={bench.batches[1]}", by, "step", functools.partial(_time_rival, bench, gathered))


def _time_rival(bench: StepBench, gathered: bool) -> Rows:
    if importlib.util.find_spec("transformers") is None:
        return [{"skipped": "transformers is not installed; install it to compare with Hugging Face"}]
    from hugging_face import HuggingFace

    batch = bench.batches[1]
    ids_BS = bench.ids(batch)
    row_B = torch.arange(batch, device=bench.setup.device)
    towers, objective = copy.deepcopy(bench.towers), bench.config.objective
    model = HuggingFace(towers, objective, SPECIAL, gathered=gathered, packed=True)
    model = model.to(bench.setup.device, bench.setup.dtype).train()
    optimizer = bench.adamw(model)

    def step() -> None:
        loss, _, _ = model(ids_BS, row_B, 0, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [bench.time(batch, step)]

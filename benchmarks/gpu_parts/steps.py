"""Timing of one training step of ELECTRA-Large on one GPU, with each of our options: two parts of `gpu.py`.

    steps      32, 64 and 128 rows: kernels and references, eager and with compiled layers
    fusions    64 rows: each fused operation alone replaced by its reference; no attention dropout, with sdpa and with
               FlexAttention; the generator's gradients computed early; activations recomputed

A step consists of forward, backward of both losses and fused AdamW, all in bf16, with the config's dropout. MFU is the
FLOPs that `model/flops.py` counts, divided by the time and by the listed peak of the GPU. Rows hold packed examples.

Limits: no fp32 master weights, no DeepSpeed and no data loading.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import TOY

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.row_packing import make_rows
from electra_dist.model.attention import AttentionChoice
from electra_dist.model.compile_layers import compile_layers
from electra_dist.model.encoder import Encoder, SelfAttention
from electra_dist.model.flops import peak_flops, token_flops
from electra_dist.model.initial_weights import build_towers
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import Objective, StepInput, loss_counts
from electra_dist.objectives.rtd import ReplacedTokenDetection

CONFIG = Path(__file__).parents[2] / "configs" / "large_25pct_mask.yaml"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FUSIONS = ("mlm_head", "discriminator_tail", "dropout_add_norm", "masked_gather", "replace_tokens")
Rows = list[dict[str, Any]]
RowOf = Callable[..., dict[str, Any]]


class StepBench:
    """Timer of training steps of one model.

    It holds the config and the initial weights, which every variant copies, and turns a step into a row of the table.
    """

    def __init__(self, device: str, backend: str, smoke: bool, row_of: RowOf) -> None:
        """Load the config and build the initial weights.

        Args:
            device: "cuda" or "cpu".
            backend: Implementation of the fused operations.
            smoke: Whether to use the toy model in fp32.
            row_of: `gpu.row_of`, which times a call and returns its row.
        """
        toy = [*TOY, "model.vocab_size=300", "data.seq_len=32", "model.max_positions=32", "model.hidden_dropout=0"]
        self.config: Config = load_config(CONFIG, toy if smoke else [])
        self.device = device
        self.backend = backend
        self.smoke = smoke
        self._row_of = row_of
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.batches = (1, 2, 4) if smoke else (32, 64, 128)
        self.towers = build_towers(self.config.model, 1)

    @functools.cached_property
    def peak(self) -> float | None:
        """Return the dense bf16 peak of the GPU in FLOP/s; None if it is not listed, and in the smoke run."""
        return None if self.smoke else peak_flops(torch.cuda.get_device_name())

    def module(self, backend: str, *, compiled: bool = False) -> ReplacedTokenDetection:
        """Return a new module in training mode with a copy of the initial weights, on the device.

        Args:
            backend: Implementation of the fused operations.
            compiled: Whether to compile the layers with torch.compile.
        """
        module = ReplacedTokenDetection(copy.deepcopy(self.towers), self.config.objective, SPECIAL, backend)
        module = module.to(self.device, self.dtype).train()
        if compiled:
            compile_layers(module, backend="aot_eager" if self.smoke else "inductor")
        return module

    def ids(self, batch: int) -> torch.Tensor:
        """Return packed rows of random examples of any length, int64 [batch, S], on the device.

        Equal calls return equal rows.
        """
        generator = torch.Generator().manual_seed(0)
        seq_len = self.config.data.seq_len
        examples = []
        for _ in range(8 * batch):  # More examples than fit into the rows.
            length = int(torch.randint(5, seq_len + 1, (), generator=generator))
            example = torch.randint(5, self.config.model.vocab_size, (length,), generator=generator)
            example[0], example[length // 2], example[-1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
            examples.append(example.tolist())
        rows = make_rows(examples, seq_len, SPECIAL.pad, np.uint16, "rows")[:batch]
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def time(self, operation: str, by: str, batch: int, step: Callable[[], object]) -> dict[str, Any]:
        """Time a training step and return its row of the table.

        Args:
            operation: What is measured; first column of the row.
            by: Variant that is measured.
            batch: Rows of the step, from which the tokens follow.
            step: The step. Its first calls, which may compile or build a model, are warm-up and not timed.

        Returns:
            The row of `gpu.row_of`, with tokens per second and, where the GPU's peak is known, MFU. Peak memory is
            above weights and optimizer states.
        """
        row = self._row_of(operation, by, step, self.smoke, repeats=5)
        if "ms" in row:
            row["tokens_per_s"] = 1e3 * batch * self.config.data.seq_len / row["ms"]
            if self.peak:
                flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
                row["mfu"] = row["tokens_per_s"] * flops / self.peak
        return row

    def of_module(self, operation: str, by: str, batch: int, make: Callable[[], Objective]) -> dict[str, Any]:
        """Time the training step of a module of ours and return its row of the table.

        Args:
            operation: What is measured; first column of the row.
            by: Variant that is measured.
            batch: Rows of the step.
            make: Builds the module. It is called in the first step, so that an error or too little memory is recorded
                in the row and does not end the script.
        """
        ids_BS = self.ids(batch)

        @functools.cache
        def module_and_optimizer() -> tuple[Objective, torch.optim.Optimizer]:
            module = make()
            return module, torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not self.smoke)

        def step() -> None:
            module, optimizer = module_and_optimizer()
            train(module, optimizer, ids_BS)

        return self.time(operation, by, batch, step)


def encoders(module: Objective) -> list[Encoder]:
    """Return the encoders of a module: one for each tower."""
    return [submodule for submodule in module.modules() if isinstance(submodule, Encoder)]


def step_input(module: Objective, ids_BS: torch.Tensor) -> StepInput:
    """Return the input of step 0, with the given rows as its whole global batch.

    Args:
        module: Objective, whose config decides which tokens the losses are means over.
        ids_BS: [B, S] int64 token ids.
    """
    scales = 1.0 / loss_counts(ids_BS, SPECIAL, module.objective).sum(0)
    return StepInput(ids_BS, torch.arange(len(ids_BS), device=ids_BS.device), 0, 1, *scales)


def train(module: Objective, optimizer: torch.optim.Optimizer, ids_BS: torch.Tensor) -> None:
    """Take one training step of our module: forward, backward of both losses, and update."""
    module(step_input(module, ids_BS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def time_steps(bench: StepBench) -> Rows:
    """Time the training step for each micro-batch, with kernels and references, eager and with compiled layers."""
    rows = []
    for batch in bench.batches:
        for backend in dict.fromkeys((bench.backend, "reference")):
            for compiled in (False, True):
                by = f"compiled layers ({backend})" if compiled else f"ours ({backend})"
                make = functools.partial(bench.module, backend, compiled=compiled)
                rows.append(bench.of_module(f"step B={batch}", by, batch, make))
                free()
    return rows


def time_fusions(bench: StepBench) -> Rows:
    """Time the training step with one change at a time, which shows the effect of each alone.

    The changes are: one fused operation replaced by its reference, attention without dropout, early gradients of the
    generator, and recomputed activations. The first row is the step without a change.
    """
    batch = bench.batches[1]
    rows: Rows = []

    def time_with(by: str, change: Callable[[ReplacedTokenDetection], None] | None = None) -> None:
        """Time the step of a new module after `change` was applied to it, and append its row."""

        def make() -> ReplacedTokenDetection:
            module = bench.module(bench.backend)
            if change is not None:
                change(module)
            return module

        rows.append(bench.of_module(f"step B={batch}", by, batch, make))
        free()

    time_with("ours")
    for name in FUSIONS:
        with by_reference(name):
            time_with(f"ours without {name}")
    for backend in ("sdpa", "flex"):
        if bench.device == "cuda" or backend == "sdpa":  # FlexAttention has no backward pass on a CPU.
            change = functools.partial(_without_attention_dropout, backend)
            time_with(f"ours, {backend}, no attention dropout", change)
    time_with("ours, generator early", _compute_generator_gradients_early)
    time_with("ours, activations again", _recompute)
    return rows


@contextlib.contextmanager
def by_reference(name: str) -> Iterator[None]:
    """Make one fused operation use its reference within the `with` block, whatever backend its callers pass.

    It replaces the function by which the operation's module chooses a backend, so it affects the whole process.

    Args:
        name: Module of the operation in `electra_kernels`.
    """
    kernel = importlib.import_module(f"electra_kernels.{name}")
    resolver_name = "resolve" if hasattr(kernel, "resolve") else "resolve_without_cuda"
    original_resolver = getattr(kernel, resolver_name)
    setattr(kernel, resolver_name, lambda *_: "reference")
    try:
        yield
    finally:
        setattr(kernel, resolver_name, original_resolver)


def _without_attention_dropout(backend: str, module: ReplacedTokenDetection) -> None:
    """Set the attention implementation ("sdpa" or "flex") of a module and switch its attention dropout off."""
    module.attention = AttentionChoice(backend, "benchmark")
    for submodule in module.modules():
        if isinstance(submodule, SelfAttention):
            submodule.dropout = 0.0


def _compute_generator_gradients_early(module: ReplacedTokenDetection) -> None:
    """Make a module compute the generator's gradients before the discriminator runs.

    The activations of the two towers are then never in memory together.
    """
    module.early_generator = True


def _recompute(module: ReplacedTokenDetection) -> None:
    """Make a module keep only the inputs of its layers and recompute the activations in the backward pass."""
    for encoder in encoders(module):
        encoder.recompute = True


def free() -> None:
    """Return cached, unused GPU memory to the device, so that the next variant starts like the first."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

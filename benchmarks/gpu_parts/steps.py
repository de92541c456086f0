"""Timing of one training step of ELECTRA-Large on one GPU, eager and compiled: three parts of `gpu.py`.

    steps        128 rows, eager and with compiled layers
    more_steps   the other micro-batches, and references instead of kernels
    modern       all micro-batches, eager and compiled, of the architecture `modern`, base size, rows of 1,024 tokens

A step consists of forward, backward of both losses and fused AdamW, all in bf16, with the config's dropout. MFU is the
FLOPs that `model/flops.py` counts, divided by the time and by the listed peak of the GPU. Rows hold packed examples.

Limits: no fp32 master weights, no DeepSpeed and no data loading.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gpu_parts.recording import Case, Row, Rows
from gpu_parts.timing import host_ms, time_and_peak
from torch._dynamo.utils import counters

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.corpus.row_packing import make_rows
from electra_dist.model.attention import AttentionChoice
from electra_dist.model.attention_choice import choose_attention
from electra_dist.model.compile_layers import compile_layers
from electra_dist.model.flops import peak_flops, token_flops
from electra_dist.model.initial_weights import build_towers
from electra_dist.model.row_layout import SpecialIds, example_bounds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import Objective, StepInput, loss_counts
from electra_dist.objectives.rtd import ReplacedTokenDetection

_CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = _CONFIGS / "large_25pct_mask.yaml"
MODERN_CONFIG = _CONFIGS / "modern_base.yaml"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
# Settings of a model that trains a step in milliseconds on a CPU.
TOY_MODEL = [
    "model.embedding_size=64",
    "model.discriminator={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}",
    "model.generator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}",
    "model.vocab_size=300",
    "model.max_positions=32",
    "model.hidden_dropout=0",
    "data.seq_len=32",
]

# Settings of the same kind for the architecture `modern`, whose embeddings have the width of the layers. The windows
# of local attention are shorter than the rows.
TOY_MODERN = [
    "model.embedding_size=32",
    "model.discriminator={hidden_size: 32, num_layers: 3, num_heads: 2, intermediate_size: 48}",
    "model.generator={hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 48}",
    "model.vocab_size=300",
    "model.max_positions=32",
    "model.local_window=8",
    "data.seq_len=32",
]


class StepBench:
    """Timer of training steps of one model.

    It holds the config and the initial weights, which every variant copies, and turns a step into a row of the table.
    """

    def __init__(
        self, device: str, backend: str, smoke: bool, architecture: Literal["bert", "modern"] = "bert"
    ) -> None:
        """Load the config of an architecture.

        Args:
            device: "cuda" or "cpu".
            backend: Implementation of the fused operations.
            smoke: Whether to use the toy model in fp32.
            architecture: "bert" loads the config of ELECTRA-Large, "modern" that of the architecture `modern` of base
                size.
        """
        if architecture == "bert":
            file, toy_settings = CONFIG, TOY_MODEL
        else:
            file, toy_settings = MODERN_CONFIG, TOY_MODERN
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
    def attention(self) -> AttentionChoice:
        """Return the attention backend that a run of this config would choose on this device."""
        return choose_attention(self.config, self.device)

    def module(
        self, backend: str, *, compiled: bool = False, dtype: torch.dtype | None = None
    ) -> ReplacedTokenDetection:
        """Return a new module in training mode with a copy of the initial weights, on the device.

        Args:
            backend: Implementation of the fused operations.
            compiled: Whether to compile the layers with torch.compile.
            dtype: Type of the parameters; None means that of the benchmark.
        """
        module = ReplacedTokenDetection(copy.deepcopy(self.towers), self.config.objective, SPECIAL, backend)
        module = module.to(self.device, dtype or self.dtype).train()
        module.attention = self.attention
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

    def time(self, operation: str, by: str, batch: int, step: Callable[[], object]) -> Row:
        """Time a training step and return its row of the table.

        Args:
            operation: What is measured; first column of the row.
            by: Variant that is measured.
            batch: Rows of the step, from which the tokens follow.
            step: The step. Its first calls, which may compile or build a model, are warm-up and not timed.

        Returns:
            `ms`, `peak_bytes` above weights and optimizer states, `host_ms` until the host has queued the step, tokens
            per second and, where the GPU's peak is known, MFU.
        """
        row: Row = {"operation": operation, "by": by, **time_and_peak(step, repeats=5, warm_up=3)}
        row["host_ms"] = host_ms(step, 1 if self.smoke else 3)
        row["tokens_per_s"] = 1e3 * batch * self.config.data.seq_len / row["ms"]
        if self.peak:
            flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
            row["mfu"] = row["tokens_per_s"] * flops / self.peak
        return row

    def case(self, by: str, batch: int, make: Callable[[], Objective], *, compiled: bool = False) -> Case:
        """Return the case that times the training step of a module of ours.

        Args:
            by: Variant that is measured.
            batch: Rows of the step.
            make: Builds the module. It is called in the case, so that an error or too little memory is recorded in the
                row and does not end the script.
            compiled: Whether the layers of the module are compiled; the row then has `graphs`, their number, and is
                wrong if it is 0, because the step then ran eagerly.
        """
        operation = f"step B={batch}"

        def run() -> Rows:
            module = make()
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not self.smoke)
            given = step_input(module, self.ids(batch))
            counters.clear()
            row = self.time(operation, by, batch, lambda: train(module, optimizer, given))
            row["attention"] = module.attention.backend
            if not compiled:
                return [row]
            row["graphs"] = counters["stats"]["unique_graphs"]
            return [row | {"right": row["graphs"] > 0}]

        return Case(operation, by, "compiled step" if compiled else "step", run)


def step_input(module: Objective, ids_BS: torch.Tensor) -> StepInput:
    """Return the input of step 0, with the given rows as its whole global batch.

    Args:
        module: Objective, whose config decides which tokens the losses are means over, and whose attention may need
            the bounds of the examples.
        ids_BS: [B, S] int64 token ids.
    """
    scales = 1.0 / loss_counts(ids_BS, SPECIAL, module.objective).sum(0)
    bounds = None
    if module.attention.backend == "flash":
        bounds = example_bounds(ids_BS.cpu().numpy(), SPECIAL).to(ids_BS.device)
    row_B = torch.arange(len(ids_BS), device=ids_BS.device)
    return StepInput(ids_BS, row_B, 0, 1, *scales, bounds=bounds)


def train(module: Objective, optimizer: torch.optim.Optimizer, given: StepInput) -> None:
    """Take one training step of our module: forward, backward of both losses, and update."""
    module(given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step_cases(bench: StepBench, batches: Sequence[int], backends: Sequence[str]) -> Iterator[Case]:
    """Yield the training step for each micro-batch and backend, eager and with compiled layers."""
    for batch in batches:
        for backend in backends:
            for compiled in (False, True):
                by = f"ours, compiled layers ({backend})" if compiled else f"ours ({backend})"
                make = functools.partial(bench.module, backend, compiled=compiled)
                yield bench.case(by, batch, make, compiled=compiled)


def modern_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the training step of the architecture `modern` for each micro-batch, eager and with compiled layers.

    Args:
        bench: Timer that was created with `architecture="modern"`.
    """
    for batch in bench.batches:
        for compiled in (False, True):
            by = "ours, modern, compiled layers" if compiled else "ours, modern"
            make = functools.partial(bench.module, bench.backend, compiled=compiled)
            yield bench.case(by, batch, make, compiled=compiled)

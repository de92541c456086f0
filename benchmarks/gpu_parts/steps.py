"""One training step of ELECTRA-Large on one GPU, in every way of ours: a part of `gpu.py`.

    steps      32, 64, 128 rows: kernels and references, eager and with compiled layers
    fusions    64 rows: each fused operation alone back to its reference; without attention dropout by sdpa and by
               FlexAttention; the generator's gradients made early; activations computed again

A step is forward, backward of both losses and fused AdamW, all bf16 (no fp32 master weights), with the
config's dropout. MFU is `model/flops.py`'s count over the card's listed peak. Rows hold packed examples.

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
from electra_dist.corpus.rows import make_rows
from electra_dist.model.attention import AttentionChoice
from electra_dist.model.compile import compile_layers
from electra_dist.model.encoder import Encoder, SelfAttention
from electra_dist.model.flops import peak_flops, token_flops
from electra_dist.model.init import build_towers
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import Objective, StepInput, loss_counts
from electra_dist.objectives.rtd import ReplacedTokenDetection

CONFIG = Path(__file__).parents[2] / "configs" / "large_25pct_mask.yaml"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FUSIONS = ("mlm_head", "discriminator_tail", "dropout_add_norm", "masked_gather", "replace")
Rows = list[dict[str, Any]]
RowOf = Callable[..., dict[str, Any]]


class StepBench:
    """The model on the device, once; ways of stepping it; rows of their times."""

    def __init__(self, device: str, backend: str, smoke: bool, row_of: RowOf) -> None:
        small = [*TOY, "model.vocab_size=300", "data.seq_len=32", "model.max_positions=32", "model.hidden_dropout=0"]
        self.config: Config = load_config(CONFIG, small if smoke else [])
        self.device, self.backend, self.smoke, self._row_of = device, backend, smoke, row_of
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.batches = (1, 2, 4) if smoke else (32, 64, 128)
        self.towers = build_towers(self.config.model, 1)

    @functools.cached_property
    def peak(self) -> float | None:
        """Dense bf16 FLOP/s of the card, where it is listed."""
        return None if self.smoke else peak_flops(torch.cuda.get_device_name())

    def module(self, backend: str, *, compiled: bool = False) -> ReplacedTokenDetection:
        """A fresh copy of the same initial weights."""
        made = ReplacedTokenDetection(copy.deepcopy(self.towers), self.config.objective, SPECIAL, backend)
        made = made.to(self.device, self.dtype).train()
        if compiled:
            compile_layers(made, backend="aot_eager" if self.smoke else "inductor")
        return made

    def ids(self, batch: int) -> torch.Tensor:
        """[B, S] packed rows of examples of any length."""
        generator, length = torch.Generator().manual_seed(0), self.config.data.seq_len
        examples = []
        for _ in range(8 * batch):
            size = int(torch.randint(5, length + 1, (), generator=generator))
            example = torch.randint(5, self.config.model.vocab_size, (size,), generator=generator)
            example[0], example[size // 2], example[-1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
            examples.append(example.tolist())
        rows = make_rows(examples, length, SPECIAL.pad, np.uint16, "rows")[:batch]
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def time(self, operation: str, by: str, batch: int, step: Callable[[], object]) -> dict[str, Any]:
        """A row: milliseconds, tokens a second, MFU, peak memory above weights and optimizer state."""
        row = self._row_of(operation, by, step, self.smoke, repeats=5)
        if "ms" in row:
            row["tokens_per_s"] = 1e3 * batch * self.config.data.seq_len / row["ms"]
            if self.peak:
                flops = token_flops(self.config.model, self.config.data.seq_len, self.config.objective).total
                row["mfu"] = row["tokens_per_s"] * flops / self.peak
        return row

    def of_module(self, operation: str, by: str, batch: int, make: Callable[[], Objective]) -> dict[str, Any]:
        """`time` of the training step of what `make` makes; its failure, memory too, is the row's."""
        made: list[Any] = []
        ids_BS = self.ids(batch)  # before anything is timed

        def step() -> None:
            if not made:
                module = make()
                made.extend([module, torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not self.smoke)])
            train(*made, ids_BS)

        return self.time(operation, by, batch, step)


def encoders(module: Objective) -> list[Encoder]:
    return [each for each in module.modules() if isinstance(each, Encoder)]


def step_input(module: Objective, ids_BS: torch.Tensor) -> StepInput:
    """Return step 0 over rows that are the whole global batch."""
    scales = 1.0 / loss_counts(ids_BS, SPECIAL, module.objective).sum(0)
    return StepInput(ids_BS, torch.arange(len(ids_BS), device=ids_BS.device), 0, 1, *scales)


def train(module: Objective, optimizer: torch.optim.Optimizer, ids_BS: torch.Tensor) -> None:
    """One step of ours."""
    module(step_input(module, ids_BS)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def time_steps(bench: StepBench) -> Rows:
    """Micro-batches, kernels and references, eager and compiled."""
    found = []
    for batch in bench.batches:
        for backend in dict.fromkeys((bench.backend, "reference")):
            for compiled in (False, True):
                by = f"compiled layers ({backend})" if compiled else f"ours ({backend})"
                make = functools.partial(bench.module, backend, compiled=compiled)
                found.append(bench.of_module(f"step B={batch}", by, batch, make))
                free()
    return found


def time_fusions(bench: StepBench) -> Rows:
    """What each fusion, each way of attention and each way of saving memory is worth, alone."""
    batch, found = bench.batches[1], []

    def measured(by: str, change: Callable[[ReplacedTokenDetection], None] = lambda module: None) -> None:
        def make() -> ReplacedTokenDetection:
            module = bench.module(bench.backend)
            change(module)
            return module

        found.append(bench.of_module(f"step B={batch}", by, batch, make))
        free()

    measured("ours")
    for name in FUSIONS:
        with by_reference(name):
            measured(f"ours without {name}")
    for backend in ("sdpa", "flex"):
        if bench.device == "cuda" or backend == "sdpa":  # FlexAttention has no backward on a CPU
            change = functools.partial(_without_attention_dropout, backend)
            measured(f"ours, {backend}, no attention dropout", change)
    measured("ours, generator early", lambda module: setattr(module, "early_generator", True))
    measured("ours, activations again", _recompute)
    return found


@contextlib.contextmanager
def by_reference(name: str) -> Iterator[None]:
    """The operation of `electra_kernels.name` by its reference, whatever backend is demanded."""
    kernel = importlib.import_module(f"electra_kernels.{name}")
    resolver = "resolve" if hasattr(kernel, "resolve") else "resolve_without_cuda"
    kept = getattr(kernel, resolver)
    setattr(kernel, resolver, lambda *_: "reference")
    try:
        yield
    finally:
        setattr(kernel, resolver, kept)


def _without_attention_dropout(backend: str, module: ReplacedTokenDetection) -> None:
    module.attention = AttentionChoice(backend, "benchmark")
    for each in module.modules():
        if isinstance(each, SelfAttention):
            each.dropout = 0.0


def _recompute(module: ReplacedTokenDetection) -> None:
    for each in encoders(module):
        each.recompute = True


def free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

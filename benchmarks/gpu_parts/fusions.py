"""Timing of the training step of ELECTRA-Large with one change at a time: the part `fusions` of `gpu.py`.

The changes: each fused operation alone replaced by its reference; attention by scaled_dot_product_attention; no
attention dropout, with sdpa and with FlexAttention; the generator's gradients computed early; activations recomputed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator

from gpu_parts.recording import Case, Rows
from gpu_parts.steps import StepBench

from electra_dist.model.attention import AttentionChoice
from electra_dist.model.encoder import Encoder, SelfAttention
from electra_dist.objectives.base import Objective
from electra_dist.objectives.rtd import ReplacedTokenDetection

FUSIONS = ("mlm_head", "discriminator_tail", "dropout_add_norm", "masked_gather", "replace_tokens")


def fusion_cases(bench: StepBench) -> Iterator[Case]:
    """Yield the training step with one change at a time, which shows the effect of each alone.

    The changes are: one fused operation replaced by its reference, attention without dropout, and recomputed
    activations. The first case is the step without a change.
    """
    batch = bench.batches[1]

    def with_change(by: str, change: Callable[[ReplacedTokenDetection], None] | None = None) -> Case:
        """Return the case of a new module after `change` was applied to it."""

        def make() -> ReplacedTokenDetection:
            module = bench.module(bench.backend)
            if change is not None:
                change(module)
            return module

        return bench.case(by, batch, make)

    yield with_change("ours")
    for name in FUSIONS:
        case = with_change(f"ours without {name}")
        yield case._replace(run=functools.partial(_run_by_reference, name, case.run))
    if bench.attention.backend != "sdpa":
        yield with_change("ours, sdpa", _use_sdpa)
    for backend in ("sdpa", "flex"):
        if bench.device == "cuda" or backend == "sdpa":  # FlexAttention has no backward pass on a CPU.
            change = functools.partial(_without_attention_dropout, backend)
            case = with_change(f"ours, {backend}, no attention dropout", change)
            yield case._replace(kind="compiled step") if backend == "flex" else case
    yield with_change("ours, activations again", _recompute)


def _run_by_reference(name: str, run: Callable[[], Rows]) -> Rows:
    """Run a case while one fused operation uses its reference."""
    with by_reference(name):
        return run()


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


def _use_sdpa(module: ReplacedTokenDetection) -> None:
    """Set the attention implementation to scaled_dot_product_attention with a bias, and keep its dropout."""
    module.attention = AttentionChoice("sdpa", "benchmark")


def _without_attention_dropout(backend: str, module: ReplacedTokenDetection) -> None:
    """Set the attention implementation ("sdpa" or "flex") of a module and switch its attention dropout off."""
    module.attention = AttentionChoice(backend, "benchmark")
    for submodule in module.modules():
        if isinstance(submodule, SelfAttention):
            submodule.dropout = 0.0


def _recompute(module: ReplacedTokenDetection) -> None:
    """Make a module keep only the inputs of its layers and recompute the activations in the backward pass."""
    for encoder in encoders(module):
        encoder.recompute = True


def encoders(module: Objective) -> list[Encoder]:
    """Return the encoders of a module: one for each tower."""
    return [submodule for submodule in module.modules() if isinstance(submodule, Encoder)]

"""Applies torch.compile to the layers of the towers (generator and discriminator), if `engine.compile` is set.

Guarantee: one compiled graph for each tower, for training and for evaluation, whatever its number of layers and the
step, because everything that differs between layers and between steps is passed in tensors. There are no graph breaks
(tests/objectives/test_compile.py counts them). The compiler treats the fused operations and the random draws keyed by
(seed, step, row) as opaque operators, and fuses what is between them. The number of sequences that FlashAttention
reads varies between micro-batches and is therefore a symbol of the graph.

Cost: a minute or more at the first step (two cores, busy: 85 s). Later starts find the compiled code in the cache
folder of the node. Their first step takes 25 s on the same machine, because layers are traced, but not compiled.

Limits: whole parameters only (ZeRO 0 to 2). Compiling does not pay on a CPU: steps of ELECTRA-Small are 5 % faster,
and the first one takes a minute longer (2 cores of an AMD EPYC 7003, fp32). benchmarks/gpu.py measures the effect on a
GPU and has not been run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from electra_dist.model.compile_options import compile_options
from electra_dist.model.encoder import Encoder
from electra_dist.model.row_layout import ExampleBounds
from electra_dist.store.user_cache import keep_compiled_code


def compile_layers(module: nn.Module, cache: Path | None = None, backend: str = "inductor") -> None:
    """Mark every layer of every `Encoder` in a module for compilation; each compiles when it is first called.

    Args:
        module: any module that contains the towers (generator and discriminator), such as an objective.
        cache: folder for compiled code, on a disk of this node. It is written to the environment variable
            TORCHINDUCTOR_CACHE_DIR, unless the user has set that variable to a folder other than torch's default. None
            leaves the variable as it is.
        backend: backend of torch.compile; tests pass their own.
    """
    if cache is not None:
        keep_compiled_code(cache)
    for encoder in module.modules():
        if isinstance(encoder, Encoder):
            encoder.register_forward_pre_hook(_allow_any_number_of_sequences)
            for layer in encoder.layers:
                layer.compile(**compile_options(backend))


def _allow_any_number_of_sequences(encoder: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Mark the number of sequences in FlashAttention's bounds as one that may differ at the next call.

    Without the mark every number would compile a graph of its own. It is a forward pre-hook of an `Encoder`, whose
    second argument is the attention mask.
    """
    attention_mask = inputs[1]
    if isinstance(attention_mask, ExampleBounds):
        torch._dynamo.maybe_mark_dynamic(attention_mask.cu_seqlens, 0)

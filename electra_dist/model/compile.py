"""torch.compile of the towers' layers (`engine.compile`).

Guarantee: a graph for each tower, training or evaluating, whatever its number of layers and the step: what differs
from layer to layer and from step to step is in tensors. No graph breaks (tests/objectives/test_compile.py counts
them). The fused and the keyed operations stay what they are; the compiler joins what is between them.

Cost: a minute or more at the first step (two cores, busy: 85 s); later starts find the compiled code in the cache
folder of the node (25 s there: it is traced again, not compiled).

Where it stops: whole parameters (ZeRO 0 to 2). On a CPU it does not pay: ELECTRA-Small's step gains 5 % and the first
one takes a minute longer (2 cores of an AMD EPYC 7003, fp32). On a GPU benchmarks/gpu.py tells; it has not been run.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from electra_dist.model.encoder import Encoder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(module: nn.Module, cache: Path | None = None, backend: str = "inductor") -> None:
    """Have every layer compiled when it is first called.

    Args:
        module: whatever holds the towers.
        cache: folder for compiled code, unless the environment names one; default: torch's.
        backend: of torch.compile.
    """
    # torch writes its own default into the environment when it is imported.
    if cache is not None and os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        os.environ[CACHE_VARIABLE] = str(cache.absolute())
    for encoder in module.modules():
        if isinstance(encoder, Encoder):
            for layer in encoder.layers:
                layer.compile(backend=backend, dynamic=False)

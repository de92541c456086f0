"""Give each rank's share of the training state as named ranges ("fragments"), at every ZeRO stage.

Guarantee: over all ranks the owned fragments cover every element of every parameter exactly once. A fragment has the
fp32 master weights and both moments as writable 1-D views. Saving copies out of the views; loading copies into them
and calls `engine.layout.publish`. A loading rank asks for elements and not for files, so any number of ranks may load
a checkpoint.

How: `zero.py` knows where DeepSpeed keeps the master weights. At stage 0 every rank holds all; the ranks share the
writing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from electra_dist.checkpoint.manifest import KINDS, Fragment, Kind
from electra_dist.engine.engine import Engine
from electra_dist.engine.foreach_optimizers import MOMENTS, ForeachAdamW, moments_of
from electra_dist.version import DEEPSPEED

assert ("master", *MOMENTS) == KINDS


def owned_fragments(engine: Engine) -> list[Fragment]:
    """Return the ranges of parameters ("fragments") that this rank, and no other, writes into a checkpoint.

    At ZeRO stage 0, where every rank holds everything, each parameter is cut into one part per rank. The fragments'
    fp32 views are the live state: whoever writes into them changes the engine. Not collective.
    """
    return _fragments(engine, share=dist.get_rank(), num_shares=dist.get_world_size())


def held_fragments(engine: Engine) -> list[Fragment]:
    """Return the ranges of parameters ("fragments") that this rank fills when it loads a checkpoint.

    At ZeRO stage 0 these are whole parameters; at stages 1 to 3 they are those of `owned_fragments`. Call
    `engine.layout.publish` after writing into their views.
    """
    return _fragments(engine, share=0, num_shares=1)


def _fragments(engine: Engine, share: int, num_shares: int) -> list[Fragment]:
    """Return this rank's ranges of parameters with views of their master weights and moments.

    Missing moments are created as zeros. At stage 0, where every rank holds everything, the ranges are part `share` of
    `num_shares` of each parameter.
    """
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the optimizer that does the updates
    fragments = []
    for master in engine.layout.masters(engine.deepspeed.module, share, num_shares):
        exp_avgs, exp_avg_sqs = moments_of(base, [master.flat])
        if not isinstance(base, ForeachAdamW):
            # Fused Adams count steps; without bias correction they never use the count.
            base.state[master.flat].setdefault("step", 0)
        flat_tensors: dict[Kind, torch.Tensor] = {
            "master": master.flat,
            "exp_avg": exp_avgs[0],
            "exp_avg_sq": exp_avg_sqs[0],
        }
        views = {}
        for kind, tensor in flat_tensors.items():
            view = tensor.detach().reshape(-1).narrow(0, master.offset, master.numel)
            if view.dtype != torch.float32:
                raise RuntimeError(
                    f"{kind} of parameter {master.name} is {view.dtype}, but checkpoints hold float32; install "
                    f"deepspeed=={DEEPSPEED}"
                )
            views[kind] = view
        fragments.append(Fragment(name=master.name, start=master.start, numel=master.numel, views=views))
    return fragments


def shared_names(module: nn.Module) -> dict[str, str]:
    """Return a dict from each further name of a parameter to its first name, which checkpoints use."""
    stored_names: dict[int, str] = {}
    aliases = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored_name = stored_names.setdefault(id(parameter), name)
        if stored_name != name:
            aliases[name] = stored_name
    return aliases


def parameter_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the whole shape of every parameter by name, even if ZeRO-3 partitions it; shared ones are listed once."""
    shapes = {}
    for name, parameter in module.named_parameters():
        whole_shape = getattr(parameter, "ds_shape", parameter.shape)  # `ds_shape` exists at ZeRO stage 3 only
        shapes[name] = list(whole_shape)
    return shapes

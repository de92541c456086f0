"""The reference's initialisation, keyed by the seed.

Guarantee: a parameter's start depends on (seed, its name, its shape) and on nothing else: the same bits on every rank
and whatever else the model holds. Truncated normal (standard deviation 0.02, cut at two deviations, as TF does) for
embeddings and kernels, zeros for biases, ones and zeros for LayerNorms, and Glorot-uniform where the reference left
TF's default: the embeddings' projection and the discriminator's last Dense(1); for the other layers of one unit (copy
gate, baseline) the same. Pad rows of a token table and tables that are differences (`gdes`) are zero.

Source: google-research/electra, model/modeling.py and pretrain/run_pretraining.py.
Cost: one pass on the host, in fp32; 8 s of one core for ELECTRA-Large. `build_towers` skips torch's own
initialisation, which would take as long again.

Where it stops: machines whose vector libraries round erfinv differently may differ in last bits; DeepSpeed broadcasts
rank 0's parameters when the engine starts, so ranks never do.
"""

from __future__ import annotations

import math
import zlib

import torch
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.encoder import SharedEmbeddings
from electra_dist.model.towers import ElectraTowers

_GLOROT = ("embeddings_project", "out", "copy_gate", "baseline")  # last names; "out" of the discriminator's head only


def build_towers(model: ModelConfig, seed: int, objective: ObjectiveConfig | None = None) -> ElectraTowers:
    """Initialised towers on the host, those of `objective` (default: replaced-token detection)."""
    with torch.device("meta"):
        towers = ElectraTowers(model, objective)
    towers.to_empty(device="cpu")
    init_towers(towers, model, seed)
    return towers


@torch.no_grad()
def init_towers(towers: ElectraTowers, model: ModelConfig, seed: int) -> None:
    """Fill every parameter of `towers` in place."""
    norms = {name for name, module in towers.named_modules() if isinstance(module, nn.LayerNorm)}
    for name, parameter in towers.named_parameters():
        owner, _, kind = name.rpartition(".")
        generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, zlib.crc32(name.encode())))
        if kind == "bias":
            parameter.zero_()
        elif owner in norms:
            parameter.fill_(1.0)
        elif towers.is_difference and owner.startswith("discriminator_embeddings."):
            parameter.zero_()
        elif owner.rpartition(".")[2] in _GLOROT and not owner.endswith("attention.out"):
            bound = math.sqrt(6.0 / sum(parameter.shape))
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
        else:
            parameter.copy_(_truncated_normal(parameter.shape, model.initializer_range, generator))
    for module in towers.modules():
        if isinstance(module, SharedEmbeddings):
            module.word.weight[model.vocab_size :] = 0.0


def _truncated_normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    """Inverse CDF of uniforms: one pass, and no rejection loop whose form depends on torch's version."""
    edge = math.erf(2.0 / math.sqrt(2.0))
    uniform = torch.empty(shape).uniform_(-edge, edge, generator=generator)
    return uniform.erfinv_().mul_(std * math.sqrt(2.0))

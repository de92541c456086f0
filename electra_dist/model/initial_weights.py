"""Initialise the towers as the reference (google-research/electra) does, from random numbers keyed by the seed.

Guarantee: the initial value of a parameter depends on (seed, its name, its shape) only, so it has the same bits on
every rank and whatever other parameters the model has.

    embeddings, dense weights      truncated normal, standard deviation 0.02, cut at twice that, as TF does
    biases                         zero
    LayerNorms                     weight one, bias zero
    embeddings' projection, and    Glorot-uniform, because the reference left TF's default for the projection and the
    layers of one unit             discriminator's last Dense(1); copy gate and baseline follow
    pad rows of a token table,     zero
    `gdes` difference tables
    last matrix of each sub-layer  normal as above, with the deviation divided by sqrt(2 x layers)
    of `architecture: modern`

Source: google-research/electra, model/modeling.py and pretrain/run_pretraining.py.
Cost: one pass on the host, in fp32; 8 s of one core for ELECTRA-Large. `build_towers` skips torch's own
initialisation, which would take as long again.

Limits: machines whose vector libraries round erfinv differently may differ in the last bits. Ranks of one run never
do, because DeepSpeed broadcasts rank 0's parameters when the engine starts.
"""

from __future__ import annotations

import math
import zlib

import torch
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.encoder import Embeddings
from electra_dist.model.towers import ElectraTowers

# Last component of the names of modules with Glorot-uniform weights, such as "generator.embeddings_project" and
# "copy_gate".
_GLOROT = ("embeddings_project", "out", "copy_gate", "baseline")


def build_towers(model: ModelConfig, seed: int, objective: ObjectiveConfig | None = None) -> ElectraTowers:
    """Build and initialise generator and discriminator with embeddings and heads, in fp32 on the host."""
    # Parameters on the device "meta" have no memory, so torch's own initialisation of them costs nothing.
    with torch.device("meta"):
        towers = ElectraTowers(model, objective)
    towers.to_empty(device="cpu")
    init_towers(towers, model, seed)
    return towers


@torch.no_grad()
def init_towers(towers: ElectraTowers, model: ModelConfig, seed: int) -> None:
    """Set every parameter of `towers`, which must be on the host, to its initial value in place."""
    layer_norms = {name for name, module in towers.named_modules() if isinstance(module, nn.LayerNorm)}
    for name, parameter in towers.named_parameters():
        # "discriminator.layers.0.expand.weight" is the parameter "weight" of "discriminator.layers.0.expand".
        module_name, _, own_name = name.rpartition(".")
        generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, zlib.crc32(name.encode())))
        if own_name == "bias":
            parameter.zero_()
        elif module_name in layer_norms:
            parameter.fill_(1.0)
        elif towers.is_difference and module_name.startswith("discriminator_embeddings."):
            parameter.zero_()
        elif _is_glorot(module_name):
            parameter.copy_(_glorot_uniform(parameter.shape, generator))
        else:
            std = _standard_deviation(model, module_name)
            parameter.copy_(_truncated_normal(parameter.shape, std, generator))

    # The table's rows beyond the vocabulary only pad it to a multiple of 128.
    for module in towers.modules():
        if isinstance(module, Embeddings):
            module.word.weight[model.vocab_size :] = 0.0


def _standard_deviation(model: ModelConfig, module_name: str) -> float:
    """Return the standard deviation for a weight matrix; it is smaller for the last matrix of a `modern` sub-layer."""
    # The outputs of these matrices are added to the residual stream, whose variance would otherwise grow with the
    # depth.
    writes_to_residual = ".layers." in module_name and module_name.endswith(("attention.out", "contract"))
    if model.architecture == "bert" or not writes_to_residual:
        return model.initializer_range
    tower = model.generator if module_name.startswith("generator") else model.discriminator
    return float(model.initializer_range / math.sqrt(2 * tower.num_layers))


def _is_glorot(module_name: str) -> bool:
    """Return whether a module's initial weights are Glorot-uniform, judged by the last part of its name."""
    if module_name.endswith("attention.out"):
        return False
    last_component = module_name.rpartition(".")[2]
    return last_component in _GLOROT


def _glorot_uniform(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 draws from U(-b, b) with b = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    fan_sum = sum(shape)
    bound = math.sqrt(6.0 / fan_sum)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _truncated_normal(shape: torch.Size, std: float, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 draws from a normal distribution of mean 0 and deviation `std`, cut at two deviations."""
    # A uniform draw u becomes a normal draw by the inverse CDF, std * sqrt(2) * erfinv(u). u is drawn from (-p, p),
    # where p is the probability that a normal draw lies within two deviations, so no result lies outside. This takes
    # one pass. torch's own function may use a rejection loop instead, whose results could change with torch's version.
    mass_within_two_deviations = math.erf(2.0 / math.sqrt(2.0))
    uniform = torch.empty(shape).uniform_(-mass_within_two_deviations, mass_within_two_deviations, generator=generator)
    return uniform.erfinv_().mul_(std * math.sqrt(2.0))

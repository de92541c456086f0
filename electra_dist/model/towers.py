"""Build the towers and heads of an objective as one module, whose parameter names are those in a checkpoint.

A tower is a stack of transformer layers. Every objective has a large tower, the model that is kept after pretraining.
It is named `discriminator`, also where it learns to predict tokens. Most objectives have a generator as well.

Guarantee: a parameter exists if and only if its objective trains it, so that ZeRO finds no gradient missing.

    embeddings                 token, position and type tables and their LayerNorm. With sharing `none` only the
                               generator reads them; with `gdes` both towers do, but only the generator trains them
    discriminator_embeddings   sharing `none`: the discriminator's own tables; `gdes`: what the discriminator adds to
                               the generator's tables
    generator, generator_head  if the objective has a generator network; with sharing `all` its layers are those of
                               the discriminator, and only the head exists separately
    generator_reverse          electric: the generator tower that reads from right to left
    baseline                   adversarial: the generator's estimate of its reward
    discriminator              the large tower
    discriminator_head         if the large tower detects replaced tokens
    token_head                 if the large tower predicts tokens, alone or beside detecting replaced ones
    copy_gate                  all_tokens_mlm: the gate between copying and predicting

The number of rows of the token table is rounded up to a multiple of 128. The up to 127 pad rows start at zero, are
never looked up and are in no softmax, so they never train. `counts.py` counts parameters without them.

`PARTS` has the classes of each architecture that `model.architecture` may name, so that callers do not depend on it.
Those of `modern` (`modern_encoder.py`, `heads.py`) are subclasses of those of `bert` (`encoder.py`, `heads.py`) or of
their base classes, with the same shapes of inputs and outputs.
`attention.new_attention_mask` makes the mask for either.

Initial weights are those of the reference (google-research/electra, model/modeling.py and
pretrain/run_pretraining.py), from random numbers keyed by the seed. The initial value of a parameter depends on (seed,
its name, its shape) only, so it has the same bits on every rank and whatever other parameters the model has.

    embeddings, dense weights      truncated normal, standard deviation 0.02, cut at twice that, as TF does
    biases                         zero
    LayerNorms                     weight one, bias zero
    embeddings' projection, and    Glorot-uniform, because the reference left TF's default for the projection and the
    layers of one unit             discriminator's last Dense(1); copy gate and baseline follow
    pad rows of a token table,     zero
    `gdes` difference tables
    last matrix of each sub-layer  normal as above, with the deviation divided by sqrt(2 x layers)
    of `architecture: modern`

Cost: one pass on the host, in fp32; 8 s of one core for ELECTRA-Large. `build_towers` skips torch's own
initialisation, which would take as long again.

Limits: machines whose vector libraries round erfinv differently may differ in the last bits of initial weights. Ranks
of one run never do, because DeepSpeed broadcasts rank 0's parameters when the engine starts.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.model.encoder import Embeddings, Encoder, SharedEmbeddings
from electra_dist.model.heads import DiscriminatorHead, GeneratorHead, ModernDetectionHead, ModernTokenHead
from electra_dist.model.modern_encoder import ModernEmbeddings, ModernEncoder

# Last component of the names of modules with Glorot-uniform weights, such as "generator.embeddings_project" and
# "copy_gate".
_GLOROT = ("embeddings_project", "out", "copy_gate", "baseline")


class Parts(NamedTuple):
    """Module classes of one architecture; classes that the architectures have in one field take equal arguments."""

    embeddings: type[Embeddings]  # (model, number of features)
    encoder: type[Encoder]  # (model, tower, number of features that the layers receive)
    token_head: type[GeneratorHead]  # (model, hidden size, columns of the token table, which is its output matrix)
    detection_head: type[DiscriminatorHead]  # (model)


PARTS = {
    "bert": Parts(SharedEmbeddings, Encoder, GeneratorHead, DiscriminatorHead),
    "modern": Parts(ModernEmbeddings, ModernEncoder, ModernTokenHead, ModernDetectionHead),
}


class ElectraTowers(nn.Module):
    """Embeddings, towers and heads that one objective trains; test with `hasattr` which of them exist."""

    generator: Encoder
    generator_reverse: Encoder
    generator_head: GeneratorHead
    baseline: nn.Linear
    discriminator_head: DiscriminatorHead
    token_head: GeneratorHead
    copy_gate: nn.Linear
    discriminator_embeddings: Embeddings

    def __init__(self, model: ModelConfig, objective: ObjectiveConfig | None = None) -> None:
        """Create the submodules that the objective trains, in an order on which states in checkpoints depend."""
        super().__init__()
        if objective is None:
            objective = ObjectiveConfig()
        self.model = model
        # The discriminator then has tables of its own: full ones, or (gdes) differences to the generator's.
        separate_embeddings = model.sharing in ("none", "gdes") and objective.trains_generator
        generator_width = model.generator_embedding_width if separate_embeddings else model.embedding_size
        self.is_difference = separate_embeddings and model.sharing == "gdes"
        embeddings = PARTS[model.architecture].embeddings
        self.embeddings = embeddings(model.for_generator if separate_embeddings else model, generator_width)
        if separate_embeddings:
            self.discriminator_embeddings = embeddings(model, model.embedding_size)
        if self.is_difference:
            # Writing to __dict__ registers no second name for the generator's parameters.
            self.discriminator_embeddings.__dict__["base"] = self.embeddings
        if objective.trains_generator:
            self._add_generator(objective, generator_width)
        self._add_discriminator(objective)
        if objective.trains_generator and model.sharing == "all":
            # Here, too, each shared parameter has one name only.
            self.__dict__["generator"] = self.discriminator

    def _add_generator(self, objective: ObjectiveConfig, embedding_width: int) -> None:
        """Add the generator's layers, unless both towers share them, its head, and what only some objectives need."""
        model = self.model.for_generator
        parts = PARTS[model.architecture]
        hidden_size = model.generator.hidden_size
        if model.sharing != "all":
            self.generator = parts.encoder(model, model.generator, embedding_width)
        head_input_size = hidden_size
        if objective.facts.has_cloze_generator:
            self.generator_reverse = parts.encoder(model, model.generator, embedding_width)
            head_input_size = 2 * hidden_size  # the head reads the states of both towers
        self.generator_head = parts.token_head(model, head_input_size, embedding_width)
        if objective.facts.generator_estimates_reward:
            self.baseline = nn.Linear(hidden_size, 1)

    def _add_discriminator(self, objective: ObjectiveConfig) -> None:
        model = self.model
        parts = PARTS[model.architecture]
        hidden_size = model.discriminator.hidden_size
        self.discriminator = parts.encoder(model, model.discriminator, model.embedding_size)
        if not objective.facts.predicts_tokens:
            self.discriminator_head = parts.detection_head(model)
        if objective.facts.predicts_tokens or objective.discriminator_mlm_weight:
            self.token_head = parts.token_head(model, hidden_size, model.embedding_size)
        if objective.facts.copies_tokens:
            self.copy_gate = nn.Linear(hidden_size, 1)

    def is_generators(self, name: str) -> bool:
        """Return whether only the generator's loss trains the parameter `name`; `optimizer.generator` then holds."""
        parts: tuple[str, ...] = ("generator", "generator_reverse", "generator_head", "baseline")
        if hasattr(self, "discriminator_embeddings"):
            parts += ("embeddings",)
        return name.partition(".")[0] in parts

    def discriminator_table(self) -> torch.Tensor:
        """Return the discriminator's token table, [V, E], which is also the output matrix of its token head.

        With `model.sharing: gdes` it is the generator's table, without gradient, plus the discriminator's difference.
        """
        if not hasattr(self, "discriminator_embeddings"):
            return self.embeddings.word.weight
        own_table = self.discriminator_embeddings.word.weight
        if self.is_difference:
            return self.embeddings.word.weight.detach() + own_table
        return own_table


class WithoutInitialValues(TorchFunctionMode):
    """Mode of torch in which new modules draw no initial values, which would import torch's compiler on "meta"."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def build_towers(model: ModelConfig, seed: int, objective: ObjectiveConfig | None = None) -> ElectraTowers:
    """Build the networks that an objective trains, with embeddings and heads and initial weights, in fp32 on the host.

    The weights are a function of `seed` and the parameters' names and shapes. `objective` None stands for
    replaced-token detection.
    """
    with torch.device("meta"), WithoutInitialValues():
        towers = ElectraTowers(model, objective)
    towers.to_empty(device="cpu")
    init_towers(towers, model, seed)
    return towers


@torch.no_grad()
def init_towers(towers: ElectraTowers, model: ModelConfig, seed: int) -> None:
    """Set every parameter of the networks, which must be on the host, to its initial value by `seed`, in place."""
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
    """Return whether a module's initial weights are Glorot-uniform, judged by its name."""
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

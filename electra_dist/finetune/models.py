"""Define the models that fine-tuning trains: transformers' classes with a pretrained encoder and a new head.

Guarantee: the model that is trained is the one that is written; its class, config and weights are those of Hugging
Face's ELECTRA or ModernBERT. A regression alone is trained on labels that are scaled to [0, 1], and written with an
output layer in the units of the labels. The initial weights of a head are a function of (seed, parameter name, shape):
Glorot-uniform, as is TF's default, with biases of 0. In models of the architecture `modern`, the layers below the
output layer begin with the weights of the pretraining head, as they do when Hugging Face's classes read an export.
Losses and scores are fp32 whatever the precision of the states.

How: `network` computes outputs of token ids, and a `TaskModel` their loss. `StockNetwork` is a class of transformers;
`paper_heads.py` has the heads of google-research/electra, which transformers lacks.

Shapes: B rows, S tokens, H hidden width, N outputs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.operation_types import SpecialIds
from torch import nn
from typing_extensions import override

from electra_dist.extras import missing_packages
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.row_layout import derive
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.hf import ELECTRA, State, family_of, to_hf
from electra_dist.pretrained.hf_settings import hf_config

NO_WORD = -100  # target of a token that is not the first piece of a word
_PRETRAINED_HEAD = {"head.dense.weight": "dense.weight", "head.norm.weight": "layer_norm.weight"}  # of `modern`


class Network(nn.Module):
    """Encoder with a head: a module from token ids to outputs.

    `forward` takes padded rows of ids, int64 [B, S], each one `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, and the
    random keys of the encoder's dropout, or None in evaluation mode.
    """

    encoder_prefix: str  # of the names of the encoder's parameters; all others are the head's


class StockNetwork(Network):
    """Class of transformers for a task, such as ElectraForSequenceClassification. Its dropout needs no keys."""

    def __init__(
        self,
        encoder: Pretrained,
        task: Literal["SequenceClassification", "TokenClassification", "QuestionAnswering"],
        head_config: dict[str, Any],
        settings: FinetuneConfig,
        seed: int,
    ) -> None:
        """Copy the weights of `encoder`, and add a head; `head_config` has its entries of config.json."""
        super().__init__()
        try:
            from transformers import AutoConfig, models
        except ImportError:
            raise missing_packages("fine-tuning", "finetune") from None
        encoder.check_complete()
        family = family_of(encoder.model)
        architecture = f"{family.token_class.removesuffix('ForMaskedLM')}For{task}"
        shape = encoder.model.model_copy(
            update={
                "discriminator": encoder.tower,
                "hidden_dropout": settings.hidden_dropout,
                "attention_dropout": settings.attention_dropout,
            }
        )
        self.special = encoder.special
        self.config = hf_config(shape, "discriminator", encoder.special, architecture) | head_config
        self.has_token_types = family is ELECTRA
        self.encoder_prefix = f"model.{family.prefix}"
        config = AutoConfig.for_model(**self.config)
        config.reference_compile = False  # older versions compile a ModernBERT by themselves
        self.model: nn.Module = getattr(getattr(models, family.model_type), architecture)(config)
        weights = _encoder_weights(encoder, shape) | _pretrained_head(encoder, self.model)
        new_names, unknown_names = self.model.load_state_dict(weights, strict=False)
        assert not unknown_names and not any(name.startswith(family.prefix) for name in new_names)
        init_head(((name, self.model.get_parameter(name)) for name in new_names), seed)

    def forward(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits: [B, N] of texts, [B, S, N] of tokens, or [B, S, 2] of an answer's start and end."""
        inputs = {"input_ids": ids_BS, "attention_mask": (ids_BS != self.special.pad).long()}
        if self.has_token_types:
            inputs["token_type_ids"] = derive(ids_BS, self.special).token_type_BS
        output = self.model(**inputs)
        if "start_logits" in output:
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        logits: torch.Tensor = output.logits
        return logits


class TaskModel(nn.Module):
    """Network with the loss of a task: the base class of the models that `training_loop.fit` trains."""

    def __init__(self, network: Network, special: SpecialIds) -> None:
        """Take a network; training changes it itself, because it is not copied."""
        super().__init__()
        self.network = network
        self.special = special

    @property
    def encoder_prefix(self) -> str:
        """Return the prefix of the names of the encoder's parameters, such as "electra."."""
        return f"network.{self.network.encoder_prefix}"

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean loss of a batch of padded rows, as an fp32 scalar.

        `target_BK` has K targets per row: int64 label numbers or positions, or fp32 numbers for a regression.
        `dropout_keys` are the random keys that determine the dropout of an encoder of this project.
        """
        raise NotImplementedError

    def predict(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs in fp32; the model must be in evaluation mode."""
        outputs: torch.Tensor = self.network(ids_BS)
        return outputs.float()

    def hf_config(self) -> dict[str, Any] | None:
        """Return config.json of the class of transformers that the network is; None if it is none."""
        return self.network.config if isinstance(self.network, StockNetwork) else None

    def hf_weights(self) -> State:
        """Return the weights of that class in fp32 on the host."""
        assert isinstance(self.network, StockNetwork)
        return {name: weight.detach().float().cpu() for name, weight in self.network.model.state_dict().items()}


class Classifier(TaskModel):
    """Classifier of texts, with one output per label; a single output makes it a regression."""

    def __init__(self, network: Network, special: SpecialIds, label_range: tuple[float, float] | None = None) -> None:
        """Take a network; `label_range` has the lowest and the highest label of a regression."""
        super().__init__(network, special)
        self.label_range = label_range

    @override
    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        output_BN = self.network(ids_BS, dropout_keys).float()
        if self.label_range is not None:
            return F.mse_loss(output_BN, target_BK.float())  # of labels scaled to [0, 1]
        return F.cross_entropy(output_BN, target_BK[:, 0].long())

    @override
    def hf_weights(self) -> State:
        weights = dict(super().hf_weights())
        if self.label_range is not None:
            low, high = self.label_range
            *_, weight_name, bias_name = weights  # the output layer is the last one
            weights[weight_name] = weights[weight_name] * (high - low)
            weights[bias_name] = weights[bias_name] * (high - low) + low
        return weights


class Tagger(TaskModel):
    """Classifier of words, with one output per tag at every token."""

    @override
    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy over the words of a batch.

        `target_BK` has the number of the tag at the first piece of each word, and `NO_WORD` elsewhere. K is the length
        of the longest row of all batches, so only the first S columns are used.
        """
        logit_BSN = self.network(ids_BS, dropout_keys).float()
        target_BS = target_BK[:, : ids_BS.shape[1]]
        return F.cross_entropy(logit_BSN.flatten(0, 1), target_BS.flatten(), ignore_index=NO_WORD)


def labels_config(labels: Sequence[str]) -> dict[str, Any]:
    """Return the entries of config.json that name the outputs of a head, in order."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


@torch.no_grad()
def init_head(parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Initialize the named parameters of a head in place: matrices Glorot-uniform, biases 0, norms as they are.

    Each matrix has a generator of its own, keyed by the seed and the parameter's name, so the order of the parameters
    and torch's global generator do not matter. Values are drawn on the host in fp32.
    """
    for name, parameter in parameters:
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim > 1:
            name_number = zlib.crc32(name.encode())  # unlike hash(), equal in all processes
            generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, name_number))
            # Glorot-uniform: values in [-b, b] with b = sqrt(6 / (fan_in + fan_out)), for a weight [fan_out, fan_in].
            sum_of_fans = sum(parameter.shape)
            bound = math.sqrt(6.0 / sum_of_fans)
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def _encoder_weights(encoder: Pretrained, shape: Any) -> dict[str, torch.Tensor]:
    """Return the weights of embeddings and layers under Hugging Face's names."""
    # The table of names is that of a discriminator, whichever tower this is.
    weights = {}
    for name, tensor in encoder.state.items():
        if name.startswith("encoder."):
            weights[f"discriminator.{name.removeprefix('encoder.')}"] = tensor
        elif not name.startswith("head."):
            weights[name] = tensor
    return to_hf(weights, shape, "discriminator")


def _pretrained_head(encoder: Pretrained, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the pretraining head that a class of ModernBERT takes over; empty if they do not fit."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    head = encoder.head_state()
    fitting = {
        theirs: head[ours]
        for theirs, ours in _PRETRAINED_HEAD.items()
        if theirs in sizes and ours in head and head[ours].shape == sizes[theirs]
    }
    return fitting if len(fitting) == len(_PRETRAINED_HEAD) else {}

"""Define the models that fine-tuning trains: transformers' classes with a pretrained encoder and a new head.

Guarantee: the model that is trained is the one that is written; its class, config and weights are those of Hugging
Face's ELECTRA or ModernBERT. A regression alone is trained on labels that are scaled to [0, 1], and written with an
output layer in the units of the labels. The initial weights of a head are a function of (seed, parameter name, shape):
Glorot-uniform, as is TF's default, with biases of 0. In models of the architecture `modern`, the layers below the
output layer begin with the weights of the pretraining head, as they do when Hugging Face's classes read an export.
Losses and scores are fp32 whatever the precision of the states.

How: `network` computes outputs of token ids, and a `TaskModel` their loss. `StockNetwork` is a class of transformers;
`paper_heads.py` has the heads of google-research/electra, which transformers lacks.

The passage of a question is cut into overlapping windows if it is too long, and each row is a window. One
Dense(H -> 2) over the states gives the logits of start and end, which do not depend on each other. In a window without
the answer, both targets are [CLS], so the probability of [CLS] is that of "no answer". The loss is the mean of the two
cross-entropies over all tokens of a row without its padding. In prediction, only tokens of the passage and [CLS] take
part. The no-answer logit of a row compares [CLS] with the best span among the candidates: log p(start = CLS) + log
p(end = CLS) - log p(start) - log p(end).

Source: Devlin et al., "BERT", NAACL 2019, section 4.2 and 4.3; transformers' ElectraForQuestionAnswering.

Shapes: B rows, S tokens, H hidden width, N outputs, K beam.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.operation_types import SpecialIds
from torch import nn
from typing_extensions import override

from electra_dist.errors import UserError, missing_packages
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.model.attention import derive
from electra_dist.model.encoder import DropoutKeys
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.hf import ELECTRA, MODERNBERT, Family, State, family_of, to_hf
from electra_dist.pretrained.hf_settings import hf_config

NO_WORD = -100  # target of a token that is not the first piece of a word
OUTSIDE = -1000.0  # added to the start and end logits of positions that cannot be part of an answer
_SCALE_OF_COSINES = 20.0  # of MultipleNegativesRankingLoss in sentence-transformers
_PRETRAINED_HEAD = {"head.dense.weight": "dense.weight", "head.norm.weight": "layer_norm.weight"}  # of `modern`


class Network(nn.Module):
    """Encoder with a head: a module from token ids to outputs.

    `forward` takes padded rows of ids, int64 [B, S], each one `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, and the
    random keys of the encoder's dropout, or None in evaluation mode.
    """

    encoder_prefix: str  # of the names of the encoder's parameters; all others are the head's


class HuggingFaceNetwork(Network):
    """Model of the library transformers for a task; its dropout takes no random keys."""

    def __init__(self, model: nn.Module, special: SpecialIds, family: Family) -> None:
        """Take a model of a Hugging Face class that belongs to `family`."""
        super().__init__()
        self.model = model
        self.special = special
        self.has_token_types = family is ELECTRA
        self.encoder_prefix = f"model.{family.prefix}"

    def forward(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits: [B, N] of texts, [B, S, N] of tokens, or [B, S, 2] of an answer's start and end.

        A model without a head gives its last states, [B, S, H].
        """
        inputs = {"input_ids": ids_BS, "attention_mask": (ids_BS != self.special.pad).long()}
        if self.has_token_types:
            inputs["token_type_ids"] = derive(ids_BS, self.special).token_type_BS
            # Padding up to a multiple of 8 may be longer than the table of positions; any position does for it.
            config: Any = self.model.config
            position_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
            inputs["position_ids"] = position_S.clamp(max=config.max_position_embeddings - 1)[None]
        output = self.model(**inputs)
        if "start_logits" in output:
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        result: torch.Tensor = output.last_hidden_state if "last_hidden_state" in output else output.logits
        return result


class StockNetwork(HuggingFaceNetwork):
    """Model of a class of transformers, such as ElectraForSequenceClassification, with a pretrained encoder."""

    def __init__(
        self,
        encoder: Pretrained,
        task: Literal["SequenceClassification", "TokenClassification", "QuestionAnswering", "Model"],
        head_config: dict[str, Any],
        settings: FinetuneConfig,
        seed: int,
    ) -> None:
        """Copy the weights of `encoder`, and add a head; `head_config` holds the head's entries of config.json."""
        try:
            from transformers import AutoConfig, models
        except ImportError:
            raise missing_packages("fine-tuning", "finetune") from None
        encoder.check_complete()
        family = family_of(encoder.model)
        width, hidden_size = encoder.model.embedding_size, encoder.tower.hidden_size
        if family is MODERNBERT and width != hidden_size:
            raise UserError(
                f"{encoder.name}: the layers are {hidden_size} wide and the token table is {width} wide, but "
                f"transformers' ModernBERT has one width for both; use the discriminator, or add --set head=paper, "
                f"which writes predictions but no model"
            )
        name = family.token_class.removesuffix("ForMaskedLM")
        architecture = f"{name}Model" if task == "Model" else f"{name}For{task}"
        shape = encoder.model.model_copy(
            update={
                "discriminator": encoder.tower,
                "hidden_dropout": settings.hidden_dropout,
                "attention_dropout": settings.attention_dropout,
            }
        )
        head_and_shape = hf_config(shape, "discriminator", encoder.special, architecture) | head_config
        config = AutoConfig.for_model(**head_and_shape)
        config.reference_compile = False  # older versions compile a ModernBERT by themselves
        super().__init__(getattr(getattr(models, family.model_type), architecture)(config), encoder.special, family)
        self.config = head_and_shape
        weights = _encoder_weights(encoder, shape) | _pretrained_head(encoder, self.model)
        if task == "Model":
            weights = {name.removeprefix(family.prefix): weight for name, weight in weights.items()}
            self.encoder_prefix = "model."
        new_names, unknown_names = self.model.load_state_dict(weights, strict=False)
        assert not unknown_names and not any(name.startswith(family.prefix) for name in new_names)
        init_head(((name, self.model.get_parameter(name)) for name in new_names), seed)


class TaskModel(nn.Module):
    """Network with the loss of a task: the base class of the models that `training_loop.fit` trains."""

    def __init__(self, network: Network, special: SpecialIds) -> None:
        """Take a network without copying it, so that training changes it."""
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
        """Return the content of config.json for the Hugging Face class that equals this network, or None."""
        return self.network.config if isinstance(self.network, StockNetwork) else None

    def hf_weights(self) -> State:
        """Return the weights in fp32 on the host; only for a network that has an `hf_config`."""
        assert isinstance(self.network, StockNetwork)
        return {name: weight.detach().float().cpu() for name, weight in self.network.model.state_dict().items()}


class Classifier(TaskModel):
    """Classifier of texts, with one output per label; a single output makes it a regression."""

    def __init__(
        self,
        network: Network,
        special: SpecialIds,
        label_range: tuple[float, float] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Take a network; `label_range` has the lowest and the highest label of a regression.

        `weights` has one factor of the loss per label.
        """
        super().__init__(network, special)
        self.label_range = label_range
        self._weight_N = None if weights is None else torch.tensor(weights)

    @override
    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        output_BN = self.network(ids_BS, dropout_keys).float()
        if self.label_range is not None:
            return F.mse_loss(output_BN, target_BK.float())  # of labels scaled to [0, 1]
        return F.cross_entropy(output_BN, target_BK[:, 0].long(), _on(output_BN, self._weight_N))

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

    def __init__(self, network: Network, special: SpecialIds, weights: Sequence[float] | None = None) -> None:
        """Take a network; `weights` has one factor of the loss per tag."""
        super().__init__(network, special)
        self._weight_N = None if weights is None else torch.tensor(weights)

    @override
    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy over the words of a batch.

        `target_BK` has the number of the tag at the first piece of each word, and `NO_WORD` elsewhere. K is the length
        of the longest row of all batches, so only the first S columns are used.
        """
        logit_BSN = self.network(ids_BS, dropout_keys).float()
        target_BS = target_BK[:, : ids_BS.shape[1]]
        weight_N = _on(logit_BSN, self._weight_N)
        return F.cross_entropy(logit_BSN.flatten(0, 1), target_BS.flatten(), weight_N, ignore_index=NO_WORD)


class PairModel(TaskModel):
    """Encoder of texts as vectors of length 1, trained on pairs of texts that belong together."""

    @override
    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy of finding the second text of each pair among those of all pairs.

        A row has the ids of both texts one after another. Its targets are the number of ids of the first one, and
        numbers of both texts, which are equal for equal texts.
        """
        first_length_B, first_B, second_B = target_BK.unbind(-1)
        place_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        pad = self.special.pad
        first_BS = ids_BS.masked_fill(place_S >= first_length_B[:, None], pad)[:, : int(first_length_B.max())]
        moved_BS = place_S + first_length_B[:, None]
        second_BS = ids_BS.gather(1, moved_BS.clamp(max=ids_BS.shape[1] - 1))
        second_BS = second_BS.masked_fill(moved_BS >= ids_BS.shape[1], pad)
        second_BS = second_BS[:, : int((second_BS != pad).sum(1).max())]
        first_BH, second_BH = self._vectors(first_BS), self._vectors(second_BS)
        with torch.autocast(ids_BS.device.type, enabled=False):  # so that the product is not rounded to bf16
            logit_BB = _SCALE_OF_COSINES * first_BH @ second_BH.T
        is_other_BB = ~torch.eye(len(ids_BS), dtype=torch.bool, device=ids_BS.device)
        belongs_BB = (first_B[:, None] == first_B) | (second_B[:, None] == second_B)
        logit_BB = logit_BB.masked_fill(belongs_BB & is_other_BB, -torch.inf)
        return F.cross_entropy(logit_BB, torch.arange(len(ids_BS), device=ids_BS.device))

    @override
    def predict(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the vectors of texts, fp32 [B, H]; the model must be in evaluation mode."""
        return self._vectors(ids_BS)

    def _vectors(self, ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = self.network(ids_BS).float()
        return F.normalize(mean_state(state_BSH, ids_BS != self.special.pad), dim=-1)


def mean_state(state_BSH: torch.Tensor, is_token_BS: torch.Tensor) -> torch.Tensor:
    """Return each row's mean state over the tokens that `is_token_BS` marks, which are all but padding: [B, H]."""
    is_token_BS1 = is_token_BS.unsqueeze(-1)
    return (state_BSH * is_token_BS1).sum(1) / is_token_BS1.sum(1)


def _on(output: torch.Tensor, weight_N: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight_N is None else weight_N.to(output)


class SpanScores(NamedTuple):
    """Candidate answer spans of each of B rows: the K best starts, and the K best ends for each start, best first."""

    start_logp_BK: torch.Tensor  # natural log-probabilities of the starts, fp32
    start_BK: torch.Tensor  # positions of the starts in the row of ids, int64
    end_logp_BKK: torch.Tensor  # [row, start, end]: log-probability of the end, given the start, fp32
    end_BKK: torch.Tensor  # [row, start, end]: positions of the ends, int64
    no_answer_B: torch.Tensor  # logit, positive for "no answer", fp32


class AnswerModel(TaskModel):
    """Base class of SQuAD models. A model proposes answer spans for rows of a question and a part of a passage.

    A training target has three int64 numbers per row: start position, end position, and 1 if the question has no
    answer, else 0. Both positions are 0, the [CLS], in a row that does not contain the answer.
    """

    def __init__(self, network: Network, special: SpecialIds, beam: int) -> None:
        """Take a network; `beam` is the number of starts that are proposed, and of ends for each of them."""
        super().__init__(network, special)
        self.beam = beam

    def allowed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return which positions may be the start or the end of an answer, bool [B, S].

        These are the tokens of the passage with its final [SEP], as in google-research/electra, and [CLS], which
        stands for "no answer".
        """
        allowed_BS = derive(ids_BS, self.special).token_type_BS == 1
        allowed_BS[:, 0] = True
        return allowed_BS

    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return the candidate answer spans of each row, and its logit of "no answer", in evaluation mode."""
        raise NotImplementedError


class LinearSpanModel(AnswerModel):
    """SQuAD model whose outputs are the logits of an answer's start and end at every token."""

    @override
    def forward(self, ids_BS: torch.Tensor, target_B3: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        start_logit_BS, end_logit_BS = self.network(ids_BS, dropout_keys).float().unbind(-1)
        is_pad_BS = ids_BS == self.special.pad
        start_loss = F.cross_entropy(start_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 0])
        end_loss = F.cross_entropy(end_logit_BS + OUTSIDE * is_pad_BS, target_B3[:, 1])
        return (start_loss + end_loss) / 2

    @override
    def search(self, ids_BS: torch.Tensor) -> SpanScores:
        """Return each row's `beam` best starts of an answer, as many best ends, and the logit of "no answer".

        The ends do not depend on the start.
        """
        is_outside_BS = ~self.allowed(ids_BS)
        start_logit_BS, end_logit_BS = self.predict(ids_BS).unbind(-1)
        start_logp_BS = (start_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        end_logp_BS = (end_logit_BS + OUTSIDE * is_outside_BS).log_softmax(-1)
        beam = min(self.beam, ids_BS.shape[1])
        start_logp_BK, start_BK = start_logp_BS.topk(beam)
        end_logp_BK, end_BK = end_logp_BS.topk(beam)
        shape_BKK = (-1, beam, -1)
        scores = SpanScores(
            start_logp_BK=start_logp_BK,
            start_BK=start_BK,
            end_logp_BKK=end_logp_BK[:, None].expand(shape_BKK),
            end_BKK=end_BK[:, None].expand(shape_BKK),
            no_answer_B=start_logp_BS[:, 0] + end_logp_BS[:, 0],
        )
        return scores._replace(no_answer_B=scores.no_answer_B - _best_span_logp(scores))


def _best_span_logp(scores: SpanScores) -> torch.Tensor:
    """Return log p(start) + log p(end) of each row's most probable span among the candidates, fp32 [B]."""
    # A pair is no span if it starts at [CLS], which stands for "no answer", or if it ends before it starts. A row
    # without any span gets the lowest finite number, which makes its logit of "no answer" larger than any other.
    logp_BKK = scores.start_logp_BK[..., None] + scores.end_logp_BKK
    start_BK1 = scores.start_BK[..., None]
    is_span_BKK = (start_BK1 > 0) & (scores.end_BKK >= start_BK1)
    lowest = torch.finfo(logp_BKK.dtype).min
    return logp_BKK.masked_fill(~is_span_BKK, lowest).flatten(1).amax(1)


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
    """Return the weights that a ModernBERT class takes over from the pretraining head; {} if they do not fit."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    head = encoder.head_state()
    fitting = {
        theirs: head[ours]
        for theirs, ours in _PRETRAINED_HEAD.items()
        if theirs in sizes and ours in head and head[ours].shape == sizes[theirs]
    }
    return fitting if len(fitting) == len(_PRETRAINED_HEAD) else {}

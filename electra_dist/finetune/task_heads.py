"""Define the base class of models with a task head, and the head for classification and regression.

Classification and regression: the state of [CLS], dropout, Dense(H -> N). With `head: dense`, Dense(H -> H), GELU and
dropout come in between, as in Hugging Face. The loss is cross-entropy, or the squared error of labels scaled to [0,
1]. In models of the architecture `modern`, these heads and those for tags and (linear) spans do not read the states
themselves, but LayerNorm(GELU(Dense(H -> H))) of the states, as in Hugging Face's ModernBERT classes.

Guarantee: the initial weights of a head are a function of (seed, parameter name, shape): Glorot-uniform, as is TF's
default, with biases of 0. Losses and scores are fp32 whatever the precision of the states.

Source: google-research/electra, finetune/classification/classification_tasks.py.

Shapes: B rows, S tokens, H hidden width, N labels.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from electra_kernels.keyed_random import Purpose, derive_seed
from torch import nn

from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.model.dropout_keys import DropoutKeys
from electra_dist.model.heads import ModernFeatures
from electra_dist.pretrained.encoder import Backbone, Pretrained


class TaskModel(nn.Module):
    """Encoder with a task head: the base class of the models that `training_loop.fit` trains.

    Subclasses implement `forward`, which returns the loss of a batch, and other methods that predict.
    """

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        """Combine an encoder and a head; training changes these modules themselves, because they are not copied."""
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean loss of a batch of padded rows, as an fp32 scalar.

        `target_BK` has K targets per row: int64 label numbers or positions, or fp32 numbers for a regression.
        `dropout_keys` are the random keys that determine the encoder's dropout.
        """
        raise NotImplementedError


class Classifier(TaskModel):
    """Classifier on the encoder's state of [CLS], with one output per label; a single output makes it a regression."""

    def __init__(
        self,
        backbone: Backbone,
        width: int,
        num_outputs: int,
        settings: FinetuneConfig,
        seed: int,
        features: ModernFeatures | None = None,
    ) -> None:
        """Put a new head on `backbone`; `features` (see `new_features`), if given, are the head's first layers."""
        layers: list[nn.Module] = [nn.Dropout(settings.head_dropout)]
        if settings.head == "dense":
            layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(settings.head_dropout)]
        new_layers = nn.Sequential(*layers, nn.Linear(width, num_outputs))
        init_head(new_layers, seed)
        super().__init__(backbone, on_features(features, new_layers))

    def predict(self, ids_BS: torch.Tensor, dropout_keys: DropoutKeys | None = None) -> torch.Tensor:
        """Return the logits of each row, fp32 [B, N], or the numbers [B, 1] that a regression predicts.

        `dropout_keys` are random keys for the encoder's dropout; None in evaluation mode.
        """
        state_BSH = self.backbone(ids_BS, dropout_keys)
        cls_state_BH = state_BSH[:, 0]
        return self.head(cls_state_BH).float()

    def forward(self, ids_BS: torch.Tensor, target_BK: torch.Tensor, dropout_keys: DropoutKeys) -> torch.Tensor:
        """Return the mean cross-entropy, or with one output the mean squared error of labels scaled to [0, 1]."""
        output_BN = self.predict(ids_BS, dropout_keys)
        if output_BN.shape[1] == 1:
            return F.mse_loss(output_BN, target_BK.float())
        return F.cross_entropy(output_BN, target_BK[:, 0].long())


def new_features(encoder: Pretrained, seed: int) -> ModernFeatures | None:
    """Create the first layers of a task head (Dense, GELU, LayerNorm) for the architecture `modern`; None for `bert`.

    The layers start with the weights of the encoder's pretraining head, as in Hugging Face's ModernBERT classes. If
    the encoder has no such head, or one of another width, new weights are drawn with `seed`.
    """
    if encoder.model.architecture != "modern":
        return None
    features = ModernFeatures(encoder.model, encoder.tower.hidden_size)
    names = features.state_dict().keys()
    pretrained_weights = {name: weight for name, weight in encoder.head_state().items() if name in names}
    has_all_weights = pretrained_weights.keys() == names
    if has_all_weights and pretrained_weights["dense.weight"].shape == features.dense.weight.shape:
        features.load_state_dict(pretrained_weights)
    else:
        init_head(features, seed)
        nn.init.ones_(features.layer_norm.weight)
    return features


def on_features(features: ModernFeatures | None, head: nn.Module) -> nn.Module:
    """Return `features` and then the layers of `head` as one flat Sequential; `head` itself if `features` is None."""
    if features is None:
        return head
    layers = head if isinstance(head, nn.Sequential) else [head]
    return nn.Sequential(features, *layers)


@torch.no_grad()
def init_head(head: nn.Module, seed: int) -> None:
    """Initialize a head in place: weights Glorot-uniform, and biases 0.

    Each weight has a generator of its own, keyed by the seed and the parameter's name, so the order of the parameters
    and torch's global generator do not matter. Values are drawn on the host in fp32.
    """
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
            continue
        name_number = zlib.crc32(name.encode())  # unlike hash(), equal in all processes
        generator = torch.Generator().manual_seed(derive_seed(seed, Purpose.INIT, name_number))
        # Glorot-uniform: values in [-b, b] with b = sqrt(6 / (fan_in + fan_out)), for a weight [fan_out, fan_in].
        sum_of_fans = sum(parameter.shape)
        bound = math.sqrt(6.0 / sum_of_fans)
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))

"""Build the pretraining head of a loaded model, with its encoder, as a function from token ids to its outputs.

There are two kinds of heads. That of a discriminator gives one number per token: the logit of "replaced" or, in
Electric, the energy of the token. That of a language model gives a distribution over the vocabulary; with a copy gate
(All-Tokens MLM) it also gives the probability that a token was not replaced.

Shapes: B rows of a batch, S tokens, H hidden width, E embedding width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from electra_dist.errors import UserError
from electra_dist.pretrained.encoder import Pretrained

SENTENCES_PER_BATCH = 128  # rows of a forward pass, wherever this package scores rows


def predicts_tokens(encoder: Pretrained) -> bool:
    """Return whether the pretraining head predicts tokens; False if it detects replaced tokens or does not exist."""
    # Only a head that predicts tokens has a `bias`, with one value per entry of the vocabulary.
    return "bias" in encoder.head_state()


def discriminator_output_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from padded token ids [B, S] to the discriminator's output for each token, fp32 [B, S].

    The output is the logit of "replaced" or, for Electric, an energy. Raises UserError if the model has no
    discriminator head.
    """
    head = _head(encoder, device, "dense.weight", "out.weight")
    backbone = encoder.backbone().to(device).eval()

    def outputs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        hidden_BSH = F.gelu(F.linear(state_BSH, head["dense.weight"], head.get("dense.bias")))
        if "layer_norm.weight" in head:  # architecture `modern`
            hidden_BSH = F.layer_norm(
                hidden_BSH, hidden_BSH.shape[-1:], head["layer_norm.weight"], eps=encoder.model.layer_norm_eps
            )
        output_BS1 = F.linear(hidden_BSH, head["out.weight"], head["out.bias"])
        return output_BS1.squeeze(-1).float()

    return outputs


def kept_log_prob_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from padded token ids [B, S] to log P(the token is the original one), fp32 [B, S].

    Let p be the distribution that the head predicts at the token's position. Without a copy gate, the result is the
    log of p(token). A copy gate predicts the probability c that the token was not replaced; with this gate the result
    is log(c + (1 - c) * p(token)). Logarithms are natural. Raises UserError if the model has no head that predicts
    tokens.
    """
    token_log_probs = token_log_prob_function(encoder, device)
    gate = {name: weight.to(device) for name, weight in encoder.head_state().items() if name.startswith("copy_gate.")}
    backbone = encoder.backbone().to(device).eval()

    def log_probs(ids_BS: torch.Tensor) -> torch.Tensor:
        state_BSH = backbone(ids_BS)
        logp_BSV = token_log_probs(state_BSH)
        logp_BS = logp_BSV.gather(2, ids_BS[..., None]).squeeze(-1)
        if not gate:
            return logp_BS
        gate_BS = F.linear(state_BSH, gate["copy_gate.weight"], gate["copy_gate.bias"]).squeeze(-1).float()
        copy_logp_BS = F.logsigmoid(gate_BS)  # log c, with c = sigmoid(gate)
        no_copy_logp_BS = F.logsigmoid(-gate_BS)  # log(1 - c)
        return torch.logaddexp(copy_logp_BS, no_copy_logp_BS + logp_BS)

    return log_probs


def token_log_prob_function(encoder: Pretrained, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from states of the encoder [..., H] to log-probabilities of all V tokens, fp32 [..., V].

    The function computes Dense(H -> E), GELU, LayerNorm and an output layer, whose weight is the token embedding table
    [V, E]. Raises UserError if the model has no head that predicts tokens.
    """
    head = _head(encoder, device, "dense.weight", "layer_norm.weight", "bias")
    table_VE = encoder.state["embeddings.word.weight"][: encoder.model.vocab_size].to(device)

    def log_probs(state: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(state, head["dense.weight"], head.get("dense.bias")))
        normed = F.layer_norm(
            hidden,
            normalized_shape=hidden.shape[-1:],
            weight=head["layer_norm.weight"],
            bias=head.get("layer_norm.bias"),
            eps=encoder.model.layer_norm_eps,
        )
        logits = F.linear(normed, table_VE, head["bias"])
        return logits.float().log_softmax(-1)

    return log_probs


def _head(encoder: Pretrained, device: torch.device, *needed: str) -> dict[str, torch.Tensor]:
    """Return the weights of the pretraining head on `device`; raise UserError if a name in `needed` has no weight."""
    head = {name: weight.to(device) for name, weight in encoder.head_state().items()}
    missing = [name for name in needed if name not in head]
    if missing:
        raise UserError(
            f"{encoder.name}: the model has no pretraining head of the kind needed ({missing[0]} is missing); "
            f"use the folder of a run whose objective trains this head, or export the model with its head"
        )
    return head

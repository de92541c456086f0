"""Reference implementation of the objectives in float64, written from their definitions.

It uses Hugging Face's encoders and plain sums, and no kernel of this project. Masks and random bits come from this
project, where they have their own tests; everything computed from them is independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.slots import is_candidate
from transformers import ElectraConfig, ElectraModel

from electra_dist.config import ModelConfig
from electra_dist.model.attention import RowLayout, derive
from electra_dist.objectives.base import Objective
from electra_dist.objectives.masking import Masking, mask_rows
from electra_dist.pretrained.hf import to_hf


class Corrupted(NamedTuple):
    """Rows corrupted by a generator: masks, resulting ids, summed MLM loss and sampled tokens."""

    masking: Masking
    ids: torch.Tensor
    mlm_sum: torch.Tensor
    sampled: torch.Tensor


class Truth:
    """Reference computation of one batch with the weights of one objective."""

    def __init__(self, module: Objective, model: ModelConfig, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.objective, self.special, self.model = module.objective, module.special, model
        self.fixed = module.fixed_generator if hasattr(module, "fixed_generator") else None
        self.state = {name.removeprefix("towers."): p.detach().double() for name, p in module.named_parameters()}
        frozen = getattr(module, "frozen_generator", None)
        if frozen is not None:
            # As with sharing `none`: "embeddings" are the generator's.
            own = {name.replace("embeddings.", "discriminator_embeddings."): p for name, p in self.state.items()}
            self.state = own | {name: p.double() for name, p in frozen.state_dict().items()}
        self.ids, self.rows = ids, rows
        self.layout: RowLayout = derive(ids, self.special)
        self.together = self.layout.example_BS[:, :, None] == self.layout.example_BS[:, None, :]

    def states(self, tower: str, ids: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states of Hugging Face's encoder, [B, S, H]; `allowed` [S, S] further restricts attention."""
        state = self.state
        if tower == "generator_reverse":
            tower, state = "generator", {k.replace("generator_reverse.", "generator."): v for k, v in state.items()}
        shape = getattr(self.model, tower)
        exported = to_hf(state, self.model, "generator" if tower == "generator" else "discriminator")
        weights = {k.removeprefix("electra."): v.double() for k, v in exported.items() if "electra" in k}
        config = ElectraConfig(
            vocab_size=self.model.vocab_size,
            embedding_size=weights["embeddings.word_embeddings.weight"].shape[1],
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=self.model.max_positions,
            attn_implementation="eager",
        )
        encoder = ElectraModel(config).double().eval()
        encoder.load_state_dict(weights, strict=False)
        seen = self.together if allowed is None else self.together & allowed
        with torch.no_grad():
            return encoder(
                input_ids=ids,
                token_type_ids=self.layout.token_type_BS,
                position_ids=self.layout.position_BS,
                attention_mask=torch.zeros(seen.shape).double().masked_fill(~seen, -1e30)[:, None],
            ).last_hidden_state

    def dense(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer `name` to `x`."""
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def token_log_probs(self, head: str, states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the log softmax of a token head, [..., V]."""
        x = gelu(self.dense(f"{head}.dense", states))
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.model.layer_norm_eps).sqrt()
        x = x * self.state[f"{head}.layer_norm.weight"] + self.state[f"{head}.layer_norm.bias"]
        logits = x @ table[: self.model.vocab_size].T + self.state[f"{head}.bias"]
        return logits - logits.exp().sum(-1, keepdim=True).log()

    def detection_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of replaced-token detection, [B, S]."""
        return self.dense("discriminator_head.out", gelu(self.dense("discriminator_head.dense", states)))[..., 0]

    def discriminator_table(self) -> torch.Tensor:
        """Return the discriminator's word embeddings under the configured kind of sharing."""
        own = self.state.get("discriminator_embeddings.word.weight")
        shared = self.state["embeddings.word.weight"]
        return shared if own is None else own + shared if self.model.sharing == "gdes" else own

    def sample(self, log_probs: torch.Tensor, rows: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        """Sample tokens by Gumbel-max in float64. The option `disallow_correct` is not supported."""
        bits = bits_grid(seed, Purpose.SAMPLE, step, rows.flatten(), self.model.vocab_size).double()
        gumbel = -(-(-(bits + 0.5) / 2**32).log1p()).log()
        scores = log_probs.flatten(0, -2) / self.objective.temperature + gumbel
        return scores.argmax(-1).view(log_probs.shape[:-1])

    def corrupt(self, step: int, seed: int) -> Corrupted:
        """Return the rows as the generator of ELECTRA corrupts them."""
        masking = mask_rows(self.ids, self.special, self.objective, seed, step, self.rows)
        target = self.ids.gather(1, masking.position_BN)
        if self.fixed is not None:
            sampled, mlm_sum = self.fixed(target, self.rows, step, seed), torch.zeros((), dtype=torch.float64)
        else:
            states = self.states("generator", masking.input_BS)
            states = states[torch.arange(len(self.ids))[:, None], masking.position_BN]
            log_probs = self.token_log_probs("generator_head", states, self.state["embeddings.word.weight"])
            slots = target.shape[1]
            sampled = self.sample(log_probs, self.rows[:, None] * slots + torch.arange(slots), step, seed)
            mlm_sum = -(log_probs.gather(-1, target[..., None])[..., 0] * masking.weight_BN).sum()
        return Corrupted(masking, self.insert(masking, sampled), mlm_sum, sampled)

    def insert(self, masking: Masking, sampled: torch.Tensor) -> torch.Tensor:
        """Return the rows with the samples inserted one slot at a time; mask positions must be distinct."""
        ids = self.ids.clone()
        for b, n in (masking.weight_BN > 0).nonzero().tolist():
            ids[b, masking.position_BN[b, n]] = sampled[b, n]
        return ids

    def cloze_log_probs(self) -> torch.Tensor:
        """Return log q of Electric's noise model, [B, S, V]: each position is predicted from its two neighbours."""
        B, S = self.ids.shape
        past = torch.ones(S, S, dtype=torch.bool).tril()
        left, right = self.states("generator", self.ids, past), self.states("generator_reverse", self.ids, past.T)
        both = torch.zeros(B, S, 2 * left.shape[-1], dtype=torch.float64)
        for b in range(B):
            for t in range(S):
                if t > 0 and self.together[b, t, t - 1]:
                    both[b, t, : left.shape[-1]] = left[b, t - 1]
                if t + 1 < S and self.together[b, t, t + 1]:
                    both[b, t, left.shape[-1] :] = right[b, t + 1]
        return self.token_log_probs("generator_head", both, self.state["embeddings.word.weight"])

    def losses(self, step: int, seed: int) -> tuple[float, float, torch.Tensor]:
        """Return (sum of the first loss, sum of the second loss, the discriminator's input); losses are unweighted."""
        name, real, ids = self.objective.name, self.layout.is_real_BS, self.ids
        if name == "mlm":
            masking = mask_rows(ids, self.special, self.objective, seed, step, self.rows)
            return float(self.predict(masking.input_BS, masking)), 0.0, masking.input_BS
        if name == "electric":
            return self.electric(step, seed)
        made = self.corrupt(step, seed)
        if name == "replace_mlm":
            return float(made.mlm_sum), float(self.predict(made.ids, made.masking)), made.ids
        if name == "all_tokens_mlm":
            states = self.states("discriminator", made.ids)
            gate = 1 / (1 + (-self.dense("copy_gate", states)[..., 0]).exp())
            softmax = self.token_log_probs("token_head", states, self.discriminator_table()).exp()
            mixture = (1 - gate) * softmax.gather(-1, ids[..., None])[..., 0] + gate * (made.ids == ids)
            return float(made.mlm_sum), float(-mixture[real].log().sum()), made.ids
        label = made.ids != ids
        nats = cross_entropy(self.detection_logits(self.states("discriminator", made.ids)), label)
        if name == "rtd_masked_only":
            at = made.masking.position_BN[made.masking.weight_BN > 0]
            row = (made.masking.weight_BN > 0).nonzero()[:, 0]
            return float(made.mlm_sum), float(nats[row, at].sum()), made.ids
        return float(made.mlm_sum), float(nats[real].sum()), made.ids

    def joint_mlm_loss(self, step: int, seed: int) -> float:
        """Return the discriminator's summed loss for predicting the originals at the masked positions it reads."""
        made = self.corrupt(step, seed)
        return float(self.predict(made.ids, made.masking))

    def predict(self, ids: torch.Tensor, masking: Masking) -> torch.Tensor:
        """Return the discriminator tower's summed MLM loss at the masked positions when its input is `ids`."""
        log_probs = self.token_log_probs("token_head", self.states("discriminator", ids), self.discriminator_table())
        at_target = log_probs.gather(-1, self.ids[..., None])[..., 0]
        return -(at_target.gather(1, masking.position_BN) * masking.weight_BN).sum()

    def electric(self, step: int, seed: int) -> tuple[float, float, torch.Tensor]:
        """Return the same as `losses` for the objective Electric."""
        ids = self.ids
        B, S = ids.shape
        log_q = self.cloze_log_probs()
        cloze = -log_q.gather(-1, ids[..., None])[..., 0][is_candidate(ids, self.special)].sum()
        sampled = self.sample(log_q, self.rows[:, None] * S + torch.arange(S), step, seed)
        masking = mask_rows(ids, self.special, self.objective, seed, step, self.rows)
        noised = self.insert(masking, sampled.gather(1, masking.position_BN))
        label = torch.zeros(B, S, dtype=torch.bool)
        for b, n in (masking.weight_BN > 0).nonzero().tolist():
            label[b, masking.position_BN[b, n]] = True
        p = self.objective.mask_prob
        energy = self.detection_logits(self.states("discriminator", noised))
        logits = energy + log_q.gather(-1, noised[..., None])[..., 0] + torch.tensor(p / (1 - p)).double().log()
        return float(cloze), float(cross_entropy(logits, label)[self.layout.is_real_BS].sum()), noised


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the exact GELU of `x`, by the error function."""
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def cross_entropy(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return minus the log probability of each binary label."""
    return (1 + torch.where(label, -logits, logits).exp()).log()


def shaken(module: Any, scale: float = 0.05) -> Any:
    """Add noise to every parameter, so that a test fails if the code under test ignores one; return the module."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise.to(parameter.dtype) * scale)
    return module

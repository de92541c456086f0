"""Defines the base class of all pretraining objectives, and the types of its input and output.

`Objective.forward` takes a `StepInput` and makes a `Batch` of it, which also has the examples, positions and attention
mask of the rows. It passes the batch to the subclass's `compute_loss`, which returns a `StepOutput`.

Guarantee: what `forward` computes for a row follows from its ids, (seed, step, row number) and the weights, and not
from the other rows of the batch; the only exception is dropout of attention on a GPU. Each loss is an fp32 sum over
tokens, times a scale that the caller passes. With scales of 1 / (count over the global batch), the losses of all ranks
and micro-batches add up to the mean over the global batch, however it is split. With scales of 1 / (count over the
micro-batch x number of micro-batches on all ranks), they add up to the average of the micro-batches' means, as in
Google's code. `Objective.loss_counts` returns the counts. Shapes are static, and the host never waits for the device.

Values that may follow a schedule (`ScheduledValues`) are a pure function of (config, t, num_steps) at step t. A
scheduled value that equals a plain number gives the same bits as that number (with `mask_prob`, as long as the number
of slots for masked positions is the same, which follows from the largest `mask_prob`). They reach a kernel as
arguments of its launch, so that nothing is compiled anew when one changes.

How: the objective reads the table of token embeddings, which is also the output matrix of the heads that predict
tokens, in its own forward pass and passes it to the head; under ZeRO-3, DeepSpeed notices this and gathers the table.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from electra_kernels.discriminator_tail import RtdOutput
from electra_kernels.keyed_random import Purpose, derive_seed
from electra_kernels.mlm_head import MlmHeadOutput
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import gather_masked
from numpy.typing import NDArray
from torch import nn

from electra_dist.config import ObjectiveConfig
from electra_dist.config.schedule import schedules_of, value_at
from electra_dist.model.attention import AttentionMask, LayerMask, RowLayout, SdpaMask, derive, new_attention_mask
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.flash_attention import ExampleBounds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.masking import Masking, mask_rows, num_masked

# Each network's dropout seed is derived with one of these in place of a step number. No run reaches such steps, so the
# seeds differ from those that the training loop derives for torch's generator.
GENERATOR = 2**32 - 1
DISCRIMINATOR = 2**32 - 2
REVERSE = 2**32 - 3
_WEIGHTS = frozenset({"mlm_weight", "rtd_weight"})
_LAST = 1.0  # progress at the end of a run


class Sums(NamedTuple):
    """Sums over the tokens of a batch, from which metrics are computed; losses are in nats.

    Add up the sums of all micro-batches and ranks before dividing: the mean MLM loss is mlm_loss_sum / mlm_weight.
    Sums that an objective does not compute are 0. The predicted positions are the masked ones; with `electric`, all
    positions that may be masked.
    """

    loss: float  # the scaled loss that is minimised; its sum over all ranks and micro-batches is the loss of the step
    tokens: float  # tokens that are not [PAD]
    mlm_loss_sum: float  # loss of the generator (with `mlm`: the only network) at the predicted positions, weighted
    mlm_weight: float  # sum of the weights in mlm_loss_sum
    mlm_correct: float  # the part of mlm_weight where the most probable token is the original
    sampled_correct: float  # predicted positions whose sampled token is the original
    rtd_loss_sum: float  # loss of the detection of replaced tokens
    rtd_weight: float  # sum of the weights in rtd_loss_sum
    replaced: float  # the part of rtd_weight on tokens with label 1 (replaced)
    replaced_correct: float  # the part of `replaced` with a logit above 0
    original: float  # the part of rtd_weight on tokens with label 0 (original)
    original_correct: float  # the part of `original` with a logit of at most 0
    token_loss_sum: float  # loss of a discriminator that predicts original tokens (the generator's is above)
    token_weight: float  # sum of the weights in token_loss_sum
    token_correct: float  # the part of token_weight where the most probable token of the softmax is the original
    entropy_sum: float  # entropies of the generator's distributions, weighted as mlm_loss_sum; 0 in training

    def mean_losses(self) -> dict[str, Any]:
        """Return the mean of each loss over its tokens, named as in a metrics record; 0 where there are no tokens."""
        return {
            "mlm_loss": self.mlm_loss_sum / max(self.mlm_weight, 1.0),
            "rtd_loss": self.rtd_loss_sum / max(self.rtd_weight, 1.0),
            "token_loss": self.token_loss_sum / max(self.token_weight, 1.0),
        }


@dataclass(frozen=True, kw_only=True)
class ScheduledValues:
    """Values, at one step, of the settings of an objective that may follow a schedule."""

    # Not a NamedTuple, for the reason that StepInput gives: DeepSpeed's hooks rebuild tuples.

    temperature: float  # divides the generator's logits before sampling
    mask_prob: float  # share of the tokens that is masked
    mlm_weight: float  # weight of the generator's loss
    rtd_weight: float  # weight of the discriminator's loss
    random_share: float  # share of the masked positions with a random replacement

    @classmethod
    def at(cls, objective: ObjectiveConfig, progress: float) -> ScheduledValues:
        """Return the values at the point of a run where the share `progress`, in [0, 1], of all steps is done."""
        return cls(**{each.name: value_at(getattr(objective, each.name), progress) for each in fields(cls)})


class Schedules:
    """Schedules of settings of a run's objective; they have no state, so a checkpoint need not save them."""

    def __init__(self, objective: ObjectiveConfig, num_steps: int) -> None:
        """Take the schedules of `objective`, which depend on step / `num_steps`, the steps of the whole run."""
        self._first = ScheduledValues.at(objective, 0.0)
        self._num_steps = num_steps
        self._schedule_of_key = schedules_of(objective)
        # Whether a loss weight follows a schedule; total losses of different steps are then not comparable.
        self.change_weights = not _WEIGHTS.isdisjoint(self._schedule_of_key)

    def values(self, step: int) -> ScheduledValues:
        """Return the values of the settings at a step; steps count from 0."""
        progress = step / self._num_steps
        present = {key: value_at(schedule, progress) for key, schedule in self._schedule_of_key.items()}
        return replace(self._first, **present)

    def jumps_at(self, step: int) -> bool:
        """Return whether a schedule of shape "step" jumps at this step; earlier losses are then not comparable."""
        if step == 0:
            return False
        before = (step - 1) / self._num_steps
        now = step / self._num_steps
        jumping = [schedule for schedule in self._schedule_of_key.values() if schedule.shape == "step"]
        return any(value_at(schedule, before) != value_at(schedule, now) for schedule in jumping)


def evaluation_values(objective: ObjectiveConfig) -> ScheduledValues:
    """Return the values for evaluations: those at the end of the run, but temperature 1 and no random tokens.

    With these values, evaluations can be compared between steps, and between runs with different schedules.
    """
    return replace(ScheduledValues.at(objective, _LAST), temperature=1.0, random_share=0.0)


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of one forward pass of an objective: some rows of one optimizer step, usually a micro-batch.

    An objective has one or two losses, each a sum over tokens. `first_scale` turns the first sum into a mean over all
    rows that count together, usually the global batch: it is 1 / n, where n adds up column 0 of
    `Objective.loss_counts` over these rows. `second_scale` does so for the second loss and column 1.
    """

    # Not a NamedTuple, because DeepSpeed's hooks rebuild tuples. The hook of ZeRO-3 puts other tensor objects into
    # them. The hook of fp16 casts the two scales to 16 bits and calls the class with arguments that a NamedTuple does
    # not take. The hooks pass a dataclass on unchanged; they need not see its tensors, none of which has a gradient.

    ids_BS: torch.Tensor  # int64 token ids
    row_B: torch.Tensor  # int64 numbers of the rows within the step's global batch
    step: int  # number of the optimizer step
    seed: int  # the run's seed
    first_scale: float | torch.Tensor  # scalar factor of the first loss's sum: 1 / (tokens that its mean is over)
    second_scale: float | torch.Tensor  # scalar factor of the second loss's sum, likewise
    # Where the examples begin, on the device of the ids; made by `LayerMask.bounds` of the attention backend, which is
    # None unless that is "flash".
    bounds: ExampleBounds | None = field(default=None, kw_only=True)
    # Values at this step of the config keys that may follow a schedule. None stands for `evaluation_values` in
    # evaluation mode, and in training mode for the values of the first step, which are constant without schedules.
    scheduled: ScheduledValues | None = field(default=None, kw_only=True)
    # int64 ids that the discriminator reads in place of rows that the objective corrupts; see `Objective.score_shown`.
    shown_BS: torch.Tensor | None = field(default=None, kw_only=True)


class StepOutput(NamedTuple):
    """Result of one forward pass of an objective; only `loss` carries a gradient."""

    loss: torch.Tensor  # fp32 scalar, scaled: what the backward pass starts from
    sums: torch.Tensor  # float64 [len(Sums._fields)], in the order of `Sums`; read with `Sums(*sums.tolist())`
    rtd_logit_BS: torch.Tensor  # fp32 logits of "replaced"; all 0 with an objective that detects nothing
    label_BS: torch.Tensor  # bool, True for replaced tokens
    is_real_BS: torch.Tensor  # bool, False for pads
    shown_BS: torch.Tensor | None = None  # int64 ids that the logits are about, with the replacements in place


@dataclass(frozen=True, slots=True)
class Batch(StepInput):
    """Input of `Objective.compute_loss`: a `StepInput` with the examples, positions and attention mask of its rows."""

    values: ScheduledValues  # of this step: temperature, share of masked tokens, weights of the losses
    layout: RowLayout  # examples, positions, token types and real tokens
    attention_mask: AttentionMask  # lets tokens of one example attend to each other

    def slot_number_M(self, num_slots: int) -> torch.Tensor:
        """Return a unique number for each slot of the batch's B rows, int64 [B * num_slots].

        A slot is the place of one masked position. Slot n of the row with number r in the global batch has the number
        r * num_slots + n, which keys the random draw of its token.
        """
        slot_in_row_N = torch.arange(num_slots, device=self.row_B.device)
        first_slot_of_row_B1 = self.row_B[:, None] * num_slots
        return (first_slot_of_row_B1 + slot_in_row_N).flatten()


class Objective(nn.Module, ABC):
    """Base class of the pretraining objectives: it holds the networks and maps a `StepInput` to a `StepOutput`."""

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.towers = towers
        self.objective = objective
        self.special = special
        self.backend = backend
        self.attention: type[LayerMask] = SdpaMask  # until the caller chooses another backend

    def loss_counts(self, ids_BS: torch.Tensor, mask_prob: float | None = None) -> torch.Tensor:
        """Return how many tokens of each row count in the means of the objective's two losses, int64 [B, 2].

        Column 0 is for the generator's loss (or the only loss), column 1 for the discriminator's. Only the ids are
        needed, so a step can add up the counts of all ranks before its first forward pass. `mask_prob` is the present
        value of `objective.mask_prob`, if that follows a schedule; None stands for the value at the first step.
        """
        num_masked_B = num_masked(ids_BS, self.special, self.objective, mask_prob)
        return torch.stack([num_masked_B, (ids_BS != self.special.pad).sum(1)], -1)

    def step_input(
        self,
        ids_BS: torch.Tensor,
        host_ids_BS: NDArray[Any],
        row0: int,
        key: tuple[int, int],
        scales: Iterable[float | torch.Tensor] = (1.0, 1.0),
        scheduled: ScheduledValues | None = None,
    ) -> StepInput:
        """Return the input for adjoining rows of a step, the first of which has number `row0` within the global batch.

        `host_ids_BS` are the same ids on the host, from which the attention backend reads where examples begin. `key`
        is (seed, step). `scales` are factors of the objective's two losses; with 1 they are plain sums over tokens.
        """
        seed, step = key
        first_scale, second_scale = scales
        row_B = torch.arange(row0, row0 + len(ids_BS), device=ids_BS.device)
        bounds = self.attention.bounds(host_ids_BS, self.special, ids_BS.device)
        return StepInput(ids_BS, row_B, step, seed, first_scale, second_scale, bounds=bounds, scheduled=scheduled)

    def forward(self, step_input: StepInput) -> StepOutput:
        """Compute the loss of rows; if they were corrupted beforehand (`shown_BS`), only score their tokens."""
        batch = self.batch(step_input)
        if batch.shown_BS is not None:
            return self.score_shown(batch, batch.shown_BS)
        return self.compute_loss(batch)

    def score_shown(self, batch: Batch, shown_BS: torch.Tensor) -> StepOutput:
        """Run only the discriminator, on corrupted ids, `shown_BS`; return its logits of "replaced", and loss 0.

        The objective must detect replaced tokens. With `electric` the logits are the discriminator's energies, without
        the log-probabilities of the noise model.
        """
        label_BS = shown_BS != batch.ids_BS
        hidden_BSH = self.read(batch, shown_BS)
        rtd = self.towers.discriminator_head(hidden_BSH, label_BS, batch.layout.is_real_BS, backend=self.backend)
        return self.output(batch, torch.zeros_like(rtd.loss_sum), {}, rtd.logits_T, label_BS, shown_BS)

    @abstractmethod
    def compute_loss(self, batch: Batch) -> StepOutput:
        """Compute the loss, the sums for metrics and the logits of a batch.

        The loss is a sum of terms. Each term is a sum over tokens, times a weight from the config and a scale
        (`batch.first_scale` or `batch.second_scale`). Build the result with `output`.
        """

    def batch(self, step_input: StepInput) -> Batch:
        """Add to an input the examples, positions and attention mask of its rows, and the values of this step."""
        layout = derive(step_input.ids_BS, self.special)
        parameter_dtype = self.towers.embeddings.word.weight.dtype
        attention_mask = new_attention_mask(
            self.towers.model, layout, parameter_dtype, self.attention, step_input.bounds
        )
        values = step_input.scheduled
        if values is None:
            values = ScheduledValues.at(self.objective, 0.0) if self.training else evaluation_values(self.objective)
        given = {each.name: getattr(step_input, each.name) for each in fields(StepInput)}
        return Batch(**given, values=values, layout=layout, attention_mask=attention_mask)

    def mask(self, batch: Batch) -> Masking:
        """Draw the masked positions of each row, by seed, step and row number, and build the masked rows."""
        return mask_rows(
            batch.ids_BS,
            self.special,
            self.objective,
            batch.seed,
            batch.step,
            batch.row_B,
            batch.values.mask_prob,
            backend=self.backend,
        )

    def dropout_keys(self, batch: Batch, tower: int) -> DropoutKeys:
        """Return the keys of dropout in one network; `tower` is GENERATOR, DISCRIMINATOR or REVERSE."""
        # An evaluation drops nothing, so it reads no seed.
        tower_seed = derive_seed(batch.seed, Purpose.DROPOUT, tower) if self.training else 0
        return DropoutKeys(seed=tower_seed, step=batch.step, row_B=batch.row_B, backend=self.backend)

    def read(self, batch: Batch, ids_BS: torch.Tensor) -> torch.Tensor:
        """Run the discriminator (with `mlm`: the only network) on changed ids; return its states, [B, S, H].

        `ids_BS` are masked or corrupted. Examples, positions and padding are those of the original ids, kept in
        `batch`, because a replacement could be a [SEP] or a [PAD].
        """
        dropout_keys = self.dropout_keys(batch, DISCRIMINATOR)
        towers = self.towers
        embeddings = getattr(towers, "discriminator_embeddings", towers.embeddings)
        embedded = embeddings(ids_BS, batch.layout, dropout_keys)
        return towers.discriminator(embedded, batch.attention_mask, dropout_keys)

    def predict_slots(self, batch: Batch, masking: Masking, hidden_BSH: torch.Tensor) -> MlmHeadOutput:
        """Predict the tokens at the masked positions from the discriminator's states; return loss and counts."""
        hidden_MH = gather_masked(hidden_BSH, masking.position_BN, backend=self.backend)
        target_BN = batch.ids_BS.gather(1, masking.position_BN)
        return self.towers.token_head(
            hidden_MH,
            self.towers.discriminator_table(),
            target_BN.flatten(),
            masking.weight_BN.flatten(),
            seed=batch.seed,
            step=batch.step,
            row_M=batch.slot_number_M(masking.position_BN.shape[1]),
            temperature=1.0,
            disallow_correct=False,
            backend=self.backend,
        )

    def output(
        self,
        batch: Batch,
        loss: torch.Tensor,
        sums: dict[str, torch.Tensor],
        rtd_logit_BS: torch.Tensor | None = None,
        label_BS: torch.Tensor | None = None,
        shown_BS: torch.Tensor | None = None,
    ) -> StepOutput:
        """Build the `StepOutput` of a forward pass.

        `sums` maps names of fields of `Sums` to scalars, without `loss` and `tokens`; missing ones become 0.
        `rtd_logit_BS` has B * S logits in any shape; None means that the objective detects no replaced tokens.
        `shown_BS` are the ids that the discriminator has read; None stands for the batch's own ids.
        """
        is_real_BS = batch.layout.is_real_BS

        # All sums go into one float64 tensor in the order of the fields of `Sums`.
        named_sums = {"loss": loss, "tokens": is_real_BS.sum(), **sums}
        unknown_names = named_sums.keys() - set(Sums._fields)
        assert not unknown_names, f"not fields of Sums: {sorted(unknown_names)}"
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        ordered_sums = [named_sums.get(name, zero).detach().double() for name in Sums._fields]

        # An objective that detects nothing reports logits of 0 and no replaced tokens.
        if rtd_logit_BS is None:
            rtd_logit_BS = torch.zeros(batch.ids_BS.shape, device=loss.device)
        else:
            rtd_logit_BS = rtd_logit_BS.detach().float().view_as(batch.ids_BS)
        if label_BS is None:
            label_BS = torch.zeros_like(is_real_BS)
        return StepOutput(
            loss=loss,
            sums=torch.stack(ordered_sums),
            rtd_logit_BS=rtd_logit_BS,
            label_BS=label_BS,
            is_real_BS=is_real_BS,
            shown_BS=batch.ids_BS if shown_BS is None else shown_BS,
        )


def mlm_sums(mlm: MlmHeadOutput) -> dict[str, torch.Tensor]:
    """Return loss and counts of the generator's head (with `mlm`: of the only head) under their names in `Sums`."""
    return {
        "mlm_loss_sum": mlm.loss_sum,
        "mlm_weight": mlm.weight_sum,
        "mlm_correct": mlm.correct_sum,
        "sampled_correct": mlm.sampled_correct_sum,
    }


def token_sums(prediction: MlmHeadOutput) -> dict[str, torch.Tensor]:
    """Return the loss and counts of a discriminator's token head, each under the name of its field in `Sums`."""
    return {
        "token_loss_sum": prediction.loss_sum,
        "token_weight": prediction.weight_sum,
        "token_correct": prediction.correct_sum,
    }


def rtd_sums(rtd: RtdOutput) -> dict[str, torch.Tensor]:
    """Return loss and counts of the head that detects replaced tokens under their names in `Sums`."""
    return {
        "rtd_loss_sum": rtd.loss_sum,
        "rtd_weight": rtd.mask_sum,
        "replaced": rtd.replaced_count,
        "replaced_correct": rtd.replaced_correct,
        "original": rtd.original_count,
        "original_correct": rtd.original_correct,
    }

"""Save and restore the state of a run, and decide after which steps: between the step loop and the stores.

All ranks decide alike when to save; the schedule changes no result of a run. The interval of `checkpoint.every_steps:
auto` follows the formula of Young (1974) and Daly (2006), from the run's own ledger. A save pauses training (the
stall), and an interruption loses half an interval of work on average. The two together lose the least time at the
interval sqrt(2 x stall x time between interruptions). The stall is the median over the newest checkpoints; it includes
the wait for the previous save. If a slow store needs longer for a save than the interval, the stall therefore grows,
and with it the interval.

Limits: the package `checkpoint` decides which checkpoints are kept and which of them can be loaded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from electra_dist.checkpoint.commit import begin_attempt, retain
from electra_dist.checkpoint.manifest import Fragment, RunState
from electra_dist.checkpoint.reader import Loaded, load_newest
from electra_dist.checkpoint.repair import copy_to_all
from electra_dist.checkpoint.writer import CheckpointWriter, SaveTiming
from electra_dist.collectives import from_rank_0
from electra_dist.config import CheckpointConfig, GuardConfig
from electra_dist.data.receipt import Receipt
from electra_dist.engine.bit_settings import bit_settings
from electra_dist.engine.state_fragments import (
    held_fragments,
    owned_fragments,
    parameter_shapes,
    shared_names,
)
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.weights import load_recorded_source
from electra_dist.run.environment_record import versions
from electra_dist.run.history import seconds_per_step, starts
from electra_dist.run.ledger import LedgerEvent, read_ledger
from electra_dist.train.guard import Guard, SkipList
from electra_dist.train.start import Start

_PRIOR_S = 24 * 3600.0  # first guess of the time between interruptions; it counts as one interruption
_FIRST_STEPS = 100  # interval before the first save of a run has been measured
_LEAST_STEPS = 10
_MOST_S = 3600.0  # at most an hour of work is at risk, however rare interruptions are
# Name in a checkpoint's manifest -> name in environment.json.
_RECORDED_VERSIONS = {"electra_dist": "electra-dist", "python": "python", "torch": "torch", "deepspeed": "deepspeed"}
_NEWEST_STALLS = 20  # checkpoints whose median stall counts


@dataclass(kw_only=True)
class TrainState:
    """The progress of a run: what a checkpoint records beside the weights and the optimizer's moments.

    All ranks have the same state. The step loop changes it in place after every step.
    """

    step: int  # steps done or skipped
    receipt: Receipt  # number and digest of all rows trained on so far
    guard: Guard  # compares each loss with the window of recent losses
    skips: SkipList  # steps that the run skips
    overflowed: list[int]  # steps that made no update, because their gradients overflowed fp16, ascending
    eval_scores: dict[str, float] = field(default_factory=dict)  # of an evaluation of this step, if any

    @classmethod
    def after(cls, restored: RunState | None, config: GuardConfig, skips: SkipList) -> TrainState:
        """Return the progress that the restored checkpoint records, or that of a new run if `restored` is None."""
        if restored is None:
            return cls(step=0, receipt=Receipt(), guard=Guard(config), skips=skips, overflowed=[])
        return cls(
            step=restored.step,
            receipt=Receipt(restored.rows_seen, restored.rows_digest),
            guard=Guard(config, restored.recent_losses),
            skips=skips,
            overflowed=list(restored.overflowed),
        )

    def state_fields(self) -> dict[str, Any]:
        """Return those fields of a checkpoint's `RunState` that change from step to step, by name."""
        return {
            "step": self.step,
            "rows_seen": self.receipt.rows,
            "rows_digest": self.receipt.digest,
            "skipped": self.skips.below(self.step),
            "recent_losses": self.guard.recent_losses,
            **self.eval_scores,
            "overflowed": tuple(self.overflowed),
        }


class Checkpointer:
    """Loader and saver of a run's checkpoints; a thread writes a saved state while training goes on.

    A checkpoint is good if it is complete, undamaged and of this run. Call `restore` once, `save` after any step, and
    `close` of the `writer` at the end, which waits until the last save is written.
    """

    def __init__(self, start: Start) -> None:
        """Reserve the number of this start of the run ("attempt") in the checkpoint stores. Collective."""
        config, engine, skips = start.config, start.engine, start.skips
        corpus_fingerprint = start.inputs.corpora.fingerprint
        self._config = config
        self._engine = engine
        self._skips = skips
        self._targets = start.inputs.targets
        identity_sha256 = config.identity_sha256()
        run = {"identity_sha256": identity_sha256, "corpus_fingerprint": corpus_fingerprint}
        self._older_identities = config.older_identities()
        older_runs = {
            numerics: {"identity_sha256": older_sha256, "corpus_fingerprint": corpus_fingerprint}
            for numerics, older_sha256 in self._older_identities.items()
        }
        attempt = from_rank_0(lambda: begin_attempt(self._targets, run, older_runs, start.inputs.accept_new_numerics))
        installed = versions()
        # What every checkpoint of this start records. `TrainState.state_fields` replaces the fields that change.
        self.record = RunState(
            step=0,
            attempt=attempt,
            identity_sha256=identity_sha256,
            corpus_fingerprint=corpus_fingerprint,
            world_size=dist.get_world_size(),
            zero_stage=config.engine.zero_stage,
            shapes=parameter_shapes(engine.deepspeed.module),
            shared=shared_names(engine.deepspeed.module),
            versions={name: installed[package] for name, package in _RECORDED_VERSIONS.items()},
            bit_settings=bit_settings(config, engine),
            skipped=tuple(sorted(skips.steps)),
        )
        self.writer = CheckpointWriter(
            targets=self._targets,
            rank=dist.get_rank(),
            policy=config.checkpoint,
            rollback_steps=config.guard.most_skipped,
        )

    def restore(self, *, pristine: bool) -> Loaded:
        """Load the newest good checkpoint into the engine, or set the initial weights if there is none. Collective.

        A checkpoint that is damaged, or that a rollback discards, is set aside: its manifest is renamed. `pristine`
        says that the engine still holds the weights with which it was built. Raises UserError if there are
        checkpoints, but none of them can be used.
        """
        fragments = held_fragments(self._engine)
        self.writer.reserve(owned_fragments(self._engine))
        loaded = load_newest(
            self._targets, fragments, self.record, self._older_identities.values(), self._skips.stopped
        )
        if self._engine.loss_scale is not None:
            self._engine.loss_scale.restore(loaded.state.loss_scale if loaded.state else None)
        if loaded.state is None:
            # Where there are checkpoints, the towers are built without `init_from`.
            if pristine and not loaded.set_aside:
                return loaded
            self._initialise(fragments)
        self._engine.layout.publish()  # copies the masters to the parameters that the forward pass reads
        return loaded

    def _initialise(self, fragments: list[Fragment]) -> None:
        """Set the master weights to the values that a new run starts from, and the optimizer's moments to zero.

        `fragments` are the pieces of them that this rank holds.
        """
        towers = build_towers(self._config.model, self._config.seed, self._config.objective)
        if self._config.train.init_from:
            load_recorded_source(towers, self._config.starting_weights, Path(self._config.run_dir))
        # The engine's masters began as copies of its parameters, hence rounded to their dtype.
        dtype = next(self._engine.deepspeed.module.parameters()).dtype
        initial_values = {}  # flattened, by parameter name
        for name, parameter in towers.named_parameters():
            initial_values[f"towers.{name}"] = parameter.detach().to(dtype).reshape(-1)
        for fragment in fragments:
            held_values = initial_values[fragment.name].narrow(0, fragment.start, fragment.numel)
            for kind, view in fragment.views.items():
                if kind == "master":
                    view.copy_(held_values)
                else:
                    view.zero_()

    def save(self, train_state: TrainState) -> SaveTiming:
        """Start saving the state after `train_state.step` steps; return when it is copied to host memory. Collective.

        A thread then writes the copy. The call first waits for the previous save, and raises its error if it has
        failed.
        """
        state = self.record.model_copy(update=train_state.state_fields())
        if self._engine.loss_scale is not None:
            state = state.model_copy(update={"loss_scale": self._engine.loss_scale.state})
        return self.writer.save(state, owned_fragments(self._engine))

    def finish(self, last: RunState) -> None:
        """Copy the checkpoint of the run's last step to every store, and delete those that are no longer kept.

        An earlier start may have been killed when it had written the checkpoint to some stores only. Rank 0 only.
        """
        copy_to_all(self._targets, last.step, last.attempt)
        for target in self._targets:
            retain(target, self._config.checkpoint, self._config.guard.most_skipped, self.record.attempt, {})


class SaveSchedule:
    """The steps after which a run saves a checkpoint.

    If `checkpoint.every_steps` is a number, a save comes at each multiple of it. If it is "auto", a save comes one
    interval after the last save, and rank 0 computes the interval again after each save, from the cost of a save and
    the interruptions in the run's ledger. The steps of `checkpoint.keep_every_steps` and `checkpoint.keep_steps` are
    always saved.
    """

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, step: int) -> None:
        """Begin the schedule after step `step`, at which the run starts. Collective if `every_steps` is "auto"."""
        self._config = config
        self._run_dir = Path(run_dir)
        self.every_steps = 0  # steps between checkpoints at present; set by `saved`
        self.saved(step)  # the checkpoint that the run starts from

    def saved(self, step: int) -> bool:
        """Record a save after `step` steps; return whether the interval has changed. Collective for "auto"."""
        previous = self.every_steps
        if self._config.every_steps == "auto":
            self.every_steps = from_rank_0(lambda: automatic_steps(read_ledger(self._run_dir)))
        else:
            self.every_steps = self._config.every_steps
        self._last_saved = step
        return self.every_steps != previous

    def next_due(self, step: int) -> int:
        """Return the first step after `step` with a save; it may lie beyond the last step of the run.

        A fixed interval is counted from step 0, an automatic one from the last save.
        """
        due_steps = [kept_step for kept_step in self._config.keep_steps if kept_step > step]
        if self._config.keep_every_steps:
            due_steps.append(_next_multiple(self._config.keep_every_steps, step))
        if self._config.every_steps == "auto":
            due_steps.append(max(step + 1, self._last_saved + self.every_steps))
        else:
            due_steps.append(_next_multiple(self.every_steps, step))
        return min(due_steps)

    def due(self, step: int) -> bool:
        """Return whether to save a checkpoint now that `step` optimizer steps are done."""
        return self.next_due(step - 1) == step


def _next_multiple(interval: int, step: int) -> int:
    return (step // interval + 1) * interval


def automatic_steps(ledger: Sequence[LedgerEvent]) -> int:
    """Return the number of steps between checkpoints for `checkpoint.every_steps: auto`, from a run's events so far.

    It is 100 before the first checkpoint. Later it is at least 10, and at most what an hour has.
    """
    stall_s = measured_stall_s(ledger)
    step_s = seconds_per_step(starts(ledger))
    if stall_s is None or step_s <= 0:
        return _FIRST_STEPS
    return young_daly_steps(
        stall_s=stall_s,
        interruption_s=mean_time_between_interruptions_s(ledger),
        step_s=step_s,
        least=_LEAST_STEPS,
        most=max(_LEAST_STEPS, round(_MOST_S / step_s)),
    )


def interruptions(ledger: Sequence[LedgerEvent]) -> int:
    """Return how many starts of a run ended by a crash, an unhealthy node, or a kill, after which no end is recorded.

    The newest start does not count.
    """
    return sum(start.ended_by in ("crash", "unhealthy", None) for start in starts(ledger)[:-1])


def mean_time_between_interruptions_s(ledger: Sequence[LedgerEvent]) -> float:
    """Estimate the time between interruptions as (running seconds + 1 day) / (interruptions + 1): one day at first."""
    # A wall clock that was set back lets a start end before it began.
    running_s = sum(max(0.0, start.last - start.began) for start in starts(ledger))
    num_interruptions = interruptions(ledger) + 1
    return (running_s + _PRIOR_S) / num_interruptions


def measured_stall_s(ledger: Sequence[LedgerEvent]) -> float | None:
    """Return the median of the seconds for which the newest 20 checkpoints stopped training; None without one."""
    checkpoints = [event for event in ledger if event.event == "checkpoint"]
    if not checkpoints:
        return None
    newest = checkpoints[-_NEWEST_STALLS:]
    return statistics.median(event.stall_s + event.wait_s for event in newest)


def young_daly_steps(stall_s: float, interruption_s: float, step_s: float, least: int, most: int) -> int:
    """Return the number of steps between checkpoints that loses the least time by Young's formula, in [least, most].

    `stall_s` is what a save costs, `interruption_s` the mean time between interruptions. Without a step time above 0
    the result is `most`.
    """
    if step_s <= 0:
        return most
    interval_s = math.sqrt(2.0 * stall_s * interruption_s)
    return max(least, min(most, round(interval_s / step_s)))

"""Read the weights of a checkpoint that a user chooses: the newest, the best or a certain step; or a mean of several.

Guarantee: every byte is verified. A damaged checkpoint never counts: if any good one will do ("newest", "best"), the
next one in the order of the choice is read; if a certain step is asked for, that is an error. Nothing is written.

How: the best checkpoint is the one that `checkpoint.keep_best` would keep first. A mean is that of the chosen
checkpoint and the good ones before it, summed in float64 and rounded to fp32 once.

Cost: a mean of n checkpoints reads n of them, one after another, and holds a float64 sum and the fp32 weights of one
in memory. To find the best one costs one request for each checkpoint, which reads its scores.

Source of the mean: Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from electra_dist.checkpoint.commit import best_first, held_out_score
from electra_dist.checkpoint.manifest import Fragment, RunState
from electra_dist.checkpoint.reader import CheckpointReader
from electra_dist.checkpoint.stored_copies import (
    Checkpoint,
    Owner,
    checkpoints,
    checkpoints_of_step,
    copies_of_each,
    first_good,
)
from electra_dist.errors import StoreError, TornCheckpoint, UserError
from electra_dist.store.interface import Store

# Called after each checkpoint that was read, with the number read so far and the number to read.
CheckpointProgress = Callable[[int, int], None]
Choice = int | Literal["newest", "best"]  # a checkpoint: that of a step, the newest, or the best on held-out rows


class ChosenWeights(NamedTuple):
    """Weights of the checkpoint that a user chose, or their mean with the checkpoints before it."""

    state: RunState  # run state of the chosen checkpoint; for a mean, of the newest checkpoint in it
    weights: dict[str, torch.Tensor]  # parameter name -> whole fp32 tensor, on the host
    steps: tuple[int, ...]  # steps of the checkpoints in the mean, ascending; one step if there is no mean
    damaged: list[str]  # one line for each checkpoint that was passed over: damaged, or a copy that is away


def report_nothing(num_read: int, num_to_read: int) -> None:
    """Do nothing: the default for functions that take a `CheckpointProgress` callback."""


def read_chosen(
    targets: Sequence[Store],
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
    owner: Owner | None = None,
) -> ChosenWeights:
    """Read the fp32 master weights of a chosen checkpoint, or their mean with `num_averaged - 1` earlier checkpoints.
    The best checkpoint has the highest context AUC on held-out rows or, without a discriminator, the lowest loss. If
    `owner` is given, OtherRun is raised for a checkpoint of another run. Raises UserError if too few are good.
    """
    progress(0, num_averaged)
    if choice == "best":
        chosen = _read_best(targets, owner)
    else:
        chosen = assemble(targets, None if choice == "newest" else choice)
        if owner is not None:
            owner.check(chosen.state, _urls(targets))
    progress(1, num_averaged)
    return chosen if num_averaged == 1 else _mean(targets, chosen, num_averaged, progress, owner)


def _mean(
    targets: Sequence[Store],
    newest: ChosenWeights,
    num_averaged: int,
    progress: CheckpointProgress,
    owner: Owner | None,
) -> ChosenWeights:
    """Return the mean of the weights `newest` and of the `num_averaged - 1` good checkpoints before them.
    The sums are in fp64. Raises UserError if there are too few good checkpoints.
    """
    newest_step = newest.state.step
    older_steps = [step for step in _steps(checkpoints(targets)) if step < newest_step]
    averaged_steps = [newest_step]
    sums = {name: weight.double() for name, weight in newest.weights.items()}
    for older in _read_good(targets, older_steps, newest.damaged, owner):
        for name, weight in older.weights.items():
            sums[name] += weight
        averaged_steps.append(older.state.step)
        progress(len(averaged_steps), num_averaged)
        if len(averaged_steps) == num_averaged:
            means = {name: (total / num_averaged).float() for name, total in sums.items()}
            return newest._replace(weights=means, steps=tuple(reversed(averaged_steps)))
    raise UserError(
        f"{_urls(targets)}: a mean of {num_averaged} checkpoints was asked for, but up to step {newest_step:,} only "
        f"{len(averaged_steps)} good checkpoints are there; ask for a mean of {len(averaged_steps)}, and set "
        f"checkpoint.keep_last to {num_averaged} for the next run"
    )


def _read_best(targets: Sequence[Store], owner: Owner | None) -> ChosenWeights:
    """Read the best checkpoint that is good; the result's `damaged` has a line for each better one that is damaged."""
    damaged: list[str] = []
    found = checkpoints(targets)
    ranked = best_first(found, {checkpoint: held_out_score(checkpoint) for checkpoint in found})
    best = next(_read_good(targets, _steps(ranked), damaged, owner), None)
    if best is not None:
        return best._replace(damaged=damaged)
    if damaged:
        raise UserError(f"{_urls(targets)}: no evaluated checkpoint is good ({'; '.join(damaged)}); choose a step")
    raise UserError(
        f"{_urls(targets)}: no checkpoint is the best one, because none was saved at a step with an evaluation on "
        f"held-out rows; choose a step or the newest one, and for the next run set data.heldout and "
        f"log.eval_every_steps to a divisor of checkpoint.every_steps"
    )


def _read_good(
    targets: Sequence[Store], steps: Iterable[int], damaged: list[str], owner: Owner | None
) -> Iterator[ChosenWeights]:
    """Read the checkpoints of `steps` one by one; yield the good ones, and add a line to `damaged` for each other."""
    for step in steps:
        try:
            found = assemble(targets, step)
        except StoreError:
            raise
        except UserError as error:
            damaged.append(str(error))
            continue
        if owner is not None:
            owner.check(found.state, _urls(targets))
        damaged += found.damaged
        yield found


def _steps(found: Iterable[Checkpoint]) -> list[int]:
    """Return the steps of checkpoints in the given order, each once."""
    return list(dict.fromkeys(checkpoint.step for checkpoint in found))


def assemble(targets: Sequence[Store], step: int | None = None) -> ChosenWeights:
    """Read the whole fp32 weights of the newest good checkpoint, or of that at `step`, onto the CPU.
    Earlier `targets` (the stores that receive checkpoints) are preferred. Nothing is written, and no process group is
    needed. Raises UserError if there is no good checkpoint.
    """
    found = checkpoints(targets) if step is None else checkpoints_of_step(targets, step)
    good, damaged = first_good(copies_of_each(found), _read_weights)
    lines = [f"checkpoint {copy.url} is damaged: {error}" for copy, error in damaged.items()]
    if good is None:
        raise _no_checkpoint_error(targets, step, lines)
    lines += [f"checkpoint {other.url} could not be read: {error}" for other, error in good.unreadable.items()]
    state, weights = good.content
    return ChosenWeights(state, weights, (state.step,), lines)


def _no_checkpoint_error(targets: Sequence[Store], step: int | None, damaged: Sequence[str]) -> UserError:
    """Return, not raise, the error that no checkpoint can be read; `damaged` says what is wrong with those found."""
    urls = _urls(targets)
    if damaged:
        return UserError(
            f"{urls}: no checkpoint to read: none is good ({'; '.join(damaged)}); run `electra-dist checkpoint "
            f"repair {shlex.quote(targets[0].url)}`, or name another run"
        )
    if step is not None:
        return UserError(
            f"{urls}: no checkpoint to read: there is none of step {step:,}; choose a step that `electra-dist "
            f"checkpoint list {shlex.quote(targets[0].url)}` shows"
        )
    return UserError(
        f"{urls}: no checkpoint to read: there is none yet; train until the first checkpoint, or name another run"
    )


def _read_weights(checkpoint: Checkpoint) -> tuple[RunState, dict[str, torch.Tensor]]:
    """Return the state and the fp32 master weights of a checkpoint; raise TornCheckpoint if it is damaged."""
    reader = CheckpointReader(checkpoint)
    state = reader.manifest.state
    weights = {name: torch.empty(shape) for name, shape in state.shapes.items()}
    fragments = [
        Fragment(name=name, start=0, numel=weight.numel(), views={"master": weight.view(-1)})
        for name, weight in weights.items()
    ]
    faults = reader.fill(fragments, check=reader.manifest.files)
    if faults:
        raise TornCheckpoint(faults[0])
    return state, weights


def _urls(targets: Sequence[Store]) -> str:
    return " and ".join(target.url for target in targets)

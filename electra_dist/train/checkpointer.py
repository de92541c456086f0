"""The run's memory: ties the engine's state to the checkpoint store.

Where it stops: what is kept and verified is `checkpoint/`'s; when to save is the loop's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.load import load_newest
from electra_dist.checkpoint.manifest import RunState, committed
from electra_dist.checkpoint.save import CheckpointWriter, SaveTiming
from electra_dist.checkpoint.targets import open_targets
from electra_dist.checkpoint.tensor_file import Fragment
from electra_dist.collectives import from_rank_0
from electra_dist.config import Config, GuardConfig
from electra_dist.data.receipt import Receipt
from electra_dist.engine.engine import Engine
from electra_dist.engine.fragments import held_fragments, owned_fragments, parameter_shapes, publish, shared_names
from electra_dist.model.init import build_towers
from electra_dist.pretrained.init_from import load_source
from electra_dist.run.environment import versions
from electra_dist.run.folder import STAGING_DIR
from electra_dist.train.guard import Guard
from electra_dist.train.skip_list import SkipList
from electra_dist.train.step import StepResult


@dataclass(kw_only=True)
class TrainState:
    """Where the run stands, beside its weights. The loop's own."""

    step: int  # steps done or skipped
    receipt: Receipt
    guard: Guard
    skips: SkipList
    eval_rtd_loss: float | None = None  # of the evaluation at this step, if there was one

    def updated(self, result: StepResult) -> None:
        """A step has updated the weights."""
        self.receipt += result.receipt
        self.guard.accept(result.loss)

    @classmethod
    def after(cls, restored: RunState | None, config: GuardConfig, skips: SkipList) -> TrainState:
        """What a checkpoint remembers, or the beginning."""
        if restored is None:
            return cls(step=0, receipt=Receipt(), guard=Guard(config), skips=skips)
        receipt = Receipt(restored.rows_seen, restored.rows_digest)
        return cls(step=restored.step, receipt=receipt, guard=Guard(config, restored.recent_losses), skips=skips)

    def state_fields(self) -> dict[str, Any]:
        """The fields of RunState that change from step to step."""
        return {
            "step": self.step,
            "rows_seen": self.receipt.rows,
            "rows_digest": self.receipt.digest,
            "skipped": self.skips.below(self.step),
            "recent_losses": self.guard.recent_losses,
            "eval_rtd_loss": self.eval_rtd_loss,
        }


class Checkpointer:
    """Restores at start, saves on demand. `close()` waits for the save in flight."""

    def __init__(self, config: Config, engine: Engine, corpus_fingerprint: str, skipped: Iterable[int]) -> None:
        """Takes the run's next attempt number. Collective.

        Args:
            skipped: all steps that this run passes over; a checkpoint that did not is not its own.
        """
        self._config = config
        self._engine = engine
        self._module, self._optimizer = engine.deepspeed.module, engine.optimizer
        self._targets = open_targets(config)
        run = {"identity_sha256": config.identity_sha256(), "corpus_fingerprint": corpus_fingerprint}
        attempt = from_rank_0(lambda: begin_attempt(self._targets, run))
        self._state = RunState(
            step=0,
            attempt=attempt,
            identity_sha256=run["identity_sha256"],
            corpus_fingerprint=corpus_fingerprint,
            world_size=dist.get_world_size(),
            zero_stage=config.engine.zero_stage,
            shapes=parameter_shapes(self._module),
            shared=shared_names(self._module),
            versions=_versions(),
            skipped=tuple(sorted(skipped)),
        )
        staging = Path(config.run_dir) / STAGING_DIR
        self.writer = CheckpointWriter(self._targets, staging, dist.get_rank(), attempt, config.checkpoint)

    @property
    def attempt(self) -> int:
        """Which start of the run this is, from 1."""
        return self._state.attempt

    def restore(self, *, pristine: bool) -> tuple[RunState | None, list[str]]:
        """Load the newest good checkpoint into the engine, or the initial weights if there is none; and say what was
        set aside. Collective.

        Args:
            pristine: the engine still holds the initial weights, unless a damaged checkpoint was half read.
        """
        fragments = held_fragments(self._module, self._optimizer)
        self.writer.reserve(owned_fragments(self._module, self._optimizer))
        found, set_aside = load_newest(self._targets, fragments, self._state)
        if found is None and pristine and not set_aside:
            return found, set_aside
        if found is None:
            self._initialise(fragments)
        publish(self._optimizer)
        return found, set_aside

    def _initialise(self, fragments: list[Fragment]) -> None:
        """Back to the beginning: after a rollback, and where a damaged checkpoint was half read."""
        towers = build_towers(self._config.model, self._config.seed, self._config.objective)
        if self._config.train.init_from:
            load_source(towers, self._config.train)
        dtype = next(self._module.parameters()).dtype  # the engine's masters began as its parameters: rounded
        start = {f"towers.{name}": p.detach().to(dtype).reshape(-1) for name, p in towers.named_parameters()}
        for fragment in fragments:
            for kind, view in fragment.views.items():
                if kind == "master":
                    view.copy_(start[fragment.name].narrow(0, fragment.start, fragment.numel))
                else:
                    view.zero_()

    def save(self, train_state: TrainState) -> SaveTiming:
        """Start saving the state after `train_state.step` steps. Collective."""
        state = self._state.model_copy(update=train_state.state_fields())
        return self.writer.save(state, owned_fragments(self._module, self._optimizer))

    @property
    def retries(self) -> int:
        """Store requests repeated so far."""
        return sum(target.retries for target in self._targets)

    @property
    def retry_wait_s(self) -> float:
        """Seconds waited before them."""
        return sum(target.retry_wait_s for target in self._targets)

    def committed_steps(self) -> list[int]:
        """Steps of the checkpoints there are, ascending; the same on all ranks. Collective."""
        return from_rank_0(lambda: sorted({step for target in self._targets for step, _, _ in committed(target)}))

    def close(self) -> None:
        """Wait until everything saved is committed."""
        self.writer.close()


def _versions() -> dict[str, str]:
    """Return the versions that a manifest records: of this package, Python, torch and DeepSpeed."""
    found = versions()
    return {"electra_dist": found["electra-dist"], **{name: found[name] for name in ("python", "torch", "deepspeed")}}

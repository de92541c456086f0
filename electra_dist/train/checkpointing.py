"""The run's memory: ties the engine's state to the checkpoint store.

Where it stops: what is kept and verified is `checkpoint/`'s; when to save is the loop's.
"""

from __future__ import annotations

import platform
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import electra_dist
from electra_dist.checkpoint.fragments import (
    held_fragments,
    owned_fragments,
    parameter_shapes,
    publish,
    shared_names,
)
from electra_dist.checkpoint.load import load_newest
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.save import CheckpointWriter, SaveTiming, begin_attempt
from electra_dist.config import Config
from electra_dist.store import open_store
from electra_dist.train.engine import Engine


class RunMemory:
    """Restores at start, saves on demand. `close()` waits for the save in flight."""

    def __init__(self, config: Config, engine: Engine, corpus_fingerprint: str) -> None:
        """Takes the run's next attempt number. Collective."""
        self._engine = engine
        self._module, self._optimizer = engine.deepspeed.module, engine.optimizer
        self._store = open_store(str(Path(config.run_dir) / "checkpoints"))
        self._staging = Path(config.run_dir) / "staging"
        box = [begin_attempt(self._store) if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(box)
        self._state = RunState(
            step=0,
            attempt=box[0],
            identity_sha256=config.identity_sha256(),
            corpus_fingerprint=corpus_fingerprint,
            world_size=dist.get_world_size(),
            zero_stage=config.engine.zero_stage,
            shapes=parameter_shapes(self._module),
            shared=shared_names(self._module),
            versions=versions(),
        )
        self.writer = CheckpointWriter(self._store, self._staging, dist.get_rank(), config.checkpoint.keep_last)

    @property
    def attempt(self) -> int:
        """Which start of the run this is, from 1."""
        return self._state.attempt

    def restore(self) -> tuple[RunState | None, list[str]]:
        """Load the newest good checkpoint into the engine, if there is one; and say what was set aside. Collective."""
        fragments = held_fragments(self._module, self._optimizer)
        found, set_aside = load_newest(self._store, self._staging, fragments, self._state)
        if found is not None:
            publish(self._optimizer)
        return found, set_aside

    def save(self, step: int) -> SaveTiming:
        """Start saving the state after `step` steps. Collective."""
        state = self._state.model_copy(update={"step": step})
        return self.writer.save(state, owned_fragments(self._module, self._optimizer))

    def close(self) -> None:
        """Wait until everything saved is committed."""
        self.writer.close()


def versions() -> dict[str, str]:
    """What the state was computed with."""
    return {
        "electra_dist": electra_dist.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }

"""Load a run's weights for an export, for `train.init_from` of another run, and for fine-tuning.

Guarantee: every byte is verified against the checkpoint's manifest. If a checkpoint is damaged, the result names it
and the next older good one is read. A run folder that was moved since training can still be read.

Cost: the fp32 weights once in host memory. Needs no process group and no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from electra_dist.checkpoint.checkpoint_manifest import RunState
from electra_dist.checkpoint.checkpoint_stores import open_targets
from electra_dist.checkpoint.chosen_weights import CheckpointProgress, Choice, read_chosen, report_nothing
from electra_dist.checkpoint.restore_state import assemble
from electra_dist.config import Config
from electra_dist.data.corpus_manifest import TokenizerEntry
from electra_dist.errors import UserError
from electra_dist.run.folder import RUN_VOCAB_FILE, TOKENIZER_FILE, open_run
from electra_dist.store.json_file import DamagedJson, first_fault, parse_json


class RunWeights(NamedTuple):
    """Weights of a run, of one checkpoint or a mean of several, with the config and the tokenizer to use them."""

    config: Config  # the run's config, resolved
    state: RunState  # state of the run at the checkpoint that was read, of a mean at the newest one
    weights: dict[str, torch.Tensor]  # parameter name of the objective -> whole fp32 master weight, on the host
    damaged: list[str]  # one line for each checkpoint that was skipped because it is damaged
    steps: tuple[int, ...]  # of the checkpoints in a mean, ascending; of a single checkpoint, its step

    @property
    def vocab_file(self) -> Path:
        """Return the path of the run's copy of the corpus's vocab.txt."""
        return Path(self.config.run_dir) / RUN_VOCAB_FILE

    @property
    def tokenizer(self) -> TokenizerEntry:
        """Return the settings of the corpus's tokenizer, read from a file of the run folder at each access.

        Raises:
            UserError: the file is missing or damaged; the next start of the run writes it again.
        """
        file = Path(self.config.run_dir) / TOKENIZER_FILE
        try:
            return TokenizerEntry.model_validate(parse_json(file.read_bytes()))
        except OSError as error:
            reason = error.strerror
        except DamagedJson as error:
            reason = str(error)
        except ValidationError as error:
            reason = first_fault(error)
        raise UserError(
            f"{file}: cannot be read as the settings of a tokenizer ({reason}); copy tokenizer.json from a backup "
            f"of this run, or start the run once more, which writes it again from the corpus"
        )


def load_run_weights(run_dir: Path, step: int | None = None) -> RunWeights:
    """Read the weights in the newest undamaged checkpoint of a run, or in the one after `step` steps.

    Every byte is verified. Nothing is written, and neither a process group nor a GPU is needed.

    Args:
        run_dir: the run folder; its config names the checkpoint targets.
        step: number of steps after which the checkpoint was taken; None for the newest good one.

    Raises:
        UserError: `run_dir` is not a run, or has no good checkpoint (after that many steps).
        StoreError: a checkpoint cannot be read, for example because the store is down.
    """
    config = open_run(run_dir)
    state, weights, damaged = assemble(open_targets(config), step)
    return RunWeights(config=config, state=state, weights=weights, damaged=damaged, steps=(state.step,))


def load_chosen_weights(
    run_dir: Path,
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
) -> RunWeights:
    """Read the weights of the checkpoint of a run that a user chooses, or their mean with the checkpoints before it.

    Every byte is verified. Nothing is written, and neither a process group nor a GPU is needed.

    Args:
        run_dir: the run folder; its config names the checkpoint targets.
        choice: number of steps after which the checkpoint was taken, "newest", or "best" on held-out rows.
        num_averaged: number of checkpoints in the mean, the chosen one included; 1 for no mean.
        progress: called before the first checkpoint is read, and after each one.

    Raises:
        UserError: `run_dir` is not a run, or has no such good checkpoint.
        StoreError: a checkpoint cannot be read, for example because the store is down.
    """
    config = open_run(run_dir)
    chosen = read_chosen(open_targets(config), choice, num_averaged, progress)
    return RunWeights(
        config=config, state=chosen.state, weights=chosen.weights, damaged=chosen.damaged, steps=chosen.steps
    )

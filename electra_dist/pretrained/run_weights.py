"""Load the weights of a run: the one way in which an export, another run and a fine-tuning read them.

Guarantee: every byte is verified against the checkpoint's manifest. A damaged checkpoint is named and the next older
good one is taken; a run folder that was moved is read where it is.

Cost: the fp32 weights once in host memory. Needs no process group and no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from electra_dist.checkpoint.load import assemble
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.targets import open_targets
from electra_dist.config import Config
from electra_dist.data.manifest import TokenizerEntry
from electra_dist.run.folder import RUN_VOCAB_FILE, TOKENIZER_FILE, open_run


class RunWeights(NamedTuple):
    """The weights of one checkpoint of a run, and what is needed to use them."""

    config: Config  # the run's, resolved
    state: RunState  # of the checkpoint that was read
    weights: dict[str, torch.Tensor]  # parameter name of the objective -> fp32 master, whole, on the host
    damaged: list[str]  # one line for each newer checkpoint that could not be used

    @property
    def vocab_file(self) -> Path:
        """The run's copy of the corpus's vocab.txt."""
        return Path(self.config.run_dir) / RUN_VOCAB_FILE

    @property
    def tokenizer(self) -> TokenizerEntry:
        """What the corpus says of its tokenizer."""
        text = (Path(self.config.run_dir) / TOKENIZER_FILE).read_text()
        return TokenizerEntry.model_validate_json(text)


def load_run_weights(run_dir: Path, step: int | None = None) -> RunWeights:
    """Read the newest good checkpoint of a run, or the one after `step` steps.

    Raises:
        UserError: `run_dir` is not a run, or has no good checkpoint (of that step).
    """
    config = open_run(run_dir)
    state, weights, damaged = assemble(open_targets(config), step)
    return RunWeights(config=config, state=state, weights=weights, damaged=damaged)

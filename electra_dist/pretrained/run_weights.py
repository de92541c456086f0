"""Load a run's weights for an export, for `train.init_from` of another run, and for fine-tuning.

Guarantee: every byte is verified against the checkpoint's manifest. If a checkpoint is damaged, the result names it
and the next older good one is read. A checkpoint that another run has written is refused. A run folder that was moved
since training can still be read.

Cost: the fp32 weights once in host memory. Needs no process group and no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from electra_dist.checkpoint.checkpoint_stores import open_targets, owner_of
from electra_dist.checkpoint.chosen_weights import (
    CheckpointProgress,
    Choice,
    assemble,
    read_chosen,
    report_nothing,
)
from electra_dist.checkpoint.manifest import RunState
from electra_dist.config import Config
from electra_dist.data.manifest import TokenizerEntry
from electra_dist.errors import ManifestMismatch
from electra_dist.run.folder import RUN_VOCAB_FILE, TOKENIZER_FILE, named_digest, open_run, read_identity
from electra_dist.store.atomic_files import readable
from electra_dist.store.json_file import parse_document
from electra_dist.store.regular_files import read_regular
from electra_dist.tokenizer import NamedDigest, Vocabulary, check_digest


class RunWeights(NamedTuple):
    """Weights from a run's checkpoint, or a mean of several, with the config and the tokenizer to use them."""

    config: Config  # the run's config, resolved
    state: RunState  # state of the run at the checkpoint that was read, of a mean at the newest one
    weights: dict[str, torch.Tensor]  # parameter name in training -> whole fp32 master weight, on the host
    damaged: list[str]  # one line for each checkpoint that was skipped because it is damaged
    steps: tuple[int, ...]  # of the checkpoints in a mean, ascending; of a single checkpoint, its step

    @property
    def tokenizer(self) -> TokenizerEntry:
        """Return the settings of the corpus's tokenizer, read from the run folder at each access."""
        return read_run_tokenizer(Path(self.config.run_dir))

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the corpus, read from the run folder at each access."""
        return read_run_vocabulary(Path(self.config.run_dir))


def read_run_tokenizer(run_dir: Path) -> TokenizerEntry:
    """Return the settings of the tokenizer in a run folder, verified against SHA256SUMS there.

    Nothing is verified in the folder of an older run, which has no SHA256SUMS. `read_run_vocabulary` compares all
    settings with the vocabulary, except whether the tokenizer lower-cases.
    """
    file = run_dir / TOKENIZER_FILE
    next_step = "copy it from a backup of this run, or start the run once more, which writes it again from the corpus"
    with readable(file):
        data = read_regular(file)
    expected = named_digest(run_dir, TOKENIZER_FILE)
    if expected is not None:
        check_digest(data, str(file), expected)
    return parse_document(data, file, TokenizerEntry, next_step)


def read_run_vocabulary(run_dir: Path) -> Vocabulary:
    """Return the vocabulary in a run folder, verified against the digest in tokenizer.json there.

    Raises ManifestMismatch if vocab.txt has another digest, or tokenizer.json other special ids or another size.
    """
    tokenizer = read_run_tokenizer(run_dir)
    settings_file = run_dir / TOKENIZER_FILE
    next_step = "restore both from a backup of this run, or start the run once more, which writes both again"
    file = run_dir / RUN_VOCAB_FILE
    with readable(file):
        data = read_regular(file)
    expected = NamedDigest(sha256=tokenizer.sha256, named_by=str(settings_file), next_step=next_step)
    vocabulary = Vocabulary.parse(data, str(file), expected)
    known_ids = vocabulary.ids | vocabulary.special
    fits = tokenizer.vocab_size == vocabulary.size and tokenizer.special.items() <= known_ids.items()
    if not fits:
        raise ManifestMismatch(
            f"{settings_file}: its size or special ids are not those of {file}, which has {vocabulary.size} tokens; "
            f"{next_step}"
        )
    return vocabulary


def load_run_weights(run_dir: Path, step: int | None = None) -> RunWeights:
    """Read the weights in the newest undamaged checkpoint of a run, or in the one after `step` steps; write nothing.

    Raises UserError if `run_dir` is not a run, has no such checkpoint that is good, or if another run wrote the
    checkpoint.
    """
    config = open_run(run_dir)
    owner = owner_of(config, read_identity(run_dir))
    state, weights, damaged = assemble(open_targets(config), step)
    if owner is not None:
        owner.check(state, str(run_dir))
    return RunWeights(config=config, state=state, weights=weights, damaged=damaged, steps=(state.step,))


def load_chosen_weights(
    run_dir: Path,
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
) -> RunWeights:
    """Read the weights of a chosen checkpoint of a run, or their mean with the checkpoints before it.

    The arguments are those of `export_run`; errors are as for `load_run_weights`.
    """
    config = open_run(run_dir)
    owner = owner_of(config, read_identity(run_dir))
    chosen = read_chosen(open_targets(config), choice, num_averaged, progress, owner)
    return RunWeights(
        config=config, state=chosen.state, weights=chosen.weights, damaged=chosen.damaged, steps=chosen.steps
    )

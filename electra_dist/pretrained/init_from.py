"""`train.init_from`: a run that begins with the weights of another model instead of random ones.

Guarantee: the weights are in the towers before DeepSpeed takes them, so every ZeRO stage begins alike; whatever the
source lacks is said (a head, the generator, always the moments). A vocabulary or a shape that is not the config's is
refused before anything is written. Once the run has a checkpoint of its own the source is not looked at again.

How: a run gives its newest good checkpoint, whatever its objective and its towers share; an export and a Hugging Face
folder are read by `hf_load.py`. Every rank reads the source, so all nodes must see it.

Where it stops: steps, schedule and moments begin anew. In bf16 at ZeRO 1 to 3 the masters begin rounded to bf16, as
initial weights do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.checkpoint.manifest import committed
from electra_dist.collectives import from_rank_0
from electra_dist.config import TrainConfig
from electra_dist.errors import UserError
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf import State, standalone
from electra_dist.pretrained.hf_load import check_shape, load_pretrained, load_towers, shape_of
from electra_dist.pretrained.run_weights import load_run_weights
from electra_dist.run.folder import is_run_folder
from electra_dist.store.interface import Store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_LARGE = ("embeddings.", "discriminator.", "discriminator_head.", "token_head.", "copy_gate.")
_SMALL = ("embeddings.", "generator.", "generator_reverse.", "generator_head.", "baseline.")


class Source(NamedTuple):
    """What `train.init_from` names: a run, or one or two Hugging Face folders."""

    run: Path | None = None
    discriminator: Path | None = None
    generator: Path | None = None


def find_source(train: TrainConfig) -> Source:
    """The folders behind `train.init_from`, which is set.

    Raises:
        UserError: there is nothing of the kind.
    """
    folder, given = Path(train.init_from or ""), train.init_generator_from
    generator = Path(given) if given else None
    if is_run_folder(folder):
        if generator:
            raise UserError(f"train.init_generator_from: the run {folder} brings its own generator; leave it out")
        return Source(run=folder)
    if (folder / "discriminator" / "config.json").exists():
        own = folder / "generator"
        return Source(discriminator=folder / "discriminator", generator=generator or (own if own.exists() else None))
    if (folder / "config.json").exists():
        return Source(discriminator=folder, generator=generator)
    raise UserError(
        f"train.init_from {folder}: neither a run (config.yaml), nor an export (discriminator/config.json), nor a "
        f"Hugging Face folder (config.json); name one"
    )


def check_source(train: TrainConfig, vocabulary: Vocabulary) -> None:
    """Refuse a source that is not there, or that has another vocabulary than the corpus.

    Raises:
        UserError: names the source and what differs.
    """
    for folder in filter(None, find_source(train)):
        if (folder / VOCAB_FILE).exists() and Vocabulary.read(folder / VOCAB_FILE).tokens != vocabulary.tokens:
            raise UserError(
                f"train.init_from: {folder / VOCAB_FILE} is not the vocabulary of data.corpus; build the corpus with "
                f"--vocab {folder / VOCAB_FILE}"
            )


def needs_source(train: TrainConfig, targets: Sequence[Store]) -> bool:
    """Return whether the run begins with other weights and has no checkpoint of its own in `targets` yet."""
    return bool(train.init_from) and not any(committed(target) for target in targets)


def begin_with_source(towers: ElectraTowers, train: TrainConfig, targets: Sequence[Store]) -> list[str]:
    """Load the source where it is needed; return lines that say what was loaded. Collective."""
    return load_source(towers, train) if from_rank_0(lambda: needs_source(train, targets)) else []


def load_source(towers: ElectraTowers, train: TrainConfig) -> list[str]:
    """Overwrite what the source holds; returns lines of what it is and of what it does not hold.

    Args:
        towers: initialised, on the host, not yet under an engine.
        train: with `init_from`.

    Raises:
        UserError: the source cannot be read, or has another shape than the towers.
    """
    source = find_source(train)
    if source.run is None:
        notes = load_pretrained(towers, source.discriminator, source.generator)
        return [f"the weights of {train.init_from}", *notes]
    run = load_run_weights(source.run)
    model = run.config.model
    large = _part(standalone(run.weights, model, "discriminator"), _LARGE)
    small = _part(standalone(run.weights, model, "generator"), _SMALL)
    if not any(name.startswith("generator_head.") for name in small):
        small = {}  # that run has no generator
    check_shape(str(source.run), shape_of(model, "discriminator"), towers.model, "discriminator")
    if small and hasattr(towers, "generator_head"):
        check_shape(str(source.run), shape_of(model, "generator"), towers.model, "generator")
    notes = load_towers(towers, large, small, str(source.run))
    moments = "optimizer: moments are not taken over; they start at zero"
    return [f"the weights of {source.run} after {run.state.step:,} steps", *run.damaged, *notes, moments]


def _part(state: State, prefixes: tuple[str, ...]) -> State:
    return {name: value for name, value in state.items() if name.startswith(prefixes)}

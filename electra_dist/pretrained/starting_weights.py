"""Start a run with the weights of another model instead of random ones, as `train.init_from` selects.

Guarantee: the weights are in the towers (generator and discriminator) before DeepSpeed takes them over, so all ZeRO
stages start alike. The log names everything that the source lacks (a head, the generator, and always the optimizer's
moments). A source whose vocabulary or shape differs from the config's is refused before anything is written. Once the
run has a checkpoint of its own, the source is read again only if a rollback goes back to step 0. The digest of the
initial weights is recorded in the run folder, and a source that has changed is refused.

How: from a run, the newest good checkpoint is taken, whatever its objective and whatever its towers share. An export
or a Hugging Face folder is read by `load_towers.py`. Every rank reads the source, so it must be visible on all nodes.

Limits: step number, schedule and moments start anew. In bf16 at ZeRO 1 to 3 DeepSpeed casts the weights to bf16 before
it makes the fp32 masters, so these start rounded to bf16, as they do with random initial weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.checkpoint.checkpoint import checkpoints
from electra_dist.collectives import from_rank_0, gather
from electra_dist.config import TrainConfig
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf import State, shape_of, standalone
from electra_dist.pretrained.hf_folders import check_shape
from electra_dist.pretrained.load_towers import load_tower_folders, load_towers, weights_sha256
from electra_dist.pretrained.pretraining_record import check_tokenizer_files
from electra_dist.pretrained.run_weights import load_run_weights, read_run_vocabulary
from electra_dist.run.folder import check_recorded_inputs, is_run_folder
from electra_dist.store.interface import Store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

# Prefixes of the names of the discriminator's (large) and of the generator's (small) parameters.
_LARGE = ("embeddings.", "discriminator.", "discriminator_head.", "token_head.", "copy_gate.")
_SMALL = ("embeddings.", "generator.", "generator_reverse.", "generator_head.", "baseline.")


class Source(NamedTuple):
    """Folders of the weights to start with: one run folder, or Hugging Face folders."""

    run: Path | None = None  # run folder
    discriminator: Path | None = None  # Hugging Face folder of the discriminator, with `mlm` the only tower
    generator: Path | None = None  # Hugging Face folder of the generator


def find_source(train: TrainConfig) -> Source:
    """Return the run folder, or the Hugging Face folders, that `train.init_from` names.

    An export is a folder that contains the Hugging Face folder `discriminator`, and in most cases `generator`. The
    generator is taken from `train.init_generator_from` if that is set, otherwise from the export if it has one.
    """
    folder = Path(train.init_from or "")
    generator = Path(train.init_generator_from) if train.init_generator_from else None
    if is_run_folder(folder):
        if generator is not None:
            raise UserError(
                f"train.init_generator_from is set, but train.init_from {folder} is a run, which has its own "
                f"generator; remove train.init_generator_from"
            )
        return Source(run=folder)
    if (folder / "discriminator" / "config.json").exists():
        exported_generator = folder / "generator"
        if generator is None and exported_generator.exists():
            generator = exported_generator
        return Source(discriminator=folder / "discriminator", generator=generator)
    if (folder / "config.json").exists():
        return Source(discriminator=folder, generator=generator)
    raise UserError(
        f"train.init_from {folder}: neither a run (config.yaml), nor an export (discriminator/config.json), nor a "
        f"Hugging Face folder (config.json); set train.init_from to a folder of one of these"
    )


def check_source(train: TrainConfig, vocabulary: Vocabulary) -> None:
    """Raise UserError unless the weights that `train.init_from` names exist and have the vocabulary of the corpus.

    See `check_vocabulary` for the files that are compared. Weights without such a file are accepted.
    """
    for folder in find_source(train):
        if folder is not None:
            check_vocabulary("train.init_from", folder, vocabulary)


def check_vocabulary(key: str, folder: Path, vocabulary: Vocabulary) -> None:
    """Raise UserError if the vocabulary in a folder of weights has other tokens than the corpus.

    The folder's vocab.txt is compared. If there is none and the vocabulary of the corpus is a tokenizer.json, the
    folder's tokenizer.json is compared. A folder without such a file is accepted. The message names `key`, the config
    key of the folder.
    """
    vocab_file = folder / VOCAB_FILE
    if not vocab_file.exists() and vocabulary.tokenizer_json is not None:
        vocab_file = folder / "tokenizer.json"
    if not vocab_file.exists():
        return
    if is_run_folder(folder):
        found = read_run_vocabulary(folder)
    else:
        check_tokenizer_files(folder)
        found = Vocabulary.read(vocab_file)
    if found.tokens != vocabulary.tokens:
        raise UserError(
            f"{key}: {vocab_file} is not the vocabulary of data.corpus, whose tokens differ; "
            f"build the corpus with --vocab {vocab_file}"
        )


def needs_source(train: TrainConfig, targets: Sequence[Store]) -> bool:
    """Return whether `train.init_from` is set and no checkpoint store of the run holds a committed checkpoint yet."""
    return bool(train.init_from) and not checkpoints(targets)


def begin_with_source(
    towers: ElectraTowers, train: TrainConfig, targets: Sequence[Store], run_dir: Path
) -> tuple[list[str], dict[str, str]]:
    """Load the weights that `train.init_from` names, if it is set and the run has no checkpoint yet. Collective.

    Rank 0 decides for all ranks, then every rank reads the weights. Returns and raises what `load_recorded_source`
    does; if nothing is loaded, returns an empty list and an empty dict.
    """
    is_needed = from_rank_0(lambda: needs_source(train, targets))
    if not is_needed:
        return [], {}
    return load_recorded_source(towers, train, run_dir)


def load_recorded_source(towers: ElectraTowers, train: TrainConfig, run_dir: Path) -> tuple[list[str], dict[str, str]]:
    """Load the weights of `train.init_from`, and compare them with a digest in the run folder, if any. Collective.

    Returns lines for the log, and {name of the source: digest of the initial weights} for the caller to record. Raises
    ManifestMismatch if the weights differ from those of an earlier start of the run, or between the ranks.
    """
    notes = load_source(towers, train)
    name = f"train.init_from {train.init_from}"
    digest = weights_sha256(dict(towers.named_parameters()))
    if len(set(gather(digest))) > 1:
        raise ManifestMismatch(f"{name} has changed while the ranks have read it; start the run again")
    from_rank_0(lambda: check_recorded_inputs(run_dir, {name: digest}))
    return notes, {name: digest}


def load_source(towers: ElectraTowers, train: TrainConfig) -> list[str]:
    """Load the weights of the model at `train.init_from` into the towers; return lines for the run's log.

    The towers (generator and discriminator) are initialised, on the host and not yet taken over by DeepSpeed. The
    lines name the model and every parameter that it lacks, which keeps its random initial value.
    """
    source = find_source(train)
    if source.run is None:
        notes = load_tower_folders(towers, source.discriminator, source.generator)
        return [f"the weights of {train.init_from}", *notes]
    return _load_run(towers, source.run)


def _load_run(towers: ElectraTowers, run_dir: Path) -> list[str]:
    """Load the weights of a run's newest good checkpoint into the towers; return lines for the new run's log."""
    run = load_run_weights(run_dir)
    model = run.config.model
    large = _with_prefixes(standalone(run.weights, model, "discriminator"), _LARGE)
    small = _with_prefixes(standalone(run.weights, model, "generator"), _SMALL)
    source_has_generator = any(name.startswith("generator_head.") for name in small)
    if not source_has_generator:
        small = {}  # embeddings alone, which `large` holds as well
    check_shape(str(run_dir), shape_of(model, "discriminator"), towers.model, "discriminator")
    if source_has_generator and hasattr(towers, "generator_head"):
        check_shape(str(run_dir), shape_of(model, "generator"), towers.model, "generator")
    notes = load_towers(towers, large, small, where=str(run_dir))
    return [
        f"the weights of {run_dir} after {run.state.step:,} steps",
        *run.damaged,
        *notes,
        "optimizer: moments are not taken over; they start at zero",
    ]


def _with_prefixes(state: State, prefixes: tuple[str, ...]) -> State:
    return {name: value for name, value in state.items() if name.startswith(prefixes)}

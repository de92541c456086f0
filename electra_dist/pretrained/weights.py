"""Take weights out of runs, exports and Hugging Face folders: for an export, for another run, and for a program.

Guarantee: every byte of a checkpoint is verified against its manifest. If a checkpoint is damaged, the result names it
and the next older good one is read. A checkpoint that another run has written is refused. A run folder that was moved
since training can still be read.

`train.init_from`: the weights are in the towers (generator and discriminator) before DeepSpeed takes them over, so all
ZeRO stages start alike. Every parameter gets its value from the source or is named in the notes, the lines of text
that are returned for the run's log; these also name the optimizer's moments. A source of another shape, vocabulary or
function (such as another epsilon of the LayerNorms) is refused before anything is written, with the first difference
in the message. The digest of the initial weights is recorded in the run folder, and a source that has changed is
refused. Once the run has a checkpoint of its own, the source is read again only if a rollback goes back to step 0.

`train.init_generator_from`: the sha256 of a frozen generator's weights is part of the run's identity. It is that of
the fp32 values under this project's names, so a run and its export to Hugging Face have the same one. At each start
every rank reads the source twice, once for the identity and once to use the weights.

Cost: the fp32 weights once in host memory. Reading a run needs no process group and no GPU.

Limits: every rank reads the source, so it must be visible on all nodes. Step number, schedule and moments start anew.
In bf16 at ZeRO 1 to 3 DeepSpeed casts the weights to bf16 before it makes the fp32 masters, so these start rounded to
bf16, as they do with random initial weights. The checkpoints that Google released hold no optimizer state, and some
conversions of discriminators no head. A source that is still training changes with each checkpoint; name its export,
or wait for its end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from electra_dist.checkpoint.chosen_weights import CheckpointProgress, Choice, read_chosen, report_nothing
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.stored_copies import open_targets, owner_of
from electra_dist.collectives import from_rank_0, gather
from electra_dist.config import Config, ModelConfig, TrainConfig
from electra_dist.data.manifest import TokenizerEntry
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.hub import model_folder, shown_name
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import Objective
from electra_dist.objectives.corruption import CorruptingObjective, FrozenGenerator
from electra_dist.pretrained.hf import State, standalone, submodules
from electra_dist.pretrained.hf_folders import check_shape, check_tokenizer_files, cut_positions, read_tower
from electra_dist.pretrained.hf_settings import shape_of
from electra_dist.run.folder import (
    RUN_VOCAB_FILE,
    TOKENIZER_FILE,
    check_recorded_inputs,
    is_run_folder,
    named_digest,
    open_run,
    read_identity,
)
from electra_dist.store.atomic_files import NamedDigest, check_digest, read_regular, readable
from electra_dist.store.json_file import parse_document
from electra_dist.store.patience import Patience, patient
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_EMBEDDINGS = "embeddings."  # prefix of the names of embedding parameters
# Modules of the generator. All others are the discriminator's, so that a new head is not forgotten here.
_SMALL = {name: name for name in ("embeddings", "generator", "generator_reverse", "generator_head", "baseline")}
# Modules of an mlm run's only network -> those of a generator.
_LARGE_TO_GENERATOR = {"embeddings": "embeddings", "discriminator": "generator", "token_head": "generator_head"}
_GENERATOR_KEY = "train.init_generator_from"


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

    Nothing is verified in the folder of an older run, which has no SHA256SUMS.
    """
    file = run_dir / TOKENIZER_FILE
    next_step = "copy it from a backup of this run, or start the run once more, which writes it again from the corpus"
    with readable(file, next_step):
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
    with readable(file, next_step):
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


def load_run_weights(
    run_dir: Path,
    choice: Choice = "newest",
    num_averaged: int = 1,
    progress: CheckpointProgress = report_nothing,
) -> RunWeights:
    """Read the weights of a chosen checkpoint of a run, or their mean with the checkpoints before it; write nothing.

    The arguments are those of `export_run`. Raises UserError if `run_dir` is not a run, has no such checkpoint that
    is good, or if another run wrote the checkpoint.
    """
    config = open_run(run_dir)
    owner = owner_of(config, read_identity(run_dir))
    chosen = read_chosen(open_targets(config), choice, num_averaged, progress, owner)
    return RunWeights(
        config=config, state=chosen.state, weights=chosen.weights, damaged=chosen.damaged, steps=chosen.steps
    )


class Source(NamedTuple):
    """Folders of the weights to start with: one run folder, or Hugging Face folders."""

    run: Path | None = None  # run folder
    discriminator: Path | None = None  # Hugging Face folder of the discriminator, with `mlm` the only tower
    generator: Path | None = None  # Hugging Face folder of the generator


def find_source(train: TrainConfig) -> Source:
    """Find the weights that `train.init_from` names: a run folder, an export, or a Hugging Face folder.

    An export is a folder that contains the Hugging Face folder `discriminator`, and in most cases `generator`. The
    generator is taken from `train.init_generator_from` if that is set, otherwise from the export if it has one. Raises
    UserError if the folder is none of the three.
    """
    folder = model_folder(train.init_from or "")
    generator = model_folder(train.init_generator_from) if train.init_generator_from else None
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
        f"Hugging Face folder (config.json); set train.init_from to a folder of one of these, or to ORG/NAME of a "
        f"model on the Hub"
    )


def check_source(train: TrainConfig, vocabulary: Vocabulary) -> None:
    """Raise UserError unless the weights that `train.init_from` names exist and have the vocabulary of the corpus.

    Weights without a vocabulary file are accepted; `check_vocabulary` says which files are compared.
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
        return [f"the weights of {shown_name(model_folder(train.init_from or ''))}", *notes]
    return _load_run(towers, source.run)


def _load_run(towers: ElectraTowers, run_dir: Path) -> list[str]:
    """Load the weights of a run's newest good checkpoint into the towers; return lines for the new run's log."""
    run = load_run_weights(run_dir)
    model = run.config.model
    of_discriminator = standalone(run.weights, model, "discriminator")
    modules = {name.partition(".")[0] for name in of_discriminator}
    of_others = (set(_SMALL) - {"embeddings"}) | {"discriminator_embeddings"}  # which `standalone` has put in place
    large = submodules(of_discriminator, {name: name for name in modules - of_others})
    small = submodules(standalone(run.weights, model, "generator"), _SMALL)
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


def load_tower_folders(towers: ElectraTowers, discriminator_dir: Path | None, generator_dir: Path | None) -> list[str]:
    """Load the weights of Hugging Face folders into the towers; return log lines about parts that the folders lack.

    The towers (generator and discriminator) are initialised, on the host and not yet taken over by DeepSpeed.
    Parameters that neither folder holds keep their random initial values.
    """
    large: State = {}
    small: State = {}
    folders = []
    if discriminator_dir:
        large = read_tower(towers.model, "discriminator", discriminator_dir)
        folders.append(str(discriminator_dir))
    if generator_dir:
        small = read_tower(towers.model, "generator", generator_dir)
        folders.append(str(generator_dir))
    notes = load_towers(towers, large, small, where=" and ".join(folders))
    return [*notes, "optimizer: a Hugging Face folder holds no moments; they start at zero"]


def load_towers(towers: ElectraTowers, large: State, small: State, where: str) -> list[str]:
    """Load the weights of two state dicts into the towers; return log lines (notes) about parts that both lack.

    `large` holds the discriminator, its head and the `embeddings.` that it reads; `small` holds the same for the
    generator. Names are those of ElectraTowers, and either may be empty. `where` names the source in the notes. If
    both have embeddings but the towers share one set, `large` decides; a note tells if the two differ.
    """
    large = cut_positions(large, towers.model.max_positions)
    small = cut_positions(small, towers.model.max_positions)
    values, notes = _assign_values(towers, large, small)
    num_missing: dict[str, int] = {}  # part of the towers -> number of its elements without a value
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            if name in values:
                parameter.copy_(values[name])
            else:
                part = name.partition(".")[0]  # "generator_head" of "generator_head.dense.weight"
                num_missing[part] = num_missing.get(part, 0) + parameter.numel()
    for part, count in num_missing.items():
        notes.append(f"{part}: not in {where}; its {count:,} parameters start with random values")
    return notes


def weights_sha256(state: State) -> str:
    """Return a SHA-256 in hexadecimal over the sorted names, the shapes and the fp32 values of weights."""
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _assign_values(towers: ElectraTowers, large: State, small: State) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return (parameter name in `towers` -> value, log lines) from the state dicts of both towers.

    There is a line if the towers share one set of embeddings, and those of the two state dicts differ.
    """
    values = {name: value for name, value in small.items() if not name.startswith(_EMBEDDINGS)}
    values |= {name: value for name, value in large.items() if not name.startswith(_EMBEDDINGS)}
    large_embeddings = {name: value for name, value in large.items() if name.startswith(_EMBEDDINGS)}
    small_embeddings = {name: value for name, value in small.items() if name.startswith(_EMBEDDINGS)}
    notes = []
    if hasattr(towers, "discriminator_embeddings"):
        values |= _assign_separate_embeddings(towers.is_difference, large_embeddings, small_embeddings)
    else:  # one set for both towers
        values |= large_embeddings or small_embeddings
        if large_embeddings and any(
            not torch.equal(value, large_embeddings[name]) for name, value in small_embeddings.items()
        ):
            notes.append("embeddings: those of the two folders differ; the discriminator's are used for both towers")
    return values, notes


def _assign_separate_embeddings(is_difference: bool, large: State, small: State) -> dict[str, torch.Tensor]:
    """Return the parameters of both towers' embeddings by name, from those that each tower reads.

    With `is_difference`, the discriminator's tables are stored as differences to the generator's.
    """
    if not is_difference:
        return {**small, **{f"discriminator_{name}": value for name, value in large.items()}}
    values = dict(small or large)
    for name, value in large.items():
        if "layer_norm" in name:  # not part of the sum of tables that the discriminator reads
            values[f"discriminator_{name}"] = value
        else:
            values[f"discriminator_{name}"] = value - values[name]
    return values


@patient
def with_generator_digest(config: Config, *, patience: Patience | None = None) -> Config:
    """Return the config with `objective.generator_sha256` set to the digest of the frozen generator's weights.

    Raises UserError if the config already sets it to another digest.
    """
    digest = weights_sha256(read_frozen_generator(config))
    objective = config.objective.model_copy(update={"generator_sha256": digest})
    return config.model_copy(update={"objective": objective})


def load_frozen_generator(objective: Objective, config: Config) -> None:
    """Load the weights that `read_frozen_generator` reads into an objective, if it has a frozen generator."""
    if isinstance(objective, CorruptingObjective) and objective.frozen_generator is not None:
        objective.frozen_generator.load_state_dict(read_frozen_generator(config))


def read_frozen_generator(config: Config) -> State:
    """Read the weights of a generator that is not trained, fp32 on the host, under the names of `FrozenGenerator`.

    Raises UserError if their shape differs from `model.generator`, or if `objective.generator_sha256` is set and their
    digest differs from it.
    """
    folder = model_folder(config.train.init_generator_from or "")
    if is_run_folder(folder):
        state = _large_tower_of_run(folder, config.model)
    elif (folder / "config.json").exists():
        state = read_tower(config.model, "generator", folder)
    else:
        raise UserError(
            f"{_GENERATOR_KEY} {folder}: neither a run (config.yaml) nor a Hugging Face folder (config.json); set it "
            f"to the folder of a run with objective.name: mlm, or of an ElectraForMaskedLM"
        )
    missing = FrozenGenerator(config.model).state_dict().keys() - state.keys()
    if missing:
        raise UserError(
            f"{_GENERATOR_KEY} {folder}: the weights lack {min(missing)}; name the folder of an ElectraForMaskedLM, "
            f"which has a head that predicts tokens"
        )
    state = cut_positions(state, config.model.max_positions)
    expected_digest = config.objective.generator_sha256
    digest = weights_sha256(state)
    if expected_digest is not None and digest != expected_digest:
        raise UserError(
            f"{_GENERATOR_KEY} {folder}: the sha256 of the weights is {digest}, but objective.generator_sha256 is "
            f"{expected_digest}; restore the folder's weights, or start another run with them"
        )
    return state


def check_generator_vocabulary(config: Config, vocabulary: Vocabulary) -> None:
    """Raise UserError if the frozen generator's folder has a vocab.txt with other tokens than the corpus."""
    check_vocabulary(_GENERATOR_KEY, model_folder(config.train.init_generator_from or ""), vocabulary)


def _large_tower_of_run(run_dir: Path, model: ModelConfig) -> State:
    """Read the only network of an `mlm` run from its newest good checkpoint, under the names of a generator."""
    run = load_run_weights(run_dir)
    objective_name = run.config.objective.name
    if objective_name != "mlm":
        raise UserError(
            f"{_GENERATOR_KEY} {run_dir}: is a run of objective.name {objective_name}; name a run of mlm, or export "
            f"this one (electra-dist export) and name its folder generator"
        )
    check_shape(str(run_dir), shape_of(run.config.model, "discriminator"), model, "generator")
    return submodules(standalone(run.weights, run.config.model, "discriminator"), _LARGE_TO_GENERATOR)

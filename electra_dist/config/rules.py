"""List what contradicts what in a config, what is almost certainly a mistake, and which keys have no effect.

All such rules are here, by the moment at which they are judged:

    always      `contradictions`: the config cannot be computed; judged whenever a `Config` is made
    new run     `check_new_run`: it can be computed but is almost certainly a mistake; a run that has begun with such a
                config goes on, and its folder can still be opened
    each start  `check_targets_are_separate`, `check_world_size`: what may change at a restart

What depends on the machine, such as a kernel that it lacks, is tried by the package that uses it.

Limits: this module must not import torch, because commands on a login node check a config without it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

from electra_dist.config.schedule import Schedule
from electra_dist.config.sections.all_sections import CACHE_DIR, AllSections
from electra_dist.config.sections.model import MODERN_KEYS, ModelConfig
from electra_dist.config.sections.objective import ObjectiveConfig
from electra_dist.config.sections.training import DataConfig, EngineConfig, OptimizerConfig, TrainConfig
from electra_dist.errors import UserError

# Folders in a run folder that hold something else than checkpoints (`run/folder.py`).
RUN_FOLDERS = (
    CACHE_DIR, "earlier", "export", "failures", "hangs", "heartbeats", "lease", "meeting", "slurm", "tensorboard",
    "wandb",
)  # fmt: skip
# Of more numbers of ranks than these, an error lists the first and the last ones.
_MOST_RANKS_SHOWN = 12
_FIRST_RANKS_SHOWN = 6
_LAST_RANKS_SHOWN = 3


def contradictions(config: AllSections) -> Iterator[tuple[str, str]]:
    """Yield each contradiction of a config as (section whose keys contradict each other, message).

    The name of the section is empty for a contradiction between keys of different sections.
    """
    within = {
        "model": _within_model(config.model),
        "objective": _within_objective(config.objective),
        "data": _within_data(config.data),
        "engine": _within_engine(config.engine),
        "": _between_sections(config),
    }
    for section, messages in within.items():
        for message in messages:
            yield section, message


def check_model(model: ModelConfig) -> None:
    """Raise ValueError if a section `model` contradicts itself, for a model that has no whole config."""
    for message in _within_model(model):
        raise ValueError(message)


def _within_model(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each contradiction within the section `model`."""
    if model.architecture == "modern":
        # Hugging Face's ModernBERT has no projection between embeddings and layers.
        if model.embedding_size != model.discriminator.hidden_size:
            yield (
                f"architecture `modern` needs embedding_size {model.embedding_size} to equal "
                f"discriminator.hidden_size {model.discriminator.hidden_size}; set model.embedding_size: "
                f"{model.discriminator.hidden_size}"
            )
        for tower in (model.discriminator, model.generator):
            head_width = tower.hidden_size // tower.num_heads
            if head_width % 2:  # rotary positions rotate pairs of features
                yield (
                    f"architecture `modern` needs heads of an even width, but hidden_size {tower.hidden_size} with "
                    f"num_heads {tower.num_heads} gives {head_width}; change num_heads or hidden_size"
                )
    if model.sharing == "all" and model.generator != model.discriminator:
        yield (
            "sharing `all` needs two towers of the same shape; set model.generator to the values of "
            "model.discriminator, or set model.sharing: embeddings"
        )
    if model.generator_dropout is not None and model.sharing == "all":
        yield (
            "generator_dropout does not go with sharing `all`, where the generator's layers are the discriminator's; "
            "remove model.generator_dropout, or set model.sharing: embeddings"
        )
    if model.generator_embedding_size and model.sharing != "none":
        yield (
            f"generator_embedding_size needs sharing `none`, but sharing is `{model.sharing}`; set "
            "model.sharing: none, or leave generator_embedding_size out"
        )


def _within_objective(objective: ObjectiveConfig) -> Iterator[str]:
    """Yield a line for each contradiction within the section `objective`."""
    name = objective.name
    generator = objective.generator
    facts = objective.facts
    if generator != "trained" and not facts.generator_can_be_fixed:
        yield (
            f"generator `{generator}` does not go with objective `{name}`; set objective.generator: trained, or "
            f"choose another objective.name"
        )
    if objective.generator_sha256 is not None and generator != "frozen":
        yield (
            f"generator_sha256 needs generator `frozen`, but generator is `{generator}`; remove "
            f"objective.generator_sha256, or set objective.generator: frozen"
        )
    if objective.generator_only_steps and (name, generator) != ("rtd", "trained"):
        yield (
            "generator_only_steps needs objective `rtd` and a trained generator; set objective.name: rtd and "
            "objective.generator: trained, or set generator_only_steps: 0"
        )
    takes_joint_mlm = facts.takes_joint_mlm and not objective.generator_only_steps
    if objective.discriminator_mlm_weight and not takes_joint_mlm:
        yield (
            "discriminator_mlm_weight needs objective `rtd` or `rtd_masked_only` and no generator_only_steps; set "
            "objective.discriminator_mlm_weight: 0, or choose another objective.name"
        )
    if objective.rtd_balance is not None and name != "rtd":
        yield f"rtd_balance needs objective `rtd`, not `{name}`; remove objective.rtd_balance"
    if facts.generator_estimates_reward and objective.disallow_correct:
        yield (
            "disallow_correct: true does not go with objective `adversarial`, which may sample the true token; set "
            "objective.disallow_correct: false"
        )
    has_fixed_probabilities = generator in ("uniform", "unigram")
    if has_fixed_probabilities and isinstance(objective.temperature, Schedule):
        yield (
            f"temperature cannot be a schedule with generator `{generator}`, whose probabilities are fixed; set "
            f"objective.temperature to a number, or objective.generator: trained"
        )
    if objective.draws_at_random and (has_fixed_probabilities or not facts.generator_can_be_fixed):
        yield (
            f"random_share does not go with objective `{name}` and generator `{generator}`, because it takes the "
            f"place of some of a trained generator's samples; remove objective.random_share, or set "
            f"objective.name: rtd and objective.generator: trained"
        )


def _within_data(data: DataConfig) -> Iterator[str]:
    """Yield a line for each contradiction within the section `data`."""
    for earlier, later in itertools.pairwise(data.phases):
        if later.from_step <= earlier.from_step:
            yield (
                f"data.phases: from_step {later.from_step} of {later.corpus} does not come after from_step "
                f"{earlier.from_step} of {earlier.corpus}; list the phases in ascending order of from_step"
            )
    corpora = [corpus.url for corpus in data.training_corpora()]
    for index, corpus in enumerate(corpora):
        if corpus in corpora[:index]:
            yield f"data.corpus and data.phases name the corpus {corpus} more than once; name each corpus only once"


def _within_engine(engine: EngineConfig) -> Iterator[str]:
    """Yield a line for each contradiction within the section `engine`."""
    if engine.overlap_communication and engine.zero_stage != 1:
        yield (
            f"overlap_communication works at zero_stage 1, not at {engine.zero_stage}; set "
            f"engine.overlap_communication: false or engine.zero_stage: 1"
        )
    if engine.overlap_communication and engine.offload_optimizer:
        yield "overlap_communication does not work with offload_optimizer: true; set one of them to false"
    if engine.compile and engine.zero_stage == 3:
        yield (
            "compile needs whole parameters, which zero_stage 3 splits; set engine.compile: false or a lower "
            "engine.zero_stage"
        )


def _between_sections(config: AllSections) -> Iterator[str]:
    """Yield a line for each contradiction between keys of different sections."""
    model, data, train, engine = config.model, config.data, config.train, config.engine
    if data.seq_len > model.max_positions:
        yield (
            f"data.seq_len {data.seq_len} exceeds model.max_positions {model.max_positions}; lower data.seq_len or "
            f"raise model.max_positions"
        )
    if train.global_batch % train.micro_batch:
        yield (
            f"train.micro_batch {train.micro_batch} does not divide train.global_batch {train.global_batch}; change "
            f"one of them"
        )
    yield from _attention(config)
    if engine.attention in ("flash", "flash3") and train.precision == "fp32":
        yield (
            f"engine.attention: {engine.attention} computes in bf16 or fp16 only, but train.precision is fp32; set "
            f"train.precision: bf16 or engine.attention: auto"
        )
    yield from _sharing(model, config.objective)
    yield from _optimizer(config.optimizer, engine.zero_stage)
    has_own_layers = config.objective.trains_generator and model.sharing != "all"
    if config.optimizer.generator is not None and not has_own_layers:
        yield (
            "optimizer.generator needs a generator that is trained and has layers of its own; remove "
            "optimizer.generator, or set objective.generator: trained, another objective.name than mlm, and another "
            "model.sharing than all"
        )
    if engine.overlap_communication and train.precision != "bf16":
        yield (
            f"engine.overlap_communication: true needs train.precision: bf16, not {train.precision}; set "
            f"engine.overlap_communication: false"
        )
    if config.checkpoint.keep_best and not data.heldout:
        yield (
            f"checkpoint.keep_best is {config.checkpoint.keep_best}, but without data.heldout no checkpoint is "
            f"evaluated and none is the best; set data.heldout to a held-out corpus, or checkpoint.keep_best: 0"
        )
    has_frozen_generator = config.objective.generator == "frozen"
    if has_frozen_generator and not train.init_generator_from:
        yield (
            "objective.generator: frozen needs train.init_generator_from; set it to the folder of a run with "
            "objective.name: mlm, or of a Hugging Face ElectraForMaskedLM"
        )
    if train.init_generator_from and not train.init_from and not has_frozen_generator:
        yield (
            "train: init_generator_from needs init_from; set train.init_from to the folder of the discriminator, or "
            "objective.generator: frozen"
        )


def _attention(config: AllSections) -> Iterator[str]:
    """Yield a line for each contradiction between attention and the architecture, the objective or the rows."""
    model, engine = config.model, config.engine
    is_one_way = config.objective.facts.has_cloze_generator
    if engine.attention in ("flash3", "flex") and (model.largest_attention_dropout or is_one_way):
        yield (
            f"engine.attention: {engine.attention} supports neither attention dropout nor the one-directional "
            f"attention of objective electric; set model.attention_dropout: 0, no model.generator_dropout and another "
            f"objective.name, or set engine.attention: auto"
        )
    if engine.attention == "flash" and is_one_way:
        yield (
            "engine.attention: flash does not support the one-directional attention of objective electric; set "
            "engine.attention: auto or another objective.name"
        )
    if model.architecture == "bert":
        if model.type_vocab_size < 2:
            yield (
                f"model.type_vocab_size is {model.type_vocab_size}, but the rows of a corpus have examples of two "
                f"segments, whose tokens are of two types; set model.type_vocab_size: 2"
            )
        return
    if is_one_way:
        yield (
            "objective.name: electric needs attention in one direction, which model.architecture: modern does not "
            "have; set model.architecture: bert or another objective.name"
        )
    if engine.compile and (model.hidden_dropout or model.generator_dropout):
        yield (
            "engine.compile: true with model.architecture: modern needs model.hidden_dropout: 0; set "
            "model.hidden_dropout: 0 and remove model.generator_dropout, or set engine.compile: false"
        )


def _sharing(model: ModelConfig, objective: ObjectiveConfig) -> Iterator[str]:
    """Yield a line for each contradiction between the objective and the towers' shapes or shared weights."""
    if objective.generator_only_steps:
        has_same_layers = model.generator == model.discriminator
        if not has_same_layers or model.generator_embedding_width != model.embedding_size:
            yield (
                "objective.generator_only_steps: the discriminator starts as a copy of the generator, so they must be "
                "of one size; set model.generator to the sizes of model.discriminator and remove "
                "model.generator_embedding_size"
            )
        if model.sharing != "none":
            yield (
                f"objective.generator_only_steps: a frozen generator cannot share parameters with the discriminator, "
                f"but model.sharing is {model.sharing}; set model.sharing: none"
            )
    if objective.generator == "frozen" and model.sharing not in ("embeddings", "none"):
        yield (
            f"model.sharing is {model.sharing}, but a frozen generator has tables and layers of its own; remove "
            f"model.sharing, or set it to none"
        )
    if not objective.runs_generator and model.sharing != "embeddings":
        yield (
            f"model.sharing is {model.sharing}, but objective.name {objective.name} with objective.generator "
            f"{objective.generator} has one tower only; remove model.sharing from the config"
        )
    if objective.facts.has_cloze_generator and model.sharing == "all":
        yield (
            "model.sharing is all, but the generator of objective.name electric is two causal towers, which cannot be "
            "the discriminator; set model.sharing: embeddings"
        )


def _optimizer(optimizer: OptimizerConfig, zero_stage: int) -> Iterator[str]:
    """Yield a line for each contradiction between the optimizer and its implementation or the ZeRO stage."""
    facts = optimizer.facts
    if facts.needs_whole_parameters and zero_stage > 0:
        yield (
            f"optimizer.name {optimizer.name} needs whole parameters, but engine.zero_stage is {zero_stage}; "
            f"set engine.zero_stage: 0 (at ELECTRA-Large's size all state takes 5.7 GB per GPU)"
        )
    if optimizer.implementation not in ("auto", *facts.implementations):
        noun = "implementation" if len(facts.implementations) == 1 else "implementations"
        yield (
            f"optimizer.implementation {optimizer.implementation} is not available for optimizer.name "
            f"{optimizer.name}, which has the {noun} {' and '.join(facts.implementations)}; set "
            f"optimizer.implementation: auto"
        )


def check_new_run(config: AllSections) -> None:
    """Raise UserError for settings that are almost certainly a mistake, such as a warm-up longer than the run."""
    check_targets_are_separate(config)
    for use, place in _corpus_places(config):
        if place == _place(config.run_dir):
            raise UserError(
                f"run_dir: {config.run_dir} is the folder of {use}, of which a run would replace files such as "
                f"tokenizer.json; set run_dir to a folder of its own"
            )
    objective, optimizer, num_steps = config.objective, config.optimizer, config.train.num_steps
    if objective.facts.gives_energies and (objective.temperature != 1 or objective.disallow_correct):
        raise UserError(
            "objective.name: electric learns log-probabilities only if its noise is drawn from the noise model's own "
            "distribution; set objective.temperature: 1 and objective.disallow_correct: false"
        )
    if optimizer.name == "lamb" and not (optimizer.weight_decay and optimizer.for_generator.weight_decay):
        raise UserError(
            "optimizer.name: lamb scales the updates of decayed parameters only; with a weight_decay of 0 all steps "
            "are Adam's; set optimizer.weight_decay, and that of optimizer.generator, to 1e-6 or more"
        )
    warmups = {"optimizer.warmup_steps": optimizer.warmup_steps}
    if optimizer.generator is not None and optimizer.generator.warmup_steps is not None:
        warmups["optimizer.generator.warmup_steps"] = optimizer.generator.warmup_steps
    num_decay_steps = optimizer.trapezoid_decay_steps(num_steps)
    for key, warmup_steps in warmups.items():
        if warmup_steps > num_steps:
            raise UserError(
                f"{key} {warmup_steps:,} is longer than the run, train.num_steps {num_steps:,}, so the learning rate "
                f"would never reach its peak; set {key} to at most {num_steps}, or raise train.num_steps"
            )
        if optimizer.shape == "trapezoid" and warmup_steps + num_decay_steps > num_steps:
            raise UserError(
                f"{key} {warmup_steps:,} and the {num_decay_steps:,} steps of decay are longer than the run, "
                f"train.num_steps {num_steps:,}; lower {key} or optimizer.decay_steps, or raise train.num_steps"
            )
    for phase in config.data.phases:
        if phase.from_step >= num_steps:
            raise UserError(
                f"data.phases: from_step of {phase.corpus} is {phase.from_step:,}, which the run does not reach, "
                f"because train.num_steps is {num_steps:,}; lower from_step, raise train.num_steps, or remove this "
                f"entry"
            )
    if config.engine.offload_optimizer and config.engine.zero_stage == 0:
        raise UserError(
            "engine.offload_optimizer: true needs engine.zero_stage 1, 2 or 3, because DeepSpeed ignores it at stage "
            "0; set engine.zero_stage: 1 or engine.offload_optimizer: false"
        )


def check_world_size(train: TrainConfig, world_size: int) -> None:
    """Raise UserError unless `world_size` ranks can share the rows of the global batch evenly."""
    if train.fitting_micro_batch(world_size) > 0:
        return
    possible_ranks = [str(num_ranks) for num_ranks in train.possible_ranks()]
    if len(possible_ranks) > _MOST_RANKS_SHOWN:
        possible_ranks = [*possible_ranks[:_FIRST_RANKS_SHOWN], "...", *possible_ranks[-_LAST_RANKS_SHOWN:]]
    raise UserError(
        f"train.global_batch {train.global_batch} is not a multiple of the {world_size} ranks; use "
        f"{', '.join(possible_ranks)} ranks, or change train.global_batch"
    )


def check_targets_are_separate(config: AllSections) -> None:
    """Raise UserError if two places for checkpoints overlap, or if one of them holds other files of the run.

    Call it at every start, because `checkpoint.targets` may change at a restart. Each start of the run reserves its
    number in every place; in a place that is named twice, the second reservation would always fail.
    """
    targets = [(url, _place(url, config.checkpoint.endpoint_url)) for url in config.checkpoint_urls]
    for (url, place), (other_url, other_place) in itertools.combinations(targets, 2):
        if place == other_place:
            raise UserError(
                f"checkpoint.targets: {url} and {other_url} are the same place; name each place once, because every "
                f"checkpoint is written to each of them"
            )
    for (inner, inner_place), (outer, outer_place) in itertools.permutations(targets, 2):
        if _is_within(inner_place, outer_place):
            raise UserError(
                f"checkpoint.targets: {inner} lies in {outer}; name places of which none lies in another one"
            )
    for url, place in targets:
        for use, used_place, covers_all in _used_places(config):
            if place == used_place or (covers_all and _is_within(place, used_place)):
                raise UserError(
                    f"checkpoint.targets: {url} is used as {use}; set checkpoint.targets to places that hold nothing "
                    f"but checkpoints"
                )


def _is_within(place: tuple[str, ...], folder: tuple[str, ...]) -> bool:
    """Return whether `place` is `folder` or lies in it; both are split into parts by `_place`."""
    return place[: len(folder)] == folder


def _used_places(config: AllSections) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the places that hold other files of the run, as (name for messages, parts of the path, covers content).

    The third element says whether every place within it counts as used, too.
    """
    yield "run_dir", _place(config.run_dir), False
    for name in RUN_FOLDERS:
        yield f"the folder {name}/ of the run", _place(str(Path(config.run_dir) / name)), True
    if config.data.cache_dir is not None:
        yield "data.cache_dir", _place(config.data.cache_dir), False
    for key, place in _corpus_places(config):
        yield key, place, False


def _corpus_places(config: AllSections) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (key, parts of the path) of each corpus that the run reads."""
    for corpus in config.data.training_corpora():
        yield corpus.key, _place(corpus.url, config.data.endpoint_url)
    if config.data.heldout is not None:
        yield "data.heldout", _place(config.data.heldout, config.data.endpoint_url)


def _place(url: str, endpoint_url: str | None = None) -> tuple[str, ...]:
    """Split a path or a URL into parts, which are equal for all spellings of one place; links are followed."""
    scheme, separator, place = url.partition("://")
    if separator and scheme != "file":
        return (scheme, (endpoint_url or "").rstrip("/"), *(part for part in place.split("/") if part))
    try:
        path = Path(url.removeprefix("file://")).expanduser()
    except RuntimeError:
        path = Path(url)  # of a user who does not exist; opening the store refuses it
    return Path(os.path.realpath(path)).parts


def keys_without_effect(config: AllSections) -> dict[str, str]:
    """Return the keys that differ from their defaults but do nothing in this run, as dotted key -> reason."""
    changed = {}
    for key, reason in _unused_keys(config):
        section_name, field_name = key.split(".")
        section = getattr(config, section_name)
        if getattr(section, field_name) != type(section).model_fields[field_name].default:
            changed[key] = reason
    return changed


def _unused_keys(config: AllSections) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, reason) for each key that does nothing in this run, whatever its value."""
    objective = config.objective
    facts = objective.facts
    name = objective.name
    generator = objective.generator
    if not facts.has_generator:
        yield "objective.temperature", f"objective.name: {name} has no generator"
        yield "objective.disallow_correct", f"objective.name: {name} has no generator"
    if facts.predicts_tokens:
        yield "objective.rtd_weight", f"objective.name: {name} does not detect replaced tokens"
    if not (facts.predicts_tokens and facts.has_generator):
        yield "objective.token_weight", "only the objectives replace_mlm and all_tokens_mlm use it"
    if facts.has_cloze_generator:
        yield "objective.mask_token_prob", f"the noise model of objective.name: {name} reads no [MASK]"
    if generator != "trained":
        yield "objective.mlm_weight", f"objective.generator: {generator} is not trained"
    if generator in ("uniform", "unigram"):
        yield "objective.mask_token_prob", f"objective.generator: {generator} reads no text"
    if generator == "uniform":
        yield "objective.temperature", "objective.generator: uniform draws every token equally often"
    if config.model.architecture == "modern":
        yield "model.type_vocab_size", "model.architecture: modern has no token types"
    else:
        for key in MODERN_KEYS:
            yield f"model.{key}", "only model.architecture: modern uses it"
    if not objective.trains_generator:
        yield "model.generator_dropout", "no generator is trained"
    if not objective.draws_at_random:
        yield "objective.random_from", "objective.random_share is 0"
    if config.optimizer.shape == "polynomial":
        yield "optimizer.decay_steps", "only optimizer.shape: trapezoid uses it"
    if config.data.heldout is None:
        yield "log.eval_every_steps", "data.heldout is not set"
        yield "log.eval_rows", "data.heldout is not set"
    elif not _evaluates_saved_steps(config):
        advice = "set log.eval_every_steps to a divisor of checkpoint.every_steps"
        yield "checkpoint.keep_best", f"no save but the last is sure to meet an evaluation; {advice}"


def _evaluates_saved_steps(config: AllSections) -> bool:
    """Return whether an evaluation comes at a step, other than the last one, at which a checkpoint is due."""
    checkpoint, num_steps = config.checkpoint, config.train.num_steps
    evaluated = config.log.eval_every_steps
    if not evaluated:
        return False
    saved = [
        every for every in (checkpoint.every_steps, checkpoint.keep_every_steps) if isinstance(every, int) and every
    ]
    if any(math.lcm(evaluated, every) < num_steps for every in saved):
        return True
    return any(step % evaluated == 0 and step < num_steps for step in checkpoint.keep_steps)

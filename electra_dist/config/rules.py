"""Check a config before its run begins: refuse contradictions, and report keys that have no effect.

The classes of the config sections refuse configs that cannot be computed at all. This module refuses configs that can
be computed but are almost certainly a mistake, and it refuses them for new runs only: a run that has begun with such a
config goes on, and its folder can still be opened.

Limits: this module must not import torch, because commands on a login node check a config without it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from electra_dist.config.config import CACHE_DIR, MODERN_KEYS, Config
from electra_dist.errors import UserError

# Folders in a run folder that hold something else than checkpoints (`run/folder.py`).
RUN_FOLDERS = (
    CACHE_DIR,
    "earlier",
    "export",
    "hangs",
    "heartbeats",
    "lease",
    "meeting",
    "slurm",
    "tensorboard",
    "wandb",
)


def check_new_run(config: Config) -> None:
    """Raise UserError for valid settings that are almost certainly a mistake, such as a warm-up longer than the run.
    Call it for new runs only: a run that has begun with such settings may go on.
    """
    check_targets_are_separate(config)
    num_steps = config.train.num_steps
    warmups = {"optimizer.warmup_steps": config.optimizer.warmup_steps}
    if config.optimizer.generator is not None and config.optimizer.generator.warmup_steps is not None:
        warmups["optimizer.generator.warmup_steps"] = config.optimizer.generator.warmup_steps
    for key, warmup_steps in warmups.items():
        if warmup_steps > num_steps:
            raise UserError(
                f"{key} {warmup_steps:,} is longer than the run, train.num_steps {num_steps:,}, so the learning rate "
                f"would never reach its peak; set {key} to at most {num_steps}, or raise train.num_steps"
            )
        num_decay_steps = config.optimizer.trapezoid_decay_steps(num_steps)
        if config.optimizer.shape == "trapezoid" and warmup_steps + num_decay_steps > num_steps:
            raise UserError(
                f"{key} {warmup_steps:,} and the {num_decay_steps:,} steps of decay are longer than the run, "
                f"train.num_steps {num_steps:,}; lower {key} or optimizer.decay_steps, or raise train.num_steps"
            )
    for phase in config.data.phases:
        if phase.from_step >= num_steps:
            raise UserError(
                f"data.phases: from_step of {phase.corpus} is {phase.from_step:,}, which the run does not "
                f"reach, because train.num_steps is {num_steps:,}; lower from_step, raise train.num_steps, or remove "
                f"this entry"
            )
    if config.engine.offload_optimizer and config.engine.zero_stage == 0:
        raise UserError(
            "engine.offload_optimizer: true needs engine.zero_stage 1, 2 or 3, because DeepSpeed ignores it at stage "
            "0; set engine.zero_stage: 1 or engine.offload_optimizer: false"
        )


def check_targets_are_separate(config: Config) -> None:
    """Raise UserError if two checkpoint targets overlap, or if a target holds other files of the run.
    Links are followed. Each start of the run reserves its number in every target; in a place that is named twice, the
    second reservation would always fail. Call it at every start, because targets may change at a restart.
    """
    targets = [(url, _place(url, config.checkpoint.endpoint_url)) for url in config.checkpoint_urls]
    for (url, place), (other_url, other_place) in itertools.combinations(targets, 2):
        if place == other_place:
            raise UserError(
                f"checkpoint.targets: {url} and {other_url} are the same place; name each place once, because every "
                f"checkpoint is written to each of them"
            )
        depth = min(len(place), len(other_place))
        if place[:depth] == other_place[:depth]:
            inner, outer = (url, other_url) if len(place) > depth else (other_url, url)
            raise UserError(
                f"checkpoint.targets: {inner} lies in {outer}; name places of which none lies in another one"
            )
    for url, place in targets:
        for use, used_place, covers_all in _used_places(config):
            if place == used_place or (covers_all and place[: len(used_place)] == used_place):
                raise UserError(
                    f"checkpoint.targets: {url} is used as {use}; set checkpoint.targets to places that hold nothing "
                    f"but checkpoints"
                )


def _used_places(config: Config) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the other places that the run uses: (name, parts of the path, whether everything inside is used, too)."""
    yield "run_dir", _place(config.run_dir), False
    for name in RUN_FOLDERS:
        yield f"the folder {name}/ of the run", _place(str(Path(config.run_dir) / name)), True
    if config.data.cache_dir is not None:
        yield "data.cache_dir", _place(config.data.cache_dir), False
    for corpus in config.data.training_corpora():
        yield corpus.key, _place(corpus.url, config.data.endpoint_url), False
    if config.data.heldout is not None:
        yield "data.heldout", _place(config.data.heldout, config.data.endpoint_url), False


def _place(url: str, endpoint_url: str | None = None) -> tuple[str, ...]:
    """Split a path or s3:// URL into parts. All spellings of one place give equal parts; links are followed."""
    if url.startswith("s3://"):
        parts = [part for part in url.removeprefix("s3://").split("/") if part]
        return ("s3", (endpoint_url or "").rstrip("/"), *parts)
    try:
        path = Path(url.removeprefix("file://")).expanduser()
    except RuntimeError:
        path = Path(url)  # of a user who does not exist; opening the store refuses it
    return Path(os.path.realpath(path)).parts


def keys_without_effect(config: Config) -> dict[str, str]:
    """Return the keys that differ from their defaults but do nothing in this run, as dotted key -> reason.
    Examples are keys that only another objective, generator or architecture reads, and keys for evaluations in a
    run without `data.heldout`.
    """
    unused = _unused_by_objective(config) | _unused_by_generator(config) | _unused_by_architecture(config)
    if not config.objective.draws_at_random:
        unused["objective.random_from"] = "objective.random_share is 0"
    if config.optimizer.shape == "polynomial":
        unused["optimizer.decay_steps"] = "only optimizer.shape: trapezoid uses it"
    if config.data.heldout is None:
        unused |= dict.fromkeys(("log.eval_every_steps", "log.eval_rows"), "data.heldout is not set")
    return {key: reason for key, reason in unused.items() if _is_changed(config, key)}


def _unused_by_objective(config: Config) -> dict[str, str]:
    name = config.objective.name
    facts = config.objective.facts
    unused: dict[str, str] = {}
    if not facts.has_generator:
        reason = f"objective.name: {name} has no generator"
        unused |= dict.fromkeys(("objective.temperature", "objective.disallow_correct"), reason)
    if facts.predicts_tokens:
        unused["objective.rtd_weight"] = f"objective.name: {name} does not detect replaced tokens"
    if not (facts.predicts_tokens and facts.has_generator):
        unused["objective.token_weight"] = "only the objectives replace_mlm and all_tokens_mlm use it"
    if facts.has_cloze_generator:
        unused["objective.mask_token_prob"] = f"the noise model of objective.name: {name} reads no [MASK]"
    return unused


def _unused_by_generator(config: Config) -> dict[str, str]:
    generator = config.objective.generator
    if generator == "trained":
        return {}
    unused = {"objective.mlm_weight": f"objective.generator: {generator} is not trained"}
    if generator == "frozen":
        return unused
    unused["objective.mask_token_prob"] = f"objective.generator: {generator} reads no text"
    if generator == "uniform":
        unused["objective.temperature"] = "objective.generator: uniform draws every token equally often"
    return unused


def _unused_by_architecture(config: Config) -> dict[str, str]:
    if config.model.architecture == "modern":
        return {"model.type_vocab_size": "model.architecture: modern has no token types"}
    return dict.fromkeys([f"model.{key}" for key in MODERN_KEYS], "only model.architecture: modern uses it")


def _is_changed(config: Config, key: str) -> bool:
    section_name, field_name = key.split(".")
    section = getattr(config, section_name)
    default = type(section).model_fields[field_name].default
    return bool(getattr(section, field_name) != default)

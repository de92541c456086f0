"""List the values that the campaign draws for the keys of a run's config, and the keys that it leaves alone.

`DRAWS` has one entry for each key that is drawn. The values are small or extreme on purpose: what contradicts another
key is refused by the config check, which costs a millisecond, and drawn again. `NOT_DRAWN` names every other key, or
its whole section, with the reason.

Paths begin with a word that `placed` replaces: DATA is the folder of the corpora, CASE that of the case, and SIDE that
of one of its two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from support.real_runs import SEQ_LEN, tiny_tree

from electra_dist.config import Config, Section
from electra_dist.config.sections.training import OPTIMIZERS

Draw = Callable[[Random, int], Any]  # the second argument is train.num_steps

FIRST_STEPS, LAST_STEPS = 8, 20  # limits of train.num_steps
GENERATOR_SOURCE = "CASE/generator"  # run folders that are made before the case begins, if its config names them
INITIAL_SOURCE = "CASE/source"
TWO_TARGETS = ["SIDE/first", "SIDE/second"]
_RARE_PROBABILITY = 0.08  # of a value that is far off what anybody sets
_OFTEN_DRAWN = (
    "model.architecture",
    "model.sharing",
    "objective.name",
    "objective.generator",
    "train.precision",
    "optimizer.name",
    "engine.zero_stage",
)
_OFTEN_PROBABILITY = 0.5  # of each of these keys
_FITTING_PROBABILITY = 0.8
_CHANGE_PROBABILITY = 0.2  # of each key, for a value that may differ from the base config's


def one_of(*values: Any, rarely: Sequence[Any] = ()) -> Draw:
    """Draw one of some values, each equally often, or with a low probability one of those of `rarely`."""
    return lambda random, num_steps: _choose(random, values, rarely)


def up_to(first: int, last: int, rarely: Sequence[int] = ()) -> Draw:
    """Draw an integer from `first` to `last`, or with a low probability one of those of `rarely`."""
    return one_of(*range(first, last + 1), rarely=rarely)


def _choose(random: Random, values: Sequence[Any], rarely: Sequence[Any]) -> Any:
    """Draw one of some values or, with a low probability, one of those of `rarely`."""
    return random.choice(rarely if rarely and random.random() < _RARE_PROBABILITY else values)


def up_to_the_end(first: int) -> Draw:
    """Draw an integer from `first` to train.num_steps."""
    return lambda random, num_steps: random.randint(first, num_steps)


def maybe(draw: Draw) -> Draw:
    """Draw None every third time, otherwise what `draw` draws."""
    return lambda random, num_steps: None if random.random() < 1 / 3 else draw(random, num_steps)


def number_or_schedule(*values: float, rarely: Sequence[float] = ()) -> Draw:
    """Draw one of some numbers, or a schedule of any shape between two of them; those of `rarely` seldom."""

    def draw(random: Random, num_steps: int) -> Any:
        if random.random() < 0.4:
            return _choose(random, values, rarely)
        shape = random.choice(["exponential", "linear", "cosine", "step"])
        length = "tau" if shape == "exponential" else "over"
        ends = {end: _choose(random, values, rarely) for end in ("from", "to")}
        return {**ends, "shape": shape, length: random.choice([0.1, 0.4, 0.7, 1.0])}

    return draw


def some_steps(most: int, first: int) -> Draw:
    """Draw a list of up to `most` steps from `first` to the last one, ascending."""

    def draw(random: Random, num_steps: int) -> list[int]:
        return sorted(random.sample(range(first, num_steps), random.randint(0, most)))

    return draw


def _phases(random: Random, num_steps: int) -> list[dict[str, Any]]:
    """Draw one or two further corpora and the steps from which they are read."""
    corpora = random.sample(["DATA/second", "DATA/third"], random.randint(1, 2))
    steps = sorted(random.sample(range(1, num_steps), len(corpora)))
    return [{"corpus": corpus, "from_step": step} for corpus, step in zip(corpora, steps, strict=True)]


_TOWERS = (  # hidden_size, num_layers, num_heads, intermediate_size
    (32, 1, 2, 64),
    (32, 2, 4, 48),
    (16, 1, 1, 32),
    (24, 3, 2, 16),
)

# In the order in which they are drawn. The four keys of a tower are drawn together, so that they fit more often.
TOWER_KEYS = ("hidden_size", "num_layers", "num_heads", "intermediate_size")

DRAWS: dict[str, Draw] = {
    "seed": one_of(0, 1, 42, 2**31, 2**63 - 1),
    "model.architecture": one_of("bert", "modern"),
    "model.global_every": up_to(1, 4, rarely=[2**24, 2**53, 2**63]),
    "model.local_window": one_of(2, 3, 8, 128, rarely=[2**24, 2**53, 2**63]),
    "model.global_rope_theta": one_of(1.5, 10000.0, 160000.0, rarely=[1e300]),
    "model.local_rope_theta": one_of(1.5, 10000.0, 160000.0, rarely=[1e300]),
    "model.embedding_size": one_of(8, 24, 32),
    "model.max_positions": one_of(SEQ_LEN, SEQ_LEN + 1, 512, rarely=[5000]),
    "model.type_vocab_size": one_of(1, 2, 3, rarely=[5000]),
    "model.sharing": one_of("embeddings", "none", "gdes", "all"),
    "model.generator_embedding_size": maybe(one_of(8, 16, 32)),
    "model.hidden_dropout": one_of(0.0, 0.1, 0.5, 0.99),
    "model.attention_dropout": one_of(0.0, 0.1, 0.5, 0.99),
    "model.generator_dropout": maybe(one_of(0.0, 0.1, 0.5)),
    "model.layer_norm_eps": one_of(1e-12, 1e-5, 1.0, rarely=[1e-300, 1e30]),
    "model.initializer_range": one_of(0.002, 0.02, 0.2, rarely=[1e-30, 1e3]),
    "objective.name": one_of(
        "rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial"
    ),
    "objective.generator": one_of("trained", "frozen", "uniform", "unigram"),
    "objective.generator_only_steps": up_to_the_end(0),
    "objective.mask_prob": number_or_schedule(0.01, 0.15, 0.3, 0.6, 0.99, rarely=[1e-300, 1 - 1e-12]),
    "objective.mask_token_prob": one_of(0.0, 0.5, 1.0),
    "objective.masking": one_of("without_replacement", "reference"),
    "objective.mlm_weight": number_or_schedule(0.0, 0.5, 1.0, 3.0, rarely=[1e-300, 1e30]),
    "objective.rtd_weight": number_or_schedule(0.0, 1.0, 10.0, 50.0, rarely=[1e-300, 1e30]),
    "objective.rtd_balance": maybe(one_of(0.1, 0.5, 0.9, 1 - 1e-12)),
    "objective.token_weight": one_of(0.0, 0.5, 5.0, rarely=[1e-300, 1e30]),
    "objective.discriminator_mlm_weight": one_of(0.0, 0.5, 2.0, rarely=[1e-300, 1e30]),
    "objective.temperature": number_or_schedule(0.1, 0.5, 1.0, 4.0, 100.0, rarely=[1e-30, 1e30]),
    "objective.disallow_correct": one_of(True, False),
    "objective.random_share": number_or_schedule(0.0, 0.2, 1.0),
    "objective.random_from": one_of("uniform", "unigram"),
    "objective.loss_mean": one_of("global", "per_replica"),
    "data.heldout": one_of(None, "DATA/corpus/heldout"),
    "data.phases": _phases,
    "data.shuffle_window_shards": up_to(1, 6, rarely=[2**24, 2**53, 2**63]),
    "data.cache_dir": one_of(None, "SIDE/cache"),
    "data.cache_limit_gb": one_of(None, 1e-6, 1.0, rarely=[1e300]),
    "data.fetch_threads": one_of(1, 2, 8),
    "data.share_shards": one_of(None, True, False),
    "train.global_batch": one_of(1, 2, 3, 4, 6, 8, 12),
    "train.micro_batch": one_of(1, 2, 3, 4, 6, "auto"),
    "train.precision": one_of("bf16", "fp32", "fp16"),
    "train.skip_steps": some_steps(5, first=0),
    "train.init_from": one_of(None, INITIAL_SOURCE),
    "optimizer.name": one_of(*OPTIMIZERS),
    "optimizer.lr": one_of(1e-5, 1e-3, 1e-2, 0.3, rarely=[1e-30, 1e30]),
    "optimizer.warmup_steps": up_to_the_end(0),
    "optimizer.shape": one_of("polynomial", "trapezoid"),
    "optimizer.decay_steps": maybe(up_to_the_end(1)),
    "optimizer.decay_power": one_of(0.0, 0.5, 1.0, 3.0, rarely=[1e30]),
    "optimizer.beta1": one_of(0.0, 0.5, 0.9, rarely=[1 - 1e-12]),
    "optimizer.beta2": one_of(0.0, 0.9, 0.999, rarely=[1 - 1e-12]),
    "optimizer.eps": one_of(1e-12, 1e-6, 1.0, rarely=[1e-300, 1e30]),
    "optimizer.weight_decay": one_of(0.0, 0.01, 1.0, rarely=[1e30]),
    "optimizer.clip_norm": one_of(1e-3, 0.1, 1.0, 1e6, rarely=[1e-30, 1e300]),
    "optimizer.implementation": one_of("auto", "foreach"),
    "optimizer.generator.lr": maybe(one_of(1e-4, 1e-2)),
    "optimizer.generator.warmup_steps": maybe(up_to_the_end(0)),
    "optimizer.generator.beta1": maybe(one_of(0.0, 0.8)),
    "optimizer.generator.beta2": maybe(one_of(0.0, 0.98)),
    "optimizer.generator.weight_decay": maybe(one_of(0.0, 0.1)),
    "optimizer.generator.clip_norm": maybe(one_of(0.01, 5.0)),
    "engine.zero_stage": one_of(0, 1, 2, 3),
    "engine.offload_optimizer": one_of(True, False),
    "engine.activation_checkpointing": one_of(True, False),
    "engine.attention": one_of("auto", "sdpa"),
    "engine.deterministic": one_of(True, False),
    "engine.overlap_communication": one_of(True, False),
    "guard.window": one_of(2, 3, 5, 128, rarely=[2**24, 2**53, 2**63]),
    "guard.spike_sigma": one_of(0.0, 2.0, 6.0, 50.0, rarely=[1e-300, 1e300]),
    "guard.max_in_a_row": up_to(1, 4, rarely=[2**24, 2**53, 2**63]),
    "guard.skip_before": one_of(0, 1, 2, 16, rarely=[2**24, 2**53, 2**63]),
    "guard.max_rollbacks": up_to(0, 5, rarely=[2**24, 2**53, 2**63]),
    "checkpoint.every_steps": one_of(1, 2, 3, 5, 1000, "auto", rarely=[2**24, 2**53, 2**63]),
    "checkpoint.targets": one_of([], ["SIDE/first"], TWO_TARGETS),
    "checkpoint.keep_last": up_to(1, 4, rarely=[2**24, 2**53, 2**63]),
    "checkpoint.keep_every_steps": up_to(0, 5, rarely=[2**24, 2**53, 2**63]),
    "checkpoint.keep_steps": some_steps(3, first=1),
    "checkpoint.keep_best": up_to(0, 2, rarely=[2**24, 2**53, 2**63]),
    "log.every_steps": one_of(1, 2, 7, rarely=[2**24, 2**53, 2**63]),
    "log.eval_every_steps": up_to(0, 5, rarely=[2**24, 2**53, 2**63]),
    "log.eval_rows": one_of(1, 3, 20, 512, rarely=[2**24, 2**53, 2**63]),
    "log.tensorboard": one_of(True, False),
    "log.text_samples": one_of(0, 1, 3, 100, rarely=[2**24, 2**53, 2**63]),
    "log.kwh_price": one_of(None, 0.25, rarely=[1e300]),
    "kernels.backend": one_of("auto", "reference"),
    "cluster.storage_patience_s": one_of(0.0, 1.0, 900.0, rarely=[1e9]),
}

NOT_DRAWN: dict[str, str] = {
    "run_dir": "each run has a folder of its own",
    "model.vocab_size": "must be that of the corpus",
    "model.discriminator": "its keys are drawn together",
    "model.generator": "its keys are drawn together",
    "objective.generator_sha256": "a run fills it in itself",
    "data.corpus": "always the same corpus; data.phases adds others",
    "data.seq_len": "must be that of the corpus",
    "data.endpoint_url": "needs an S3 service, which make faults and make kill-matrix have",
    "train.num_steps": "drawn first, because other draws depend on it",
    "train.largest_micro_batch": "internal; train.micro_batch: auto sets it",
    "train.init_generator_from": "set with objective.generator: frozen",
    "engine.compile": "compiles for a minute",
    "checkpoint.endpoint_url": "needs an S3 service, which make faults and make kill-matrix have",
    "log.wandb": "needs a package of others",
    "log.mlflow": "needs a package of others",
    "log.trackio": "needs a package of others",
    "log.report_every_minutes": "the page is written beside the training; the campaign writes none",
    "corpus": "training does not read it",
    "plan": "training does not read it",
    "cluster.hang_step_factor": "only the supervisor reads it",
    "cluster.hang_step_floor_s": "only the supervisor reads it",
    "cluster.hang_setup_s": "only the supervisor reads it",
    "cluster.hang_checkpoint_s": "only the supervisor reads it",
    "cluster.hang_eval_s": "only the supervisor reads it",
    "cluster.max_fruitless_restarts": "only the supervisor reads it",
    "cluster.strike_expires_h": "only submissions read it",
    "cluster.notify": "only the supervisor reads it",
}

BASE: dict[str, Any] = {
    "train.global_batch": 6,
    "train.micro_batch": 2,
    "model.embedding_size": 32,
    "model.discriminator": dict(zip(TOWER_KEYS, _TOWERS[0], strict=True)),
    "model.generator": dict(zip(TOWER_KEYS, _TOWERS[2], strict=True)),
    "optimizer.warmup_steps": 3,
    "checkpoint.every_steps": 3,
    "log.eval_rows": 5,
    "guard.spike_sigma": 50.0,
}


def draw_changes(random: Random) -> dict[str, Any]:
    """Draw a config: dotted key -> value for the keys that are drawn in this case, the number of steps among them."""
    num_steps = random.randint(FIRST_STEPS, LAST_STEPS)
    changes: dict[str, Any] = {"train.num_steps": num_steps}
    for tower in ("model.discriminator", "model.generator"):
        if random.random() < _CHANGE_PROBABILITY:
            changes[tower] = dict(zip(TOWER_KEYS, random.choice(_TOWERS), strict=True))
    if random.random() < _CHANGE_PROBABILITY:
        changes["model.generator"] = changes.get("model.discriminator", BASE["model.discriminator"])
    has_generator_optimizer = random.random() < _CHANGE_PROBABILITY
    for key, draw in DRAWS.items():
        is_possible = has_generator_optimizer or not key.startswith("optimizer.generator.")
        probability = _OFTEN_PROBABILITY if key in _OFTEN_DRAWN else _CHANGE_PROBABILITY
        if is_possible and random.random() < probability:
            changes[key] = draw(random, num_steps)
    # Most draws of these two values would be refused.
    if changes.get("model.sharing") == "all" and random.random() < _FITTING_PROBABILITY:
        changes["model.generator"] = changes.get("model.discriminator", BASE["model.discriminator"])
    optimizer = OPTIMIZERS[changes.get("optimizer.name", "adamw")]
    if optimizer.needs_whole_parameters and random.random() < _FITTING_PROBABILITY:
        changes["engine.zero_stage"] = 0
    if changes.get("objective.generator") == "frozen":
        changes["train.init_generator_from"] = GENERATOR_SOURCE
    return changes


def tree_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a case as a tree, with the words DATA, CASE and SIDE in its paths."""
    return tiny_tree(Path("SIDE/run"), "DATA/corpus", **{**BASE, **changes})


def placed(value: Any, places: dict[str, Path]) -> Any:
    """Return a value of a config with its paths, of which the first word names the place."""
    if isinstance(value, dict):
        return {key: placed(part, places) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [placed(part, places) for part in value]
    if isinstance(value, str):
        word, slash, rest = value.partition("/")
        return f"{places[word]}/{rest}" if slash and word in places else value
    return value


def config_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section of the config, with those of the sections within it."""
    for name, field in section.model_fields.items():
        parts = () if get_origin(field.annotation) is tuple else get_args(field.annotation)  # of `Section | None`
        kinds = [kind for kind in (field.annotation, *parts) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, Section)), None)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from config_keys(inner, f"{prefix}{name}.")


def is_left_alone(key: str) -> bool:
    """Return whether `NOT_DRAWN` names a key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in NOT_DRAWN)

"""Draw the cases of the campaign: a config, how its run is interrupted, and what changes at its restarts.

Case k of a seed is a function of the two numbers alone. A drawn config is used only if the config check accepts it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import yaml
from drills.campaign.draws import BASE, DRAWS, GENERATOR_SOURCE, INITIAL_SOURCE, TWO_TARGETS, draw_changes, tree_of
from pydantic import ValidationError

from electra_dist.config import Config
from electra_dist.config.rules import check_new_run
from electra_dist.errors import UserError

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_WIDTH = "model.embedding_size"
# Which heads a model has depends on these keys of the objective.
_KEYS_OF_HEADS = ("objective.name", "objective.generator_only_steps", "objective.discriminator_mlm_weight")
_MOST_RANKS = 3
_MOST_INTERRUPTIONS = 3
_MOST_CHANGES = 60  # A kill comes at one of so many changes of files after its step has begun.
_MOST_DELAY_S = 0.4
_MOST_SET_UP_S = 2.0
_FROM_SCRATCH_PROBABILITY = 0.05
_DAMAGE_PROBABILITY = 0.2
# Commands for the finished run; RUN is its folder and CONFIG its config file.
COMMANDS = (
    ("verify", "--bytes", "RUN"),
    ("checkpoint", "verify", "RUN"),
    ("status", "RUN"),
    ("report", "RUN"),
    ("export", "RUN"),
    ("plan", "CONFIG"),
)
TORN_METRICS, TORN_LEDGER = "half a line in metrics.jsonl", "half a line in ledger.jsonl"
FLIPPED, CUT, MISSING = "a flipped byte", "half a file", "a missing file"  # of the newest checkpoint
DAMAGES = (TORN_METRICS, TORN_LEDGER, FLIPPED, CUT, MISSING)
# Keys that may change at a restart.
EXCHANGED_KEYS = (
    "engine.zero_stage",
    "train.micro_batch",
    "engine.activation_checkpointing",
    "engine.overlap_communication",
    "engine.offload_optimizer",
    "engine.deterministic",
    "kernels.backend",
    "checkpoint.every_steps",
    "checkpoint.targets",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "log.every_steps",
    "log.eval_every_steps",
    "log.eval_rows",
    "log.text_samples",
    "log.tensorboard",
    "data.fetch_threads",
)


class Interruption(NamedTuple):
    """What ends a start of the run."""

    kind: str  # "kill at a change", "kill at a time", "stop file", "save file" (ends nothing), or a signal's name
    rank: int  # the rank that it hits
    step: int  # comes at the first step from this one on; -1: counted from the start of the process
    delay_s: float = 0.0  # of a kill at a time or a signal: how much later it comes
    change: int = 0  # of a kill at a change of a file: which one, from 1
    moment: str = ""  # of a kill at a change of a file: "before", "torn" or "after"

    @property
    def signal(self) -> signal.Signals:
        """Signal that the rank gets."""
        return signal.Signals[self.kind] if self.kind in SIGNALS else signal.SIGKILL

    def __str__(self) -> str:
        where = f"rank {self.rank} from step {self.step}" if self.step >= 0 else f"rank {self.rank} during the set-up"
        details = f" + {self.delay_s:.3f} s" if self.delay_s else ""
        details = f", {self.moment} change {self.change}" if self.kind == "kill at a change" else details
        return f"{self.kind}: {where}{details}"


class Leg(NamedTuple):
    """One start of the run."""

    ranks: int
    settings: dict[str, Any]  # dotted key -> value that differs from the case's config
    interruption: Interruption | None  # None: it runs to the end
    from_scratch: bool = False  # whether it begins the run again
    damage: str = ""  # what happens to a file after a kill, of `DAMAGES`; "": nothing

    def __str__(self) -> str:
        settings = "".join(f", {key}: {value}" for key, value in self.settings.items())
        scratch = ", from scratch" if self.from_scratch else ""
        damage = f", then {self.damage}" if self.damage else ""
        return f"{self.ranks} ranks{settings}{scratch}; {self.interruption or 'to the end'}{damage}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and its interruptions."""

    seed: int
    number: int
    changes: dict[str, Any]  # dotted key -> drawn value
    legs: tuple[Leg, ...]  # the starts in their order; the last one is not interrupted
    spikes: tuple[int, ...]  # steps that the guard takes for spikes
    command: tuple[str, ...]  # of `COMMANDS`
    num_refused: int  # configs that the config check has refused before it accepted this one

    def config(self) -> str:
        """Return the drawn keys as one line of YAML."""
        return yaml.safe_dump(self.changes, default_flow_style=True, width=10**6, sort_keys=False).strip()

    def interruptions(self) -> list[str]:
        """Return one line for each start of the run, and one for the spikes."""
        lines = [str(leg) for leg in self.legs]
        if self.spikes:
            lines.append(f"spikes at steps {list(self.spikes)}")
        return lines


def check(changes: dict[str, Any]) -> Config | None:
    """Return the config of a draw; None if the config check refuses it."""
    try:
        config = Config.model_validate(tree_of(changes))
        check_new_run(config)
    except (ValidationError, UserError):
        return None
    return config


def sources_of(drawn: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the runs whose weights a draw begins with, as place -> config: two steps of its model."""
    model = {key: value for key, value in drawn.items() if key.startswith("model.")}
    few_steps = {"train.num_steps": 2, "optimizer.warmup_steps": 0, "data.heldout": None}
    sources = {}
    if drawn.get("train.init_from"):
        objective = {key: drawn[key] for key in _KEYS_OF_HEADS if key in drawn}
        sources[INITIAL_SOURCE] = {**model, **objective, **few_steps}
    if drawn.get("train.init_generator_from"):
        width = drawn.get("model.generator_embedding_size") or drawn.get("model.embedding_size", BASE[_WIDTH])
        of_generator = {
            "objective.name": "mlm",
            "model.discriminator": drawn.get("model.generator", BASE["model.generator"]),
            "model.sharing": "embeddings",
            "model.generator_embedding_size": None,
            _WIDTH: width,
        }
        sources[GENERATOR_SOURCE] = {**model, **of_generator, **few_steps}
    return sources


def draw_case(seed: int, number: int) -> Case:
    """Draw a case."""
    random = Random(f"campaign {seed} {number}")
    num_refused = 0
    while True:
        changes = draw_changes(random)
        config = check(changes)
        if config is None:
            num_refused += 1
        elif all(check(source) for source in sources_of(changes).values()):  # no run has weights for some models
            break
    spikes = _draw_spikes(random, config)
    return Case(
        seed=seed,
        number=number,
        changes=changes,
        legs=_draw_legs(random, changes, config),
        spikes=spikes,
        command=random.choice(COMMANDS),
        num_refused=num_refused,
    )


def _draw_spikes(random: Random, config: Config) -> tuple[int, ...]:
    """Draw steps that the guard takes for spikes: none, a few alone, or so many in a row that the run goes back."""
    num_steps = config.train.num_steps
    way = random.choice(["none", "none", "alone", "in a row"])
    if way == "none":
        return ()
    if way == "alone":
        return tuple(sorted(random.sample(range(num_steps), random.randint(1, 2))))
    first = random.randrange(num_steps)
    return tuple(range(first, min(first + config.guard.max_in_a_row, num_steps)))


def _draw_legs(random: Random, changes: dict[str, Any], config: Config) -> tuple[Leg, ...]:
    """Draw the starts of the run; ranks and settings change at about every second restart."""
    possible_ranks = [n for n in range(1, _MOST_RANKS + 1) if config.train.global_batch % n == 0]
    ranks = random.choice(possible_ranks)
    settings: dict[str, Any] = {}
    num_interruptions = random.randint(1, _MOST_INTERRUPTIONS)
    steps = sorted(random.randint(-1, config.train.num_steps - 1) for _ in range(num_interruptions))
    legs = []
    for step in steps:
        from_scratch = random.random() < _FROM_SCRATCH_PROBABILITY
        damage = random.choice(DAMAGES) if random.random() < _DAMAGE_PROBABILITY else ""
        legs.append(Leg(ranks, settings, _draw_interruption(random, ranks, step), from_scratch, damage))
        if random.random() < 0.3:
            ranks = random.choice(possible_ranks)
        if random.random() < 0.4:
            key = random.choice(EXCHANGED_KEYS)
            exchanged = {**settings, key: DRAWS[key](random, config.train.num_steps)}
            if key == "checkpoint.targets":  # no target with checkpoints is left out
                has_targets = {**changes, **settings}.get(key)
                exchanged[key] = random.choice([TWO_TARGETS, TWO_TARGETS[::-1]]) if has_targets else []
            if check({**changes, **exchanged}) is not None:
                settings = exchanged
    return (*legs, Leg(ranks, settings, None))


def _draw_interruption(random: Random, ranks: int, step: int) -> Interruption:
    """Draw what ends a start of the run."""
    victim = random.randrange(ranks)
    kinds = ["kill at a change"] * 4 + ["kill at a time"] * 2
    if step >= 0 or ranks == 1:  # a rank that a signal ends during the set-up would leave others waiting for it
        kinds += [random.choice(SIGNALS)] * 3
    if step >= 0:
        kinds += ["stop file", "save file"]
    kind = random.choice(kinds)
    if kind == "kill at a change":
        moment = random.choice(["before", "torn", "after"])
        return Interruption(kind, victim, step, change=random.randint(1, _MOST_CHANGES), moment=moment)
    delay_s = random.uniform(0.0, _MOST_DELAY_S if step >= 0 else _MOST_SET_UP_S)
    if kind.endswith("file") or (kind in SIGNALS and step >= 0 and random.random() < 0.5):
        delay_s = 0.0
    return Interruption(kind, victim, step, delay_s)

"""Define the configuration of a run: one frozen pydantic tree, with its sections from `sections/`.

Guarantee: an unknown key, a value of the wrong type and a contradiction between keys (`rules.py`) are errors when the
config is loaded. A loaded config never changes.

How: `load.py` reads the tree from YAML, and `engine/engine.py` derives DeepSpeed's JSON from it. Each component
receives only the section that it needs. The field descriptions are the user's manual: `electra-dist config FILE
--describe` prints them, and the error for an invalid or missing key quotes the key's description.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from electra_dist.config.rules import contradictions
from electra_dist.config.sections.all_sections import AllSections
from electra_dist.config.sections.model import MODERN_KEYS
from electra_dist.store.json_file import canonical_json

# Numerics version: a number that is raised whenever the random draws (masks, samples, dropout) or the rounding of a
# run change. A run that began with a lower number then continues only with --accept-new-numerics.
NUMERICS = 1


class Config(AllSections):
    """Whole configuration of a run, without contradictions. `load.load_config` reads it from YAML."""

    @model_validator(mode="after")
    def _obeys_the_rules(self) -> Config:
        """Raise ValidationError for the first contradiction between keys; it names the section of the keys."""
        for section, message in contradictions(self):
            fault = PydanticCustomError("value_error", "{message}", {"message": message})
            place = (section,) if section else ()
            value = getattr(self, section) if section else self
            raise ValidationError.from_exception_data("Config", [InitErrorDetails(type=fault, loc=place, input=value)])
        return self

    def __repr__(self) -> str:
        """Return one line with the values that distinguish runs; `load.dump_yaml` returns the whole configuration."""
        tower = self.model.discriminator
        return (
            f"Config({self.run_dir!r}: objective {self.objective.name}, {tower.num_layers} layers of "
            f"{tower.hidden_size}, {self.train.num_steps:,} steps of {self.train.global_batch:,} rows of "
            f"{self.data.seq_len} tokens, seed {self.seed})"
        )

    def for_ranks(self, num_ranks: int) -> tuple[Config, list[str]]:
        """Return the config for a run on `num_ranks` ranks, and log lines about a change.

        A micro-batch that does not divide the rows of a rank is reduced to one that does. The global batch stays, so
        every step has the same rows on any number of ranks. If the ranks cannot share the batch evenly, the config is
        returned unchanged; `rules.check_world_size` raises the error.
        """
        train = self.train
        size = train.fitting_micro_batch(num_ranks)  # 0 if no micro-batch fits
        if size in (0, train.micro_batch):
            return self, []
        rows_per_rank = train.global_batch // num_ranks
        line = (
            f"micro-batch: {size} rows and not {train.micro_batch} (train.micro_batch), because each of the "
            f"{num_ranks} ranks has {rows_per_rank} rows of a step; the global batch stays {train.global_batch} rows"
        )
        return self.model_copy(update={"train": train.model_copy(update={"micro_batch": size})}), [line]

    @property
    def numerics(self) -> int:
        """Return the version of random draws and rounding that this program uses, `NUMERICS`."""
        return NUMERICS

    def identity(self, numerics: int | None = None) -> dict[str, Any]:
        """Return the values that determine a run's results, as a JSON tree; a run resumes only if none has changed.

        Other values, such as micro-batch, ZeRO stage and logging, may change at a restart. `numerics` is the version
        of random draws and rounding; None stands for `self.numerics`. For an older version, the result is what a
        program of that version has recorded.
        """
        if numerics is None:
            numerics = self.numerics
        tree = self.model_dump(mode="json")
        train_keys = ["num_steps", "global_batch", "precision"]
        train_keys += [key for key in ("init_from", "init_generator_from") if tree["train"][key]]
        # Keys without effect that older programs did not know are left out, so that older runs keep their identity.
        objective = {key: value for key, value in tree["objective"].items() if (key, value) not in _NEW_DEFAULTS}
        if not self.objective.draws_at_random:
            del objective["random_share"], objective["random_from"]
        data = {key: tree["data"][key] for key in ("seq_len", "shuffle_window_shards")}
        if self.data.phases:
            # The corpora of the phases are left out, like data.corpus: a run records their fingerprints separately.
            data["phase_steps"] = [phase.from_step for phase in self.data.phases]
        return {
            "seed": tree["seed"],
            "model": _model_identity(tree["model"]),
            "objective": objective,
            "optimizer": self._optimizer_identity(),
            "data": data,
            "train": {key: tree["train"][key] for key in train_keys},
            "numerics": numerics,
        }

    def _optimizer_identity(self) -> dict[str, Any]:
        excluded = {"implementation", "generator"}
        if self.optimizer.shape == "polynomial":
            excluded |= {"shape", "decay_steps"}  # so that runs of versions without these keys keep their identity
        section = self.optimizer.model_dump(mode="json", exclude=excluded)
        if self.optimizer.generator is not None:
            section["generator"] = self.optimizer.generator.model_dump(mode="json", exclude_none=True)
        return section

    def identity_sha256(self, numerics: int | None = None) -> str:
        """Return the hexadecimal SHA-256 of `identity(numerics)`, by which a run recognises its own checkpoints."""
        return hashlib.sha256(canonical_json(self.identity(numerics)).encode()).hexdigest()

    def older_identities(self) -> dict[int, str]:
        """Return the digests that programs with an older `NUMERICS` recorded for this config: `NUMERICS` -> digest."""
        return {numerics: self.identity_sha256(numerics) for numerics in range(1, self.numerics)}


# Keys of the sections `objective` and `model` that were added after runs had begun without them. A key with the value
# given here changes nothing in a run.
_NEW_DEFAULTS = (
    ("discriminator_mlm_weight", 0.0),
    ("generator_sha256", None),
    ("rtd_balance", None),
    ("generator_dropout", None),
)


def _model_identity(section: dict[str, Any]) -> dict[str, Any]:
    """Return the part of section `model` that belongs to a config's identity.

    With the architecture `bert` the keys that only `modern` uses are left out, so that the digests of older runs stay
    the same.
    """
    section = {key: value for key, value in section.items() if (key, value) not in _NEW_DEFAULTS}
    if section["architecture"] != "bert":
        return section
    return {key: value for key, value in section.items() if key not in ("architecture", *MODERN_KEYS)}

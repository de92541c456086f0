"""What is compared: a YAML file of its own beside the config of an ordinary run (`configs/compare_cpu.yaml`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from electra_dist.config import NonNegative, ObjectiveConfig, Positive, Section

OBJECTIVES: tuple[str, ...] = get_args(ObjectiveConfig.model_fields["name"].annotation)
# What every run of a comparison is given, so that nothing but the objective tells them apart.
RESERVED = ("run_dir", "seed", "data", "train.num_steps", "train.skip_steps", "checkpoint", "objective.name")
RANDOM = "random"  # the name of the baseline: towers as they are before the first step
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Entry(Section):
    """One line of the picture. A bare name is short for {name: NAME}."""

    name: Name = Field(description="what it is called in the table and in folders")
    objective: str = Field(description=f"objective.name: one of {', '.join(OBJECTIVES)}; default: the name")
    set: dict[str, Any] = Field(
        default={}, description="dotted keys of the run's config and their values, as in {objective.rtd_weight: 10}"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if isinstance(value, dict) and "name" in value:
            value = {"objective": value["name"], **value}
        return value

    @field_validator("objective")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in OBJECTIVES:
            raise ValueError("no such objective")
        return value

    @field_validator("set")
    @classmethod
    def _free(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if any(f"{key}.".startswith(f"{reserved}.") for reserved in RESERVED):
                raise ValueError(f"`{key}` must be the same in all runs; put it into the base, or leave it out")
        return value


class TaskEntry(Section):
    """How the encoders are scored on one task: GLUE's by their names, any other with columns of its own."""

    task: str | None = Field(
        default=None, description="the task of GLUE; default: the entry's name. So one can be probed and fine-tuned"
    )
    how: Literal["probe", "finetune"] = Field(
        default="probe", description="probe: a linear model on frozen states; finetune: the whole encoder"
    )
    at: Literal["all", "ends"] = Field(
        default="all", description="ends: only the initial and the last weights are scored, for what takes long"
    )
    max_train: Positive | None = Field(
        default=None, description="training examples used, always the same ones; default: all"
    )
    seeds: Positive = Field(default=1, description="fine-tunings of each checkpoint; their median is its score")
    data: str | None = Field(
        default=None, description="folder of the data; default: what --glue names. A task of your own: train, dev"
    )
    set: dict[str, Any] = Field(default={}, description="settings as of `electra-dist finetune --set`: {epochs: 2}")
    text_a: str | None = Field(default=None, description="a task of your own: column of the text")
    text_b: str | None = Field(default=None, description="a task of your own: column of a second text")
    label: str | None = Field(default=None, description="a task of your own: column of the label")
    kind: Literal["classification", "regression"] = Field(
        default="classification", description="a task of your own: what the label is"
    )


class CompareConfig(Section):
    """A comparison."""

    base: str = Field(description="config of a run, relative to this file: everything that all runs share")
    output: str = Field(description="folder of the comparison: runs, scores, table, picture")
    objectives: Annotated[tuple[Entry, ...], Field(min_length=2)] = Field(description="what is compared")
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = Field(
        default=(1, 2, 3), description="seeds of pretraining, one run each for every objective"
    )
    steps: Positive | None = Field(
        default=None, description="optimizer steps of the first objective; the others get as many FLOPs"
    )
    flops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="instead of steps: training FLOPs of every run"
    )
    evaluate_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = Field(
        default=(0.25, 0.5, 1.0), description="shares of the budget at which checkpoints are kept and scored"
    )
    tasks: dict[Name, TaskEntry] = Field(default={}, description="what the encoders are scored on")
    minimal_pairs: bool = Field(
        default=True, description="also score agreement, without training (English; see `electra-dist minimal-pairs`)"
    )
    ranks: Positive = Field(default=1, description="ranks of each run, on this machine")
    parallel: Positive = Field(default=1, description="runs at work at a time")

    @model_validator(mode="after")
    def _fits(self) -> CompareConfig:
        names = [entry.name for entry in self.objectives]
        if len(set(names)) < len(names) or RANDOM in names:
            raise ValueError(f"objectives need names of their own, and `{RANDOM}` is the baseline's")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: one is there twice")
        if (self.steps is None) == (self.flops is None):
            raise ValueError("give either `steps` or `flops`")
        if list(self.evaluate_at) != sorted(set(self.evaluate_at)) or self.evaluate_at[-1] != 1.0:
            raise ValueError("evaluate_at: shares must ascend and end with 1.0, where the objectives are compared")
        if not self.tasks and not self.minimal_pairs:
            raise ValueError("nothing is scored; name `tasks`, or set minimal_pairs: true")
        return self

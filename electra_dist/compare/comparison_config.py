"""Define the config of a comparison of pretraining objectives, a YAML file that names a base config.

The base config is that of an ordinary run. Every run of the comparison has its settings, and differs from it in the
objective (with the changes that belong to the objective), the seed and the number of steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from electra_dist.config import NonNegative, ObjectiveConfig, Positive, Section

OBJECTIVES: tuple[str, ...] = get_args(ObjectiveConfig.model_fields["name"].annotation)
# Keys that an entry's `set` may not change. The comparison sets run_dir, seed and train.num_steps for every run, and
# the entry's `objective` sets objective.name. All runs take the others from the base, so that they differ in the
# objective only.
RESERVED = ("run_dir", "seed", "data", "train.num_steps", "train.skip_steps", "checkpoint", "objective.name")
MINIMAL_PAIRS = "minimal-pairs"  # column of the built-in minimal pairs
CONTEXT_AUC = "context-auc"  # column of the ROC-AUC on held-out rows; see heldout_measures.py
DETECTION = "detection"  # column of the ROC-AUC of the generator's samples; see heldout_measures.py
AVERAGE = "average"  # name of the last column, the mean of several others
RANDOM = "random"  # name of an anchor of the table: the initial weights, before the first step
TRIGRAM = "trigram"  # name of another anchor: a trigram model of the training rows
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Entry(Section):
    """One objective of a comparison, with its changes to the base config.

    In the YAML file, a bare name such as `rtd` is short for {name: rtd, objective: rtd}.
    """

    name: Name = Field(description="name of the entry in the table, the picture and the names of folders")
    objective: str = Field(
        description="objective.name of the entry's runs, such as rtd or mlm; default: the entry's name"
    )
    set: dict[str, Any] = Field(
        default={},
        description="changes to the base config for the entry's runs: dotted keys and values, as in "
        "{objective.rtd_weight: 10}",
    )
    lr: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(),
        description="learning rates (optimizer.lr), two or more, of which short runs choose one before the entry's "
        "first run: that with the highest context AUC or, if the objective predicts tokens, the lowest loss on "
        "held-out rows. Default: the rate of the base config or of `set`",
    )

    @model_validator(mode="after")
    def _check_rates(self) -> Entry:
        if self.lr and (len(set(self.lr)) < len(self.lr) or len(self.lr) < 2):
            raise ValueError("lr lists the rates of a search, two or more different ones; set a single one in `set`")
        if self.lr and "optimizer.lr" in self.set:
            raise ValueError("`lr` and `optimizer.lr` in `set` both give the learning rate; remove one of them")
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        fields = {"name": value} if isinstance(value, str) else value
        if isinstance(fields, dict) and "name" in fields:
            return {"objective": fields["name"], **fields}
        return fields

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: str) -> str:
        if value not in OBJECTIVES:
            raise ValueError(f"no such objective; set one of {', '.join(OBJECTIVES)}")
        return value

    @field_validator("set")
    @classmethod
    def _check_reserved_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys that must be equal in all runs, and keys that the comparison or `objective` sets itself."""
        for key in value:
            for reserved_key in RESERVED:
                is_reserved = key == reserved_key or key.startswith(f"{reserved_key}.")
                if is_reserved:
                    raise ValueError(
                        f"`{key}` cannot be changed for one objective; remove it from `set`. Change data, checkpoint "
                        f"and train.skip_steps in the base config, for all runs. The comparison sets run_dir, takes "
                        f"seed from `seeds` and train.num_steps from `steps` or `flops`, and objective.name is the "
                        f"entry's `objective`"
                    )
        return value


class TaskEntry(Section):
    """One task on which encoders are scored, with the method (probe or fine-tuning) and the checkpoints to score.

    The task is one of GLUE, or a custom task, which needs the keys `text_a` and `label` for its columns, or a
    treebank, which needs `how: tags` or `how: heads`.
    """

    task: str | None = Field(
        default=None,
        description="name of the GLUE task or, with how: finetune, tagging, ner or squad1, whose train and dev files "
        "are in `data`; default: the entry's name. With it, two entries can probe and fine-tune the same task",
    )
    how: Literal["probe", "finetune", "tags", "heads"] = Field(
        default="probe",
        description="probe: fit a linear model to the frozen encoder's states at every layer, and choose the layer on "
        "held-out training data; finetune: train the whole encoder; tags, heads: probe the frozen states of words for "
        "their parts of speech, or for the words on which they depend, with the treebank in `data`",
    )
    at: Literal["all", "ends"] = Field(
        default="all",
        description="checkpoints that are scored. all: the initial weights and every checkpoint of evaluate_at; ends: "
        "the initial and the last weights only, for tasks that take long",
    )
    max_train: Positive | None = Field(
        default=None,
        description="number of training examples (sentences of a treebank) that are used, always the same ones; "
        "default: all",
    )
    seeds: Positive = Field(
        default=1, description="fine-tuning runs per checkpoint, with seeds 0, 1, ...; their median is the score"
    )
    data: str | None = Field(
        default=None,
        description="folder of the task's data; default: the folder of --glue. A custom task has train and dev files "
        "there, .tsv or .jsonl; a treebank has train and test files in CoNLL-U format, such as "
        "en_ewt-ud-train.conllu and en_ewt-ud-test.conllu",
    )
    set: dict[str, Any] = Field(
        default={},
        description="settings of fine-tuning, as in `electra-dist finetune --set`, for example {epochs: 2}",
    )
    text_a: str | None = Field(default=None, description="custom task: column of the text")
    text_b: str | None = Field(
        default=None, description="custom task: column of the second text; default: the task has single texts"
    )
    label: str | None = Field(default=None, description="custom task: column of the label")
    kind: Literal["classification", "regression"] = Field(
        default="classification",
        description="custom task: whether the label is a class, scored by accuracy, or a number, scored by Spearman "
        "correlation",
    )


class Criterion(Section):
    """Criterion by which a comparison is judged, stated before its runs: a sentence, and a form that can be checked.

    It asks whether one objective is better than another one, on how many metrics, and by how many standard errors.
    """

    statement: str = Field(description="the criterion in words, as it will be quoted with the verdict")
    arm: Name = Field(description="name of the objective's entry that should be better")
    baseline: Name = Field(description="name of the entry with which it is compared")
    metrics: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        description="columns of the table that count: names of tasks, of minimal pairs, context-auc or detection"
    )
    standard_errors: Annotated[float, Field(ge=0)] = Field(
        default=2.0,
        description="number of standard errors by which the mean difference over the seeds must be above 0. The "
        "standard error is the larger one of that over the seeds and that over the test examples",
    )
    at_least: Positive | None = Field(
        default=None, description="number of `metrics` on which the arm must be better; default: all of them"
    )

    @property
    def num_needed(self) -> int:
        """Return the number of metrics on which `arm` must be better than `baseline` for the criterion to be met."""
        return self.at_least or len(self.metrics)


class CompareConfig(Section):
    """Config of a comparison: the objectives, the budget in training FLOPs, and the tasks that score the checkpoints.

    Every objective is run once with each seed and gets the same budget.
    """

    base: str = Field(
        description="config file of an ordinary run, with all settings that the runs share; a relative "
        "path starts at the folder of this file"
    )
    output: str = Field(
        description="folder of the comparison, relative to the working directory: runs, scores, table and picture"
    )
    objectives: Annotated[tuple[Entry, ...], Field(min_length=2)] = Field(
        description="objectives to compare, at least two; with `steps`, the first one sets the budget"
    )
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = Field(
        default=(1, 2, 3), description="seeds of pretraining; every objective has one run per seed"
    )
    steps: Positive | None = Field(
        default=None,
        description="budget as optimizer steps of the first objective; the others get as many training FLOPs. Set "
        "either this or flops",
    )
    flops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="budget as training FLOPs of every run. Set either this or steps"
    )
    evaluate_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = Field(
        default=(0.25, 0.5, 1.0),
        description="shares of the budget at which checkpoints are kept and scored, ascending, the last one 1.0",
    )
    search_at: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="share of the budget of each short run that tries a learning rate (`lr` of an objective)",
    )
    tasks: dict[Name, TaskEntry] = Field(default={}, description="tasks on which the encoders are scored, by name")
    minimal_pairs: bool | tuple[str, ...] = Field(
        default=True,
        description="true: score number agreement in English, too, without training (see `electra-dist "
        "minimal-pairs`); false: do not, for other languages. A list of files, or of folders of files, in BLiMP's or "
        "Zorro's format: score their pairs, each file or folder as a column of its name",
    )
    minimal_pairs_per_kind: Positive = Field(
        default=200, description="number of minimal pairs of each kind that are used, always the same ones"
    )
    detection: bool = Field(
        default=False,
        description="true: score on held-out rows, too, how well each discriminator finds the samples of its own "
        "generator, as a column `detection`; objectives without both have no score there",
    )
    criterion: Criterion | None = Field(
        default=None,
        description="criterion by which the comparison is judged, stated before the runs; it is printed with its "
        "verdict. Default: none",
    )
    ranks: Positive = Field(default=1, description="ranks (processes, one per GPU) of each run, on this machine")
    parallel: Positive = Field(default=1, description="number of runs that train at the same time, on this machine")

    @model_validator(mode="after")
    def _check_consistency(self) -> CompareConfig:
        names = [entry.name for entry in self.objectives]
        has_repeated_name = len(set(names)) < len(names)
        if has_repeated_name or {RANDOM, TRIGRAM} & set(names):
            raise ValueError(
                f"objectives need names of their own other than `{RANDOM}` and `{TRIGRAM}`, which are rows of the "
                f"table, but are named {', '.join(names)}; rename one"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {', '.join(map(str, self.seeds))} has a seed twice; remove the repeated one")
        num_budgets = sum(budget is not None for budget in (self.steps, self.flops))
        if num_budgets != 1:
            raise ValueError("give either `steps` or `flops`, exactly one of them, as the budget")
        is_ascending = list(self.evaluate_at) == sorted(set(self.evaluate_at))
        if not is_ascending or self.evaluate_at[-1] != 1.0:
            raise ValueError(
                f"evaluate_at: {', '.join(map(str, self.evaluate_at))} must ascend and end with 1.0, where the "
                f"objectives are compared; correct the shares"
            )
        if not self.tasks and not self.minimal_pairs:
            raise ValueError("nothing is scored; add `tasks`, or set minimal_pairs: true")
        columns = [*self.tasks, *self._pair_columns(), CONTEXT_AUC, *([DETECTION] if self.detection else [])]
        titles = [*columns, AVERAGE]
        if len(set(titles)) < len(titles):
            raise ValueError(
                f"tasks and minimal pairs give the columns {', '.join(titles)}, of which two have the same name; "
                f"rename a task, a file or a folder"
            )
        if self.criterion is not None:
            self._check_criterion(self.criterion, names, columns)
        return self

    def _pair_columns(self) -> list[str]:
        if isinstance(self.minimal_pairs, bool):
            return [MINIMAL_PAIRS] if self.minimal_pairs else []
        return [Path(path).stem for path in self.minimal_pairs]

    def _check_criterion(self, criterion: Criterion, names: list[str], columns: list[str]) -> None:
        """Raise ValueError if a criterion names no objective or column of the comparison, or cannot be judged."""
        for key, name in (("arm", criterion.arm), ("baseline", criterion.baseline)):
            if name not in names:
                raise ValueError(f"criterion.{key}: no objective `{name}`; set one of {', '.join(names)}")
        for metric in criterion.metrics:
            if metric not in columns:
                raise ValueError(f"criterion.metrics: no column `{metric}`; set one of {', '.join(columns)}")
        if len(set(criterion.metrics)) < len(criterion.metrics):
            raise ValueError(
                f"criterion.metrics: {', '.join(criterion.metrics)} has a metric twice, which would count twice; "
                f"remove the repeated one"
            )
        if criterion.num_needed > len(criterion.metrics):
            raise ValueError(
                f"criterion.at_least: {criterion.at_least} of {len(criterion.metrics)} metrics cannot be passed; "
                f"lower it, or add metrics"
            )
        if len(self.seeds) < 2:
            raise ValueError("criterion: a single seed has no standard error; set at least two `seeds`")

"""Define the sections `checkpoint`, `log`, `corpus`, `kernels`, `cluster` and `plan`.

None of them is part of a run's identity (the values that determine its results), so they may change at a restart.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from electra_dist.config.secrets import HIDDEN
from electra_dist.config.sections.base import (
    NonNegative,
    NonNegativeSeconds,
    Positive,
    PositiveSeconds,
    Probability,
    Section,
    Size,
)


class CheckpointConfig(Section):
    """Settings of checkpoints: when they are saved, where they are written, and which of them are kept."""

    every_steps: Positive | Literal["auto"] = Field(
        default=1000,
        description="Steps between checkpoints. auto: the interval that loses the least time, by the saves and "
        "interruptions that this run has measured.",
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description="Local folders or s3://, az:// or gs:// prefixes for checkpoints of this run. Every checkpoint is "
        "written to all of them; a restart prefers the first. Empty: checkpoints/ in the run folder.",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="URL of the service of the URLs in targets, if it is not AWS, Azure or Google.",
    )
    keep_last: Positive = Field(
        default=3,
        description="Number of newest checkpoints that are kept. Older ones are deleted unless another keep_* rule or "
        "a rollback needs them.",
    )
    keep_every_steps: NonNegative = Field(
        default=0,
        description="Checkpoints at multiples of this number of steps are saved and never deleted. 0: no such rule.",
    )
    keep_steps: tuple[Positive, ...] = Field(
        default=(),
        description="Steps at which a checkpoint is saved in addition and never deleted.",
    )
    keep_best: NonNegative = Field(
        default=0,
        description="Number of checkpoints that are kept because they have the highest context AUC on data.heldout "
        "or, without a discriminator, the lowest loss. Only checkpoints saved at a step with an evaluation count.",
    )


class LogConfig(Section):
    """Settings of how often a run logs its progress and evaluates the model on held-out rows, and where it logs to."""

    every_steps: Positive = Field(
        default=10, description="Steps between two log lines, which are also records in metrics.jsonl."
    )
    eval_every_steps: NonNegative = Field(
        default=0,
        description="Steps between two evaluations on data.heldout. 0: only after the last step.",
    )
    eval_rows: Positive = Field(
        default=512,
        description="Held-out rows in each evaluation; more for the context AUC if these have fewer than 5,000 masked "
        "tokens.",
    )
    tensorboard: bool = Field(
        default=True, description="Whether TensorBoard event files are written into the run folder."
    )
    wandb: str | None = Field(
        default=None,
        description="Weights & Biases project that also gets the metrics; needs the extra wandb. With "
        "WANDB_MODE=offline, upload later by `wandb sync`.",
    )
    mlflow: str | None = Field(
        default=None,
        description="MLflow experiment that also gets the metrics; needs the extra mlflow. MLFLOW_TRACKING_URI names "
        "the server; without it, mlflow.db of the run folder has the records.",
    )
    trackio: str | None = Field(
        default=None,
        description="Trackio project that also gets the metrics; needs the extra trackio. They stay on this machine, "
        "in TRACKIO_DIR, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names another place.",
    )
    text_samples: NonNegative = Field(
        default=3,
        description="Held-out rows whose text, with replacements and probabilities, each evaluation records for "
        "report.html and TensorBoard.",
    )
    report_every_minutes: Annotated[float, Field(ge=0, le=1e7)] = Field(
        default=10.0,
        description="Minutes between two updates of report.html. 0: only at the end of each start.",
    )
    kwh_price: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Price of a kilowatt-hour, in any currency, for the cost of energy in report.html. Unset: the "
        "energy alone.",
    )


class CorpusConfig(Section):
    """Settings of `electra-dist corpus build`, which turns text into rows and shards.

    Training reads only the key `max_unk_rate` of this section.
    """

    packing: Literal["rows", "none"] = Field(
        default="rows",
        description="How examples are placed in rows. rows: several whole examples share a row, and none attends to "
        "another. none: one example per row.",
    )
    tokenizer: Literal["wordpiece", "bpe"] = Field(
        default="wordpiece",
        description="Kind of the vocabulary. wordpiece: BERT's, a vocab.txt. bpe: a tokenizer.json of Hugging Face's "
        "tokenizers, such as ModernBERT's.",
    )
    lowercase: bool = Field(
        default=True,
        description="Whether text is lower-cased and stripped of accents. With bpe the tokenizer.json decides.",
    )
    single_segment_prob: Probability = Field(
        default=0.1,
        description="Probability that an example has one segment instead of two.",
    )
    short_target_prob: Probability = Field(
        default=0.05,
        description="Probability that the target length of an example is drawn uniformly from [5, seq_len] tokens "
        "instead of being seq_len.",
    )
    shard_size_mb: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=16.0, description="Target size of a shard file, in units of 1e6 bytes."
    )
    heldout_fraction: Probability = Field(
        default=0.0,
        description="Fraction of the documents, chosen by a hash of their text, that goes to OUTPUT/heldout instead "
        "of the training corpus.",
    )
    source_epochs: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="How often the documents of a source are used. 2.5: each twice, and half of them a third time. 0: "
        "the source is left out. Sources that are not named: once. `electra-dist corpus info` lists the sources, such "
        "as texts/wiki.",
    )
    source_shares: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="Share of each source in the bytes of the corpus, such as {texts/wiki: 1, texts/web: 3}. No "
        "document is used twice: the source that is smallest for its share decides the size of the corpus. Empty: "
        "source_epochs decides.",
    )
    undecodable: Literal["skip", "replace"] = Field(
        default="skip",
        description="What happens to a document with bytes that are not UTF-8. skip: it is left out. replace: it is "
        "used without these bytes.",
    )
    max_unk_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5,
        description="Largest share of [UNK] among the tokens of a source with which a corpus is built, or a run "
        "begins. From 5 % on, the output names a source.",
    )
    origins: bool = Field(
        default=True,
        description="Whether a build writes, next to each shard, an origin file with the source and documents of each "
        "row, for `electra-dist corpus find`. The shards do not depend on it.",
    )
    licences: dict[str, str] = Field(
        default={},
        description="Licence of the text of each source, such as {texts/wiki: cc-by-sa-4.0}, for build.json, "
        "`electra-dist corpus stats` and model cards.",
    )


class KernelsConfig(Section):
    """Choice of the implementation of the fused operations (Triton, CUDA or plain PyTorch)."""

    backend: Literal["auto", "triton", "cuda", "reference"] = Field(
        default="auto",
        description="Implementation of the fused operations. auto: triton on a GPU, reference elsewhere. cuda: the "
        "CUDA kernel of the one operation that has it, otherwise as auto. reference: plain PyTorch. A choice that "
        "cannot run is an error.",
    )


class ClusterConfig(Section):
    """Limits after which a rank counts as hung or a run is not restarted, and how long a node stays excluded.

    Nothing in this section changes what is computed.
    """

    hang_step_factor: Annotated[float, Field(gt=1)] = Field(
        default=5.0,
        description="A rank in a training step counts as hung if its last heartbeat is older than this factor times "
        "its measured step time and older than hang_step_floor_s.",
    )
    hang_step_floor_s: PositiveSeconds = Field(
        default=30.0,
        description="Least number of seconds without a heartbeat after which a rank in a training step counts as "
        "hung.",
    )
    hang_setup_s: PositiveSeconds = Field(
        default=1800.0,
        description="The same limit while a rank starts, restores a checkpoint or runs its first steps.",
    )
    hang_checkpoint_s: PositiveSeconds = Field(
        default=600.0,
        description="The same limit while a rank saves a checkpoint.",
    )
    hang_eval_s: PositiveSeconds = Field(
        default=600.0,
        description="The same limit during an evaluation.",
    )
    storage_patience_s: NonNegativeSeconds = Field(
        default=900.0,
        description="Seconds for which a run waits for storage that is full, read-only or does not respond, before it "
        "ends with exit code 75 and the ledger event storage. 0: the run ends at the first failure.",
    )
    max_fruitless_restarts: Positive = Field(
        default=3,
        description="Restarts in a row that may end without a new checkpoint. After them the run is not restarted.",
    )
    strike_expires_h: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=24.0,
        description="Hours for which a strike excludes a node from new submissions.",
    )
    notify: str | None = Field(
        default=None,
        description="Shell command that the supervisor runs when the run is done, needs a person (exit codes 69 and "
        "78) or makes no progress, with ELECTRA_DIST_RUN_DIR, ELECTRA_DIST_EVENT (done, unhealthy, error or "
        "no_progress), ELECTRA_DIST_REASON and ELECTRA_DIST_EXIT_CODE in its environment. Set it in the YAML file, "
        "because all users of a machine see command lines, and it may hold a secret.",
    )

    @field_validator("notify")
    @classmethod
    def _is_a_command(cls, command: str | None) -> str | None:
        """Refuse the text "(hidden)", which stands in recorded command lines in place of the command."""
        if command == HIDDEN:
            raise ValueError("a record has this text in place of the command; write the command itself")
        return command


class PlanConfig(Section):
    """Hardware that `--dry-run` assumes for its estimates; a training run does not read this section."""

    gpu: str = Field(
        default="H100",
        description="GPU model whose peak dense throughput is assumed, such as B200, H200, H100, A100, L40S or V100.",
    )
    num_gpus: Size = Field(default=8, description="Number of GPUs that the estimate assumes.")
    utilisation: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.4,
        description="Fraction of the GPUs' peak throughput that the estimate assumes (MFU).",
    )

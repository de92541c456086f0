"""Define the sections `data`, `train`, `guard`, `optimizer` and `engine`, which the training itself reads."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from electra_dist.config.sections.base import LocalFolder, NonNegative, Positive, Probability, Section, Size


class PhaseConfig(Section):
    """Entry of `data.phases`: a corpus, and the step from which a run trains on it."""

    corpus: str = Field(
        description="Local folder or s3:// prefix of a corpus with the tokenizer and row length of data.corpus."
    )
    from_step: Positive = Field(description="First step that reads this corpus, counted from 0.")


class NamedCorpus(NamedTuple):
    """Training corpus of a run as the config names it: in `data.corpus` or in an entry of `data.phases`."""

    key: str  # config key, such as "data.corpus" or "data.phases[0].corpus"
    from_step: int  # first step that reads this corpus, from 0
    url: str  # local folder or s3:// prefix


class DataConfig(Section):
    """Settings of the data: where rows come from, in which order they are read, and where a node caches them."""

    corpus: str = Field(
        description="Training corpus: the local folder or s3://, az:// or gs:// prefix that holds corpus.json and the "
        "shards."
    )
    heldout: str | None = Field(
        default=None,
        description="Corpus for evaluation, with the row length and vocabulary of the training corpus. {corpus} in it "
        "stands for data.corpus. Unset: no evaluation.",
    )
    phases: tuple[PhaseConfig, ...] = Field(
        default=(),
        description="Further corpora, each as `{corpus: URL, from_step: N}`, in ascending order: from step N on, all "
        "rows come from that corpus, beginning with a new epoch.",
    )
    seq_len: Size = Field(default=512, description="Tokens per row; must equal the row length of the corpus.")
    shuffle_window_shards: Positive = Field(
        default=64,
        description="Number of shards whose rows are shuffled together, and which the node must hold.",
    )
    cache_dir: LocalFolder | None = Field(
        default=None,
        description="Folder on a local disk of the node for shards fetched from S3 and for compiled code. Unset: "
        "cache/ in the run folder; with several nodes, electra-dist-cache-UID in the first of SLURM_TMPDIR, TMPDIR "
        "and /tmp that is on a local disk.",
    )
    cache_limit_gb: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        default=None,
        description="Limit on the size of the shards in cache_dir, in units of 1e9 bytes; those of two shuffle "
        "windows are held in any case. Unset: the free space of the disk.",
    )
    fetch_threads: Annotated[int, Field(gt=0, le=1024)] = Field(
        default=8,
        description="Threads per rank that fetch and verify shards. The ranks of a node fetch each shard only once.",
    )
    share_shards: bool | None = Field(
        default=None,
        description="Whether nodes pass the shards of data.corpus to one another, each at a TCP port, so that each "
        "shard is fetched from S3 once and not once per node. Unset: true with 8 nodes or more.",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="URL of the service of this section's URLs, if it is not AWS, Azure or Google, such as "
        "http://10.0.0.1:9000.",
    )

    def training_corpora(self) -> list[NamedCorpus]:
        """Return all training corpora of the run in the order of use: `corpus`, then the corpora of `phases`."""
        later = [
            NamedCorpus(f"data.phases[{number}].corpus", phase.from_step, phase.corpus)
            for number, phase in enumerate(self.phases)
        ]
        return [NamedCorpus("data.corpus", 0, self.corpus), *later]

    @model_validator(mode="before")
    @classmethod
    def _heldout_beside_corpus(cls, value: Any) -> Any:
        """Replace the text {corpus} in `heldout` by the value of `corpus`, as in "{corpus}/heldout"."""
        if not isinstance(value, dict):
            return value
        corpus = value.get("corpus")
        heldout = value.get("heldout")
        if isinstance(corpus, str) and isinstance(heldout, str):
            return {**value, "heldout": heldout.replace("{corpus}", corpus.rstrip("/"))}
        return value


class TrainConfig(Section):
    """Settings of the step loop: number of steps, rows of a step, number format, skipped steps, initial weights."""

    num_steps: Positive = Field(description="Optimizer steps of the whole run; the learning-rate schedule ends there.")
    global_batch: Size = Field(description="Rows in an optimizer step, summed over all ranks and micro-batches.")
    micro_batch: Size = Field(
        description="Rows that a rank processes in one forward and backward pass; gradients are accumulated up to "
        "global_batch. If this number does not divide a rank's rows, a start takes the largest smaller number that "
        "does. auto: measure memory at the start and use the largest number that fits."
    )
    largest_micro_batch: bool = Field(
        default=False,
        description="Internal flag of micro_batch: auto. Do not set it yourself.",
    )
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16",
        description="Number format of the forward and backward passes. Master weights, moments and gradient sums are "
        "fp32, but for the sum over ranks in bf16 on CPUs at zero_stage 1 to 3. fp16 is for GPUs without bf16 (V100, "
        "T4).",
    )
    skip_steps: tuple[NonNegative, ...] = Field(
        default=(),
        description="Steps to skip, counted from 0: they update nothing and their rows are not used; all other steps "
        "keep their rows.",
    )
    init_from: str | None = Field(
        default=None,
        description="Initial weights: the folder of a run, an export or a Hugging Face model, or ORG/NAME or "
        "ORG/NAME@REVISION of one on the Hub. Ignored once the run has a checkpoint of its own. Unset: random "
        "weights.",
    )
    init_generator_from: str | None = Field(
        default=None,
        description="Hugging Face folder, or name on the Hub, with the generator's initial weights, for an init_from "
        "that holds only the discriminator. With objective.generator: frozen, the generator itself, also a run of "
        "objective mlm.",
    )

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Replace `micro_batch: auto` by 1 row and set `largest_micro_batch`, which makes the run measure the number.

        The config's checks need a number before `engine/micro_batch.py` has measured how many rows fit. With 1 row,
        they accept every number of ranks that divides the global batch.
        """
        if isinstance(value, dict) and value.get("micro_batch") == "auto":
            return {**value, "micro_batch": 1, "largest_micro_batch": True}
        return value

    def micro_batches(self, num_ranks: int) -> int:
        """Return how many micro-batches each rank processes per step: global_batch / (micro_batch * num_ranks).

        The result is 0 if this is not a whole number; training then needs a smaller micro-batch
        (`fitting_micro_batch`).
        """
        rows_per_pass = self.micro_batch * num_ranks
        if self.global_batch % rows_per_pass:
            return 0
        return self.global_batch // rows_per_pass

    def fitting_micro_batch(self, num_ranks: int) -> int:
        """Return how many rows a micro-batch has on `num_ranks` ranks: at most `micro_batch`, so that all are full.

        It is the largest such number that divides the rows of a rank, global_batch / num_ranks; 0 if that is not a
        whole number, so that these ranks cannot train with this config.
        """
        rows_per_rank, remaining_rows = divmod(self.global_batch, num_ranks)
        if remaining_rows:
            return 0
        return max(size for size in divisors(rows_per_rank) if size <= self.micro_batch)

    def possible_ranks(self) -> list[int]:
        """Return the numbers of ranks, ascending, that can share the rows of the global batch evenly."""
        return divisors(self.global_batch)


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer, ascending."""
    up_to_root = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*up_to_root, *(number // size for size in up_to_root)})


class GuardConfig(Section):
    """Limits that keep a run from diverging: when a step makes no update, when the run goes back to a checkpoint."""

    window: Annotated[int, Field(ge=2, le=2**24)] = Field(
        default=128,
        description="Number of most recent accepted steps from which mean and standard deviation of the loss are "
        "computed; before that many, no step counts as a spike.",
    )
    spike_sigma: Annotated[float, Field(ge=0)] = Field(
        default=6.0,
        description="A step is a spike, and does not update the weights, if its loss exceeds the window's mean by "
        "more than this many standard deviations. 0: none is.",
    )
    max_in_a_row: Positive = Field(
        default=3, description="Consecutive stopped steps after which the run goes back to a checkpoint."
    )
    skip_before: NonNegative = Field(
        default=16,
        description="A run that goes back to a checkpoint skips the stopped steps, and this many before the first "
        "of them.",
    )
    max_rollbacks: NonNegative = Field(
        default=5,
        description="Number of times that a run may go back to a checkpoint, before it ends with exit code 78.",
    )

    @property
    def most_skipped(self) -> int:
        """Return how many of the steps that a rollback skips may lie before the newest checkpoint.

        A rollback (return to a checkpoint) skips the `max_in_a_row` stopped steps, and `skip_before` steps before the
        first of them. The newest checkpoint may have been saved just before the last stopped step; all other skipped
        steps then precede it.
        """
        return self.skip_before + self.max_in_a_row - 1


class GeneratorOptimizerConfig(Section):
    """Settings of the optimizer for the generator's own parameters; an unset key has the value from `optimizer`.

    The generator has embeddings of its own only with model.sharing none or gdes. Otherwise the settings of
    `optimizer` apply to the embeddings, which both towers share.
    """

    lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Peak learning rate of the generator. Unset: optimizer.lr."
    )
    warmup_steps: NonNegative | None = Field(
        default=None,
        description="Warm-up of the generator, in steps. Unset: optimizer.warmup_steps.",
    )
    beta1: Probability | None = Field(default=None, description="beta1 of the generator. Unset: optimizer.beta1.")
    beta2: Probability | None = Field(default=None, description="beta2 of the generator. Unset: optimizer.beta2.")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Weight decay of the generator. Unset: optimizer.weight_decay."
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Upper limit of the norm of the generator's gradients; optimizer.clip_norm is then that of all "
        "others. Unset: the same number.",
    )


class OptimizerFacts(NamedTuple):
    """What an optimizer's name decides: which implementations it has, and whether ZeRO may split its parameters."""

    implementations: tuple[str, ...] = ("apex", "deepspeed", "foreach")  # values of `optimizer.implementation`
    needs_whole_parameters: bool = False  # only ZeRO stage 0 gives an optimizer more than pieces of them


OPTIMIZERS = {
    "adamw": OptimizerFacts(),
    "lamb": OptimizerFacts(implementations=("apex", "foreach"), needs_whole_parameters=True),
    "muon": OptimizerFacts(implementations=("foreach",), needs_whole_parameters=True),
}


class OptimizerConfig(Section):
    """Settings of the optimizer (by default AdamW as in the paper) and of the learning-rate schedule.

    After t of num_steps steps the learning rate is lr * min(1, t / warmup_steps) * remaining ** decay_power. With
    shape polynomial, remaining is 1 - t / num_steps; with shape trapezoid, min(1, (num_steps - t) / decay_steps).
    """

    # Warm-up and decay overlap, as in Google's code (model/optimization.py): the polynomial decay begins at step 0. So
    # with the settings of ELECTRA-Large (10,000 warm-up steps of 400,000) the peak is 0.975 * lr. The first update has
    # lr 0, unless there is no warm-up. From num_steps on the learning rate is 0, unless `decay_power` is 0.

    name: Literal["adamw", "lamb", "muon"] = Field(
        default="adamw",
        description="Optimizer. lamb scales each parameter's update by the parameter's norm. muon: Muon for the "
        "matrices of the layers, AdamW for all other parameters. lamb and muon need engine.zero_stage: 0.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        default=2e-4, description="Peak learning rate; 2e-4 is the paper's value for ELECTRA-Large."
    )
    warmup_steps: NonNegative = Field(
        default=10_000,
        description="Steps in which the learning rate rises linearly from 0. The decay also runs during these steps.",
    )
    shape: Literal["polynomial", "trapezoid"] = Field(
        default="polynomial",
        description="Curve of the learning rate. polynomial: the paper's, which decays over all steps. trapezoid: "
        "warm-up, then lr itself, then decay_steps steps of decay to 0, as for ModernBERT.",
    )
    decay_steps: Positive | None = Field(
        default=None,
        description="Steps of the decay at the end with shape: trapezoid. Unset: a tenth of train.num_steps.",
    )
    decay_power: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="Exponent of the decay factor, which falls from 1 to 0: (1 - step / num_steps) ** decay_power. 1: "
        "linear. 0: no decay.",
    )
    beta1: Probability = Field(
        default=0.9, description="Decay rate of the first moment, the running mean of the gradient."
    )
    beta2: Probability = Field(
        default=0.999, description="Decay rate of the second moment, the running mean of its square."
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-6,
        description="Added to the square root of the second moment, so that the update never divides by 0.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01,
        description="Decoupled weight decay, multiplied by the learning rate; not for LayerNorm and biases.",
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="Upper limit of the global gradient norm; larger gradients are scaled down to it.",
    )
    implementation: Literal["auto", "apex", "deepspeed", "foreach"] = Field(
        default="auto",
        description="Code that runs the update. apex: NVIDIA apex (not for muon). deepspeed: DeepSpeed's fused AdamW "
        "(adamw only). foreach: this project's. auto: on a GPU apex if it is installed, otherwise deepspeed for "
        "adamw; foreach in all other cases. The log states the reason.",
    )
    generator: GeneratorOptimizerConfig | None = Field(
        default=None,
        description="Section with the generator's own settings. {}: only a norm of its own. Unset: one norm for both "
        "towers.",
    )

    @property
    def facts(self) -> OptimizerFacts:
        """Return the implementations and needs of the optimizer `name`."""
        return OPTIMIZERS[self.name]

    def trapezoid_decay_steps(self, num_steps: int) -> int:
        """Return the number of steps in which the learning rate decays at the end of a run with `shape: trapezoid`.

        It is `decay_steps` or, if this key is not set, a tenth of the run's steps, rounded down, but at least 1.
        """
        if self.decay_steps is not None:
            return self.decay_steps
        return max(1, num_steps // 10)

    def learning_rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of the update after `step` finished steps, in a run of `num_steps` steps."""
        warmup_factor = 1.0
        if self.warmup_steps:
            warmup_factor = min(1.0, step / self.warmup_steps)
        remaining_fraction = max(0.0, 1.0 - step / num_steps)
        if self.shape == "trapezoid":
            remaining_steps = max(0, num_steps - step)
            remaining_fraction = min(1.0, remaining_steps / self.trapezoid_decay_steps(num_steps))
        return self.lr * warmup_factor * remaining_fraction**self.decay_power

    def generator_learning_rate(self, step: int, num_steps: int) -> float | None:
        """Return the learning rate of the generator's parameters; None if `generator` is not set."""
        return None if self.generator is None else self.for_generator.learning_rate(step, num_steps)

    def peak_learning_rate(self, num_steps: int) -> tuple[int, float]:
        """Return (step with the highest learning rate of a run of `num_steps` steps, that learning rate)."""
        # During the warm-up the polynomial is a constant times t * (1 - t / num_steps) ** decay_power, whose
        # derivative is 0 here. After the warm-up it only falls.
        turning_point = num_steps / (1.0 + self.decay_power)
        if self.shape == "trapezoid":
            turning_point = num_steps - self.trapezoid_decay_steps(num_steps)
        # The next smaller and the next larger whole step, if the curve turns before the warm-up ends.
        steps = {min(self.warmup_steps, int(turning_point) + offset) for offset in (0, 1)}
        peak_step = max(steps, key=lambda step: self.learning_rate(step, num_steps))
        return peak_step, self.learning_rate(peak_step, num_steps)

    @property
    def for_generator(self) -> OptimizerConfig:
        """Return the settings for the generator's parameters: this section, with the values that `generator` sets."""
        if self.generator is None:
            return self
        return self.model_copy(update=self.generator.model_dump(exclude_none=True))


class EngineConfig(Section):
    """Settings of how the computation is distributed and saves memory; all of them may change at a restart.

    Some change the rounding, and on a GPU `attention` also changes which attention probabilities dropout drops.
    """

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="DeepSpeed ZeRO stage: the training state that is split between the ranks. 0: none. 1: optimizer "
        "state. 2: gradients, too. 3: parameters, too.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Whether the optimizer state is kept in host memory (zero_stage 1 to 3).",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Whether layers are computed again in the backward pass, which saves memory and costs time.",
    )
    attention: Literal["auto", "sdpa", "flash", "flash3", "flex"] = Field(
        default="auto",
        description="Attention code. sdpa: torch's scaled_dot_product_attention. flash: FlashAttention; needs a GPU "
        "of compute capability 8.0 and bf16 or fp16. flash3: the same by the package flash-attn-3; needs an H100 or "
        "H200 and model.attention_dropout: 0. flex: FlexAttention; needs a GPU and model.attention_dropout: 0. "
        "auto: on a GPU the first of flash3, flash and flex that passes a trial; otherwise sdpa.",
    )
    deterministic: bool = Field(
        default=True,
        description="Whether torch uses deterministic kernels on a GPU, so that a repeated step gives the same bits; "
        "docs/exactness.md has the exceptions.",
    )
    compile: bool = Field(
        default=False,
        description="Whether torch.compile compiles the layers of the towers (zero_stage 0 to 2). The first step "
        "then takes a minute longer, unless data.cache_dir holds the code.",
    )
    overlap_communication: bool = Field(
        default=False,
        description="Whether ranks exchange gradients, in fp32, while the backward pass still runs (zero_stage 1 with "
        "bf16). Losses may then differ in the last bits.",
    )

"""Define the configuration of a run: one frozen pydantic tree whose sections are the classes of this module.

Guarantee: an unknown key, a value of the wrong type and a contradiction between keys are errors when the config is
loaded. A loaded config never changes.

How: `config_file.py` reads the tree from YAML, and `engine/engine.py` derives DeepSpeed's JSON from it. Each component
receives only the section that it needs. The field descriptions are the user's manual: `electra-dist config FILE
--describe` prints them, and the error for an invalid or missing key quotes the key's description.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from electra_dist.schedule import (
    FractionOrSchedule,
    InnerFractionOrSchedule,
    NonNegativeOrSchedule,
    PositiveOrSchedule,
    Schedule,
    largest_value,
)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]

CHECKPOINTS_DIR = "checkpoints"  # Name inside the run folder; checkpoint.targets replaces it.
CACHE_DIR = "cache"  # Name inside the run folder; data.cache_dir replaces it.
# Number of the random draws (masks, samples, dropout) and the rounding that a run computes with. A change of any of
# them raises it: a run that an older version began then goes on only with --accept-new-numerics.
NUMERICS = 2
FIRST_NUMERICS = 1  # of versions whose identity has no such number
_VOCAB_MULTIPLE = 128  # Rows of the token table are padded to a multiple of this.


class Section(BaseModel):
    """Base class of all sections of the config, a pydantic model whose values cannot be changed once it is created.

    Unknown keys and infinite or NaN numbers are validation errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TowerConfig(Section):
    """Shape of one of ELECTRA's two transformers ("towers"): the discriminator or the generator."""

    hidden_size: Positive = Field(description="Width of the tower: number of features of each token in every layer.")
    num_layers: Positive = Field(description="Number of transformer layers in the tower.")
    num_heads: Positive = Field(description="Number of attention heads in each layer; must divide hidden_size.")
    intermediate_size: Positive = Field(
        description="Width of the feed-forward network in each layer, in features; BERT uses 4 x hidden_size."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> TowerConfig:
        """Raise ValueError if num_heads does not divide hidden_size; each head gets an equal part of it."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; change one of them"
            )
        return self


class ModelConfig(Section):
    """Shapes of the two transformers ("towers"), the weights that they share, dropout and initialisation."""

    vocab_size: Positive = Field(
        default=30522,
        description="Number of WordPiece tokens; must equal the size of the vocabulary that the corpus was built "
        "with. 30522 is BERT's uncased vocabulary.",
    )
    embedding_size: Positive = Field(
        default=1024,
        description="Width of the embedding tables that the towers share, in features. A tower with another "
        "hidden_size projects the embeddings to its own width.",
    )
    max_positions: Positive = Field(
        default=512,
        description="Number of positions that have an embedding, which is the longest row the model can read, in "
        "tokens. Must be at least data.seq_len.",
    )
    type_vocab_size: Positive = Field(
        default=2, description="Number of token types; the two types distinguish segment A from segment B."
    )
    discriminator: TowerConfig = Field(
        description="Shape of the discriminator, the main tower, which is used after pretraining."
    )
    generator: TowerConfig = Field(
        description="Shape of the generator, the small tower that fills the masked positions; docs/objectives.md "
        "lists the usual sizes."
    )
    sharing: Literal["embeddings", "none", "gdes", "all"] = Field(
        default="embeddings",
        description="Weights that both towers share. embeddings: the token, position and type tables and their "
        "LayerNorm, as in Google's code (the paper names only tokens and positions). none: no weights. gdes: as in "
        "DeBERTa-v3, the discriminator's embeddings are the generator's, to which it sends no gradients, plus a "
        "trainable table of its own. all: embeddings and layers; the towers must have the same shape.",
    )
    generator_embedding_size: Positive | None = Field(
        default=None,
        description="Width of the generator's own embedding tables, in features; valid only with sharing: none. "
        "Unset: embedding_size. Google's code uses generator.hidden_size.",
    )
    hidden_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability on the embeddings and on the output of each attention and feed-forward "
        "sub-layer.",
    )
    attention_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability on the attention weights, after the softmax. Must be 0 for "
        "engine.attention: flex.",
    )
    layer_norm_eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-12, description="Epsilon that every LayerNorm adds to the variance."
    )
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02,
        description="Standard deviation of the truncated normal distribution from which weights are initialised.",
    )

    @model_validator(mode="after")
    def _can_share(self) -> ModelConfig:
        """Raise ValueError if the towers' shapes contradict `sharing`.

        With sharing `all`, both towers need the same shape. A generator_embedding_size is valid only with sharing
        `none`.
        """
        if self.sharing == "all" and self.generator != self.discriminator:
            raise ValueError(
                "sharing `all` needs two towers of the same shape; set model.generator to the values of "
                "model.discriminator, or set model.sharing: embeddings"
            )
        if self.generator_embedding_size and self.sharing != "none":
            raise ValueError(
                f"generator_embedding_size needs sharing `none`, but sharing is `{self.sharing}`; set "
                f"model.sharing: none, or leave generator_embedding_size out"
            )
        return self

    @property
    def generator_embedding_width(self) -> int:
        """Return the width of the embedding tables that the generator reads, in features.

        It is generator_embedding_size where that is set, otherwise embedding_size.
        """
        return self.generator_embedding_size or self.embedding_size

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of the token table: vocab_size rounded up to a multiple of 128.

        The padding aligns each row of logits in GPU memory. Ids of padding rows never occur in a corpus.
        """
        return math.ceil(self.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


class ObjectiveConfig(Section):
    """Settings of what is learned: the pretraining objective, masking, sampling of replacements, and loss weights."""

    name: Literal["rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial"] = Field(
        default="rtd",
        description="Pretraining objective. rtd: ELECTRA's replaced-token detection. mlm: BERT's masked language "
        "modelling, without next-sentence prediction and without a generator. rtd_masked_only: ELECTRA "
        "15 %, which is rtd with the discriminator's loss at masked positions only. replace_mlm: the "
        "discriminator's tower reads the generator's text and predicts the original tokens at masked "
        "positions. all_tokens_mlm: the same at every position, with a learned gate that copies the "
        "input token. electric: the Electric model, with a two-tower cloze model as its noise "
        "distribution. adversarial: rtd with a generator that is trained by REINFORCE to fool the "
        "discriminator.",
    )
    generator: Literal["trained", "frozen", "uniform", "unigram"] = Field(
        default="trained",
        description="Source of the replacement tokens. trained: the generator network. frozen: a ready generator "
        "network, which train.init_generator_from names and which does not learn. uniform: every token of the "
        "vocabulary with equal probability, the fixed generator of Google's code. unigram: tokens by their "
        "frequency in the corpus, the fixed generator of the paper.",
    )
    generator_sha256: str | None = Field(
        default=None,
        description="SHA-256 of the weights of a frozen generator, in hexadecimal. A run fills it in when it starts, "
        "and is refused if the weights have changed. Set it to make sure of the weights at the first start.",
    )
    generator_only_steps: NonNegative = Field(
        default=0,
        description="Two-stage training: number of steps that train only the generator, by masked language "
        "modelling. After them the discriminator starts from a copy of the generator's weights, and the generator "
        "is frozen. Needs model.sharing: none and towers of the same shape. 0: both towers train from the start.",
    )
    mask_prob: InnerFractionOrSchedule = Field(
        default=0.25,
        description="Fraction of a row's tokens, padding excluded, that is masked (0.25 means 25 %), as a number or a "
        "schedule.",
    )
    mask_token_prob: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.85,
        description="Fraction of the masked positions that show [MASK] to the generator; the others keep their "
        "token. Google's code uses 0.85, the paper 1.0.",
    )
    masking: Literal["without_replacement", "reference"] = Field(
        default="without_replacement",
        description="How masked positions are drawn. without_replacement: each position at most once. reference: "
        "with replacement, as in Google's code, so that duplicates reduce the number of distinct masked positions.",
    )
    mlm_weight: NonNegativeOrSchedule = Field(
        default=1.0,
        description="Weight of the generator's loss in the total loss, whichever loss trains the generator, as a "
        "number or a schedule. With objective mlm, the weight of the only loss.",
    )
    rtd_weight: NonNegativeOrSchedule = Field(
        default=50.0,
        description="Weight of the discriminator's loss in the total loss (lambda in the paper, which uses 50), as a "
        "number or a schedule.",
    )
    token_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="Weight in the total loss of the loss with which the discriminator's tower learns to predict "
        "tokens; used by the objectives replace_mlm and all_tokens_mlm only.",
    )
    discriminator_mlm_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Joint MLM: weight in the total loss of a second loss of the discriminator, which then also "
        "predicts the original tokens at the masked positions of the text that it reads, with a head of its own. "
        "Needs objective rtd or rtd_masked_only. 0: no such head.",
    )
    temperature: PositiveOrSchedule = Field(
        default=1.0,
        description="Number, or schedule of a number, that divides the generator's logits before a replacement is "
        "sampled. Values above 1 make the samples more random. The generator's loss does not use it, and evaluations "
        "sample at 1 from a trained generator.",
    )
    disallow_correct: bool = Field(
        default=False,
        description="Whether sampling excludes the original token, so that every sampled token is a replacement.",
    )
    random_share: FractionOrSchedule = Field(
        default=0.0,
        description="Fraction of the masked positions whose replacement is drawn at random instead of from the "
        "generator, as a number or a schedule; random_from decides from which tokens. The generator's loss does not "
        "change, and evaluations use 0.",
    )
    random_from: Literal["uniform", "unigram"] = Field(
        default="uniform",
        description="Tokens from which random_share draws. uniform: every token of the vocabulary except the special "
        "tokens, with equal probability. unigram: tokens by their frequency in the corpus.",
    )
    loss_mean: Literal["global", "per_replica"] = Field(
        default="global",
        description="How a loss is averaged over tokens. global: one mean over the tokens of the global batch. "
        "per_replica: a mean for each micro-batch, then the mean of these means, as in Google's code.",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> ObjectiveConfig:
        """Raise ValueError if an option does not go with the chosen objective.

        The options that only some objectives allow are a generator that is not trained, generator_only_steps,
        discriminator_mlm_weight, disallow_correct, random_share and a schedule of the temperature.
        """
        if self.generator != "trained" and self.name in ("mlm", "electric", "adversarial"):
            raise ValueError(
                f"generator `{self.generator}` does not go with objective `{self.name}`; set "
                f"objective.generator: trained, or choose another objective.name"
            )
        if self.generator_sha256 is not None and self.generator != "frozen":
            raise ValueError(
                f"generator_sha256 needs generator `frozen`, but generator is `{self.generator}`; remove "
                f"objective.generator_sha256, or set objective.generator: frozen"
            )
        if self.generator_only_steps and (self.name, self.generator) != ("rtd", "trained"):
            raise ValueError(
                "generator_only_steps needs objective `rtd` and a trained generator; set objective.name: rtd and "
                "objective.generator: trained, or set generator_only_steps: 0"
            )
        detects_only = self.name in ("rtd", "rtd_masked_only") and not self.generator_only_steps
        if self.discriminator_mlm_weight and not detects_only:
            raise ValueError(
                "discriminator_mlm_weight needs objective `rtd` or `rtd_masked_only` and no generator_only_steps; set "
                "objective.discriminator_mlm_weight: 0, or choose another objective.name"
            )
        if self.name == "adversarial" and self.disallow_correct:
            raise ValueError(
                "disallow_correct: true does not go with objective `adversarial`, which may sample the true token; "
                "set objective.disallow_correct: false"
            )
        is_fixed_generator = self.generator in ("uniform", "unigram")
        if is_fixed_generator and isinstance(self.temperature, Schedule):
            raise ValueError(
                f"temperature cannot be a schedule with generator `{self.generator}`, whose probabilities are fixed; "
                f"set objective.temperature to a number, or objective.generator: trained"
            )
        if self.draws_at_random and (is_fixed_generator or self.name in ("mlm", "electric", "adversarial")):
            raise ValueError(
                f"random_share does not go with objective `{self.name}` and generator `{self.generator}`, because it "
                f"takes the place of some of a trained generator's samples; remove objective.random_share, or set "
                f"objective.name: rtd and objective.generator: trained"
            )
        return self

    @property
    def draws_at_random(self) -> bool:
        """Whether random_share is above 0 at some step, so that some replacements are not the generator's."""
        return largest_value(self.random_share) > 0


class DataConfig(Section):
    """Settings of the data: where rows come from, in which order they are read, and where a node caches them."""

    corpus: str = Field(
        description="Training corpus: the local folder or s3:// prefix that holds corpus.json and the shards."
    )
    heldout: str | None = Field(
        default=None,
        description="Corpus for evaluation, never trained on: a local folder or s3:// prefix. It must have the row "
        "length and the vocabulary of the training corpus. Unset: no evaluation.",
    )
    seq_len: Positive = Field(
        default=512, description="Tokens per row; must equal the row length that the corpus was built with."
    )
    shuffle_window_shards: Positive = Field(
        default=64,
        description="Number of shards whose rows are shuffled together. A larger window shuffles more widely, but "
        "the node must hold more shards at a time.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Folder on the node for shards fetched from S3 and for code compiled by engine.compile; choose a "
        "local disk. Unset: cache/ in the run folder.",
    )
    cache_limit_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Limit on the size of the shards in cache_dir, in units of 1e9 bytes. The least recently used "
        "shards are deleted to stay below it. Unset: the free space of the disk is the limit.",
    )
    fetch_threads: Positive = Field(
        default=8,
        description="Number of threads per rank that fetch and verify shards. The ranks of a node share cache_dir "
        "and fetch each shard only once.",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="URL of an S3-compatible service for the s3:// URLs of this section, for example "
        "http://10.0.0.1:9000. Unset: AWS.",
    )


class TrainConfig(Section):
    """Length of the run, size of a step, numeric precision, skipped steps and initial weights."""

    num_steps: Positive = Field(
        description="Number of optimizer steps in the whole run; the learning-rate schedule ends there."
    )
    global_batch: Positive = Field(
        description="Number of rows in an optimizer step, summed over all ranks and micro-batches."
    )
    micro_batch: Positive = Field(
        description="Number of rows that a rank processes in one forward and backward pass. Gradients are "
        "accumulated over as many passes as global_batch needs. auto: measure memory at the start of the run and "
        "use the largest number that fits."
    )
    largest_micro_batch: bool = Field(
        default=False,
        description="Internal flag that micro_batch: auto sets. Do not set it yourself; set micro_batch: auto.",
    )
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16",
        description="Number format of the forward and backward passes. Master weights, optimizer moments and "
        "gradient sums are fp32 in all cases; only the sum over ranks is bf16 in runs of bf16 on CPUs with "
        "zero_stage 1 to 3. fp16 is for GPUs without bf16 (V100, T4): its gradients are scaled by a factor that "
        "adapts itself, and a step whose gradients overflow makes no update.",
    )
    skip_steps: tuple[NonNegative, ...] = Field(
        default=(),
        description="Numbers of the steps to skip, counted from 0. A skipped step updates nothing and its rows are "
        "not used. All other steps read the same rows as they would without the skip.",
    )
    init_from: str | None = Field(
        default=None,
        description="Folder of the initial weights: a run, an export or a Hugging Face ELECTRA model. Training "
        "starts at step 0 with new optimizer moments. Ignored once the run has a checkpoint of its own. Unset: "
        "random weights.",
    )
    init_generator_from: str | None = Field(
        default=None,
        description="Hugging Face folder with the generator's initial weights, for an init_from that is a Hugging "
        "Face folder and so holds only the discriminator. With objective.generator: frozen, the folder of the "
        "generator itself, which may also be a run of objective mlm; it is then read at every start.",
    )

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Replace `micro_batch: auto` by 1 row and set `largest_micro_batch`, which makes the run measure the number.

        The checks of the config need a number before `engine/micro_batch.py` has measured the largest one that fits. 1
        passes them for every number of ranks that divides the global batch.
        """
        if isinstance(value, dict) and value.get("micro_batch") == "auto":
            return {**value, "micro_batch": 1, "largest_micro_batch": True}
        return value

    def micro_batches(self, num_ranks: int) -> int:
        """Return the number of micro-batches of a rank in each step: global_batch / (micro_batch * num_ranks).

        It is 0 if that is not a whole number; this number of ranks then cannot run the config.

        Args:
            num_ranks: Number of ranks of the run, at least 1.
        """
        rows_per_pass = self.micro_batch * num_ranks
        if self.global_batch % rows_per_pass:
            return 0
        return self.global_batch // rows_per_pass

    def possible_ranks(self) -> list[int]:
        """Return the numbers of ranks that this config can run on, ascending.

        They are those for which global_batch is a multiple of micro_batch * ranks.
        """
        most_ranks = self.global_batch // self.micro_batch
        return [num_ranks for num_ranks in range(1, most_ranks + 1) if self.micro_batches(num_ranks)]


class GuardConfig(Section):
    """Limits beyond which a step is stopped (it updates no weights), or the run goes back to a checkpoint."""

    window: Annotated[int, Field(ge=2)] = Field(
        default=128,
        description="Number of most recent accepted steps (those that updated the weights) from which the mean and "
        "the standard deviation of the loss are computed. No step counts as a spike before that many were accepted.",
    )
    spike_sigma: Annotated[float, Field(ge=0)] = Field(
        default=6.0,
        description="A step is a spike if its loss exceeds the window's mean by more than this many standard "
        "deviations. It is then stopped, that is, it does not update the weights. 0: no step counts as a spike; a "
        "step whose loss or gradient is not finite is stopped in any case.",
    )
    max_in_a_row: Positive = Field(
        default=3, description="Number of consecutive stopped steps after which the run goes back to a checkpoint."
    )
    skip_before: NonNegative = Field(
        default=16,
        description="A run that goes back to a checkpoint skips the steps that were stopped in a row, and this many "
        "steps before the first of them. It skips fewer if even its oldest checkpoint is newer than these steps.",
    )
    max_rollbacks: NonNegative = Field(
        default=5,
        description="Number of times that a run may go back to a checkpoint. If it diverges again, it ends with exit "
        "code 78.",
    )


class GeneratorOptimizerConfig(Section):
    """Settings of the optimizer for the parameters that only the generator uses; unset keys are those of `optimizer`.

    The embeddings count as the generator's only with model.sharing none and gdes, where it has tables of its own.
    """

    lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Peak learning rate of the generator. Unset: optimizer.lr."
    )
    warmup_steps: NonNegative | None = Field(
        default=None,
        description="Number of steps in which the generator's learning rate rises linearly from 0. Unset: "
        "optimizer.warmup_steps.",
    )
    beta1: Probability | None = Field(
        default=None, description="Decay rate of the first moment of the generator. Unset: optimizer.beta1."
    )
    beta2: Probability | None = Field(
        default=None, description="Decay rate of the second moment of the generator. Unset: optimizer.beta2."
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Decoupled weight decay of the generator. Unset: optimizer.weight_decay."
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Upper limit of the norm of the generator's gradients. optimizer.clip_norm is then the limit for "
        "all other parameters. Unset: the same number for both norms.",
    )


class OptimizerConfig(Section):
    """AdamW as the paper used it (or LAMB or Muon), and the learning-rate schedule.

    After t of num_steps steps the learning rate is lr * min(1, t / warmup_steps) * (1 - t / num_steps) ** decay_power.
    """

    name: Literal["adamw", "lamb", "muon"] = Field(
        default="adamw",
        description="Optimizer. adamw: AdamW as in the paper. lamb: LAMB, which scales each parameter's update by "
        "the parameter's norm and needs engine.zero_stage: 0. muon: Muon for the matrices of the layers and AdamW for "
        "all other parameters, with the same lr and weight_decay; needs engine.zero_stage: 0.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        default=2e-4, description="Peak learning rate; 2e-4 is the paper's value for ELECTRA-Large."
    )
    warmup_steps: NonNegative = Field(
        default=10_000,
        description="Number of steps in which the learning rate rises linearly from 0. The decay also runs during "
        "these steps. 0: no warm-up.",
    )
    decay_power: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="Exponent of the decay factor (1 - step / num_steps) ** decay_power. 1: linear decay to 0. 0: no "
        "decay.",
    )
    beta1: Probability = Field(
        default=0.9, description="Decay rate of the first moment, the running mean of the gradient."
    )
    beta2: Probability = Field(
        default=0.999, description="Decay rate of the second moment, the running mean of the squared gradient."
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-6,
        description="Number added to the square root of the second moment, so that the update never divides by 0.",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01,
        description="Decoupled weight decay, multiplied by the learning rate. LayerNorm and bias parameters are not "
        "decayed.",
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="Upper limit of the global gradient norm; gradients with a larger norm are scaled down to it.",
    )
    implementation: Literal["auto", "apex", "deepspeed", "foreach"] = Field(
        default="auto",
        description="Code that runs the update. apex: NVIDIA apex (not for muon). deepspeed: DeepSpeed's fused "
        "AdamW (for adamw only). foreach: this project's code on torch._foreach. auto: on a CPU and for muon foreach; "
        "on a GPU apex if it is installed, otherwise deepspeed for adamw and foreach for lamb. auto also takes "
        "foreach if deepspeed's cannot be compiled, and with engine.offload_optimizer on a GPU; the log states the "
        "reason.",
    )
    generator: GeneratorOptimizerConfig | None = Field(
        default=None,
        description="Section with the generator's own learning rate, warm-up, betas, weight decay and gradient norm. "
        "Set it to {} for its own norm only. Unset: one optimizer with one norm for both towers, as in the paper.",
    )

    @property
    def for_generator(self) -> OptimizerConfig:
        """Return the settings of the generator's parameters: this section with the keys that `generator` sets."""
        if self.generator is None:
            return self
        return self.model_copy(update=self.generator.model_dump(exclude_none=True))


class EngineConfig(Section):
    """Settings of how the computation is distributed and saves memory; none of them changes what is computed."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="DeepSpeed ZeRO stage: which training state is split between the ranks. 0: none. 1: optimizer "
        "state. 2: gradients as well. 3: parameters as well.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Whether the optimizer state is kept in host memory instead of GPU memory (zero_stage 1 to 3).",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Whether only the input of each layer is kept for the backward pass and the layer is computed "
        "again there. Saves memory, costs time.",
    )
    attention: Literal["auto", "sdpa", "flash", "flex"] = Field(
        default="auto",
        description="Attention code. sdpa: torch's scaled_dot_product_attention with a bias that separates the "
        "examples of a row. flash: FlashAttention with dropout over each example alone; needs a GPU of compute "
        "capability 8.0 and train.precision bf16 or fp16. flex: FlexAttention, which skips the pairs of tokens from "
        "different examples; needs a GPU and model.attention_dropout: 0. auto: on a GPU flash with attention dropout, "
        "otherwise flex or flash, each only where it passes a trial; sdpa in all other cases.",
    )
    deterministic: bool = Field(
        default=True,
        description="Whether torch uses deterministic kernels on a GPU, so that a repeated step gives the same bits; "
        "docs/exactness.md has the exceptions. Without effect on a CPU, where steps repeat in any case.",
    )
    compile: bool = Field(
        default=False,
        description="Whether torch.compile compiles the layers of the towers (zero_stage 0 to 2). The first step then "
        "takes a minute longer, unless data.cache_dir holds the compiled code of an earlier start.",
    )
    early_generator: bool = Field(
        default=False,
        description="Whether the generator's gradients are computed before the discriminator runs, so that the "
        "activations of both towers are never in memory together (zero_stage 0 to 2).",
    )

    @model_validator(mode="after")
    def _whole_parameters(self) -> EngineConfig:
        """Raise ValueError if early_generator or compile is on with ZeRO stage 3.

        Both options need whole parameters on each rank, which stage 3 splits between the ranks.
        """
        if self.early_generator and self.zero_stage == 3:
            raise ValueError(
                "early_generator needs whole parameters, which zero_stage 3 splits; set engine.early_generator: false "
                "and use engine.activation_checkpointing: true, or set a lower engine.zero_stage"
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile needs whole parameters, which zero_stage 3 splits; set engine.compile: false or a lower "
                "engine.zero_stage"
            )
        return self


class CheckpointConfig(Section):
    """Settings of checkpoints: when they are saved, where they are written, and which of them are kept."""

    every_steps: Positive | Literal["auto"] = Field(
        default=1000,
        description="Steps between checkpoints. auto: the interval that loses the least time, computed from the "
        "duration of saves and the frequency of interruptions that this run has measured.",
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description="Local folders or s3:// prefixes. Every checkpoint is written to all of them; a restart prefers "
        "the first. Empty: checkpoints/ in the run folder.",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="URL of an S3-compatible service for the s3:// URLs in targets, for example "
        "http://10.0.0.1:9000. Unset: AWS.",
    )
    keep_last: Positive = Field(
        default=3,
        description="Number of newest checkpoints that are kept. Older ones are deleted unless another keep_* rule "
        "selects them.",
    )
    keep_every_steps: NonNegative = Field(
        default=0,
        description="Checkpoints at multiples of this number of steps are saved and never deleted. 0: no such rule.",
    )
    keep_steps: tuple[Positive, ...] = Field(
        default=(),
        description="Steps at which a checkpoint is saved in addition to every_steps and never deleted.",
    )
    keep_best: NonNegative = Field(
        default=0,
        description="Number of checkpoints that are kept because they are best on data.heldout: those with the "
        "highest context AUC or, for an objective without a discriminator, with the lowest loss. Only checkpoints "
        "saved at a step with an evaluation count. 0: no such rule.",
    )


class LogConfig(Section):
    """Settings of how often a run logs its progress and evaluates the model on held-out rows."""

    every_steps: Positive = Field(
        default=10, description="Steps between two log lines; each log line is also a record in metrics.jsonl."
    )
    eval_every_steps: NonNegative = Field(
        default=0,
        description="Steps between two evaluations on data.heldout. 0: only after the last step of the run.",
    )
    eval_rows: Positive = Field(
        default=512,
        description="Number of held-out rows in each evaluation. The context AUC uses more rows where these have "
        "fewer than 5,000 masked tokens.",
    )
    tensorboard: bool = Field(
        default=True, description="Whether TensorBoard event files are written into the run folder."
    )


class CorpusConfig(Section):
    """Settings of `electra-dist corpus build`, which turns text into rows and shards; training does not read them."""

    packing: Literal["rows", "none"] = Field(
        default="rows",
        description="How examples are placed in rows. rows: several whole examples share a row, and none attends to "
        "another. none: one example per row, the rest is padding.",
    )
    lowercase: bool = Field(
        default=True,
        description="Whether text is lower-cased and stripped of accents, as BERT's uncased vocabulary expects.",
    )
    single_segment_prob: Probability = Field(
        default=0.1,
        description="Probability that an example has one segment instead of two. Google's code uses 0.1.",
    )
    short_target_prob: Probability = Field(
        default=0.05,
        description="Probability that the target length of an example is drawn uniformly from [5, seq_len] tokens "
        "instead of being seq_len. Google's code uses 0.05.",
    )
    shard_size_mb: Annotated[float, Field(gt=0)] = Field(
        default=16.0, description="Target size of a shard file, in units of 1e6 bytes."
    )
    heldout_fraction: Probability = Field(
        default=0.0,
        description="Fraction of the documents that is written to OUTPUT/heldout instead of the training corpus. A "
        "hash of each document's text decides. 0: none.",
    )


class KernelsConfig(Section):
    """Choice of the implementation of the fused operations (Triton, CUDA or plain PyTorch)."""

    backend: Literal["auto", "triton", "cuda", "reference"] = Field(
        default="auto",
        description="Implementation of the fused operations. auto: triton on a GPU, reference elsewhere. triton: "
        "Triton kernels. cuda: the CUDA kernel of the one operation that has it, otherwise as auto. reference: plain "
        "PyTorch. A choice that cannot run on this machine is an error.",
    )


class ClusterConfig(Section):
    """Limits after which a rank counts as hung or a run is not restarted, and how long a node stays excluded.

    Nothing in this section changes what is computed.
    """

    hang_step_factor: Annotated[float, Field(gt=1)] = Field(
        default=5.0,
        description="A rank in a training step counts as hung if its last heartbeat (its sign of progress) is older "
        "than this factor times its measured step time and older than hang_step_floor_s.",
    )
    hang_step_floor_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="Least number of seconds without a heartbeat after which a rank in a training step counts as "
        "hung. It takes the place of hang_step_factor times the step time where steps are so short that this is less.",
    )
    hang_setup_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="Seconds without a heartbeat after which a rank counts as hung while it starts, restores a "
        "checkpoint or runs its first steps.",
    )
    hang_checkpoint_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="Seconds without a heartbeat after which a rank counts as hung while it saves a checkpoint.",
    )
    hang_eval_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="Seconds without a heartbeat after which a rank counts as hung during an evaluation.",
    )
    max_fruitless_restarts: Positive = Field(
        default=3,
        description="Number of restarts in a row that may end without having saved a checkpoint. After them the run "
        "is not restarted.",
    )
    strike_expires_h: Annotated[float, Field(gt=0)] = Field(
        default=24.0,
        description="Hours for which a strike, the record that a node was unhealthy, excludes that node from new "
        "submissions.",
    )


class PlanConfig(Section):
    """Hardware that `--dry-run` assumes for its estimates; a training run does not read this section."""

    gpu: str = Field(
        default="H100",
        description="GPU model whose peak dense bf16 throughput is assumed: H200, H100, A100 or V100.",
    )
    num_gpus: Positive = Field(default=8, description="Number of GPUs that the estimate assumes.")
    utilisation: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.4,
        description="Fraction of the GPUs' peak throughput that the estimate assumes (model FLOPs utilisation, MFU).",
    )


class Config(Section):
    """The whole configuration of a run, one field for each section; `config_file.load_config` reads it from YAML."""

    run_dir: str = Field(
        description="Folder of the run, for its config, checkpoints, metrics and report. The same folder resumes the "
        "run."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=42,
        description="Seed of everything random: initial weights, order of rows, masks, samples and dropout.",
    )
    model: ModelConfig = Field(description="Section with the shapes of both towers.")
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = Field(description="Section that names the corpus.")
    train: TrainConfig = Field(description="Section with the number of steps and the size of a step.")
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    corpus: CorpusConfig = CorpusConfig()
    kernels: KernelsConfig = KernelsConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """Raise ValueError if values of two sections contradict each other.

        An example is data.seq_len above model.max_positions.
        """
        if self.data.seq_len > self.model.max_positions:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} exceeds model.max_positions {self.model.max_positions}; lower "
                f"data.seq_len or raise model.max_positions"
            )
        if self.train.global_batch % self.train.micro_batch:
            raise ValueError(
                f"train.micro_batch {self.train.micro_batch} does not divide "
                f"train.global_batch {self.train.global_batch}; change one of them"
            )
        if self.engine.attention == "flex" and (self.model.attention_dropout or self.objective.name == "electric"):
            raise ValueError(
                "engine.attention: flex supports neither attention dropout nor the one-directional attention of "
                "objective electric; set model.attention_dropout: 0 and another objective.name, or set "
                "engine.attention: auto"
            )
        if self.engine.attention == "flash" and self.objective.name == "electric":
            raise ValueError(
                "engine.attention: flash does not support the one-directional attention of objective electric; set "
                "engine.attention: auto or another objective.name"
            )
        if self.engine.attention == "flash" and self.train.precision == "fp32":
            raise ValueError(
                "engine.attention: flash computes in bf16 or fp16 only, but train.precision is fp32; set "
                "train.precision: bf16 or engine.attention: auto"
            )
        trains_generator = self.objective.name != "mlm" and self.objective.generator == "trained"
        if self.optimizer.generator is not None and (not trains_generator or self.model.sharing == "all"):
            raise ValueError(
                "optimizer.generator needs a generator that is trained and has layers of its own; remove "
                "optimizer.generator, or set objective.generator: trained, another objective.name than mlm, and "
                "another model.sharing than all"
            )
        if self.engine.early_generator and self.objective.name in ("mlm", "electric", "adversarial"):
            raise ValueError(
                f"engine.early_generator: true works only if the generator learns from its own loss alone, unlike "
                f"with objective.name: {self.objective.name}; set engine.early_generator: false"
            )
        return self

    @model_validator(mode="after")
    def _generator_has_a_source(self) -> Config:
        """Raise ValueError if init_generator_from does not go with the rest of the config.

        A frozen generator needs it. For any other one it is used only together with a discriminator from init_from.
        """
        is_frozen = self.objective.generator == "frozen"
        if is_frozen and not self.train.init_generator_from:
            raise ValueError(
                "objective.generator: frozen needs train.init_generator_from; set it to the folder of a run with "
                "objective.name: mlm, or of a Hugging Face ElectraForMaskedLM"
            )
        if self.train.init_generator_from and not self.train.init_from and not is_frozen:
            raise ValueError(
                "train: init_generator_from needs init_from; set train.init_from to the folder of the discriminator, "
                "or objective.generator: frozen"
            )
        return self

    @property
    def starting_weights(self) -> TrainConfig:
        """Return section `train` for the weights that the trained towers begin with.

        Without init_generator_from if that names a frozen generator, which is not one of them.
        """
        if self.objective.generator != "frozen":
            return self.train
        return self.train.model_copy(update={"init_generator_from": None})

    @property
    def cache_folder(self) -> Path:
        """Return the folder in which this node keeps shards fetched from S3 and compiled code."""
        return Path(self.data.cache_dir or Path(self.run_dir) / CACHE_DIR)

    @property
    def checkpoint_urls(self) -> tuple[str, ...]:
        """Return the folders or S3 prefixes that every checkpoint is written to, the preferred one first.

        The default is checkpoints/ in the run folder.
        """
        return self.checkpoint.targets or (str(Path(self.run_dir) / CHECKPOINTS_DIR),)

    def identity(self, numerics: int = NUMERICS) -> dict[str, Any]:
        """Return the values that determine the results of a run, as a JSON tree.

        A run cannot resume from a checkpoint if one of them has changed since. All other values (number of ranks,
        micro-batch, ZeRO stage, logging) may change at a restart.

        Args:
            numerics: number of the draws and the rounding that the run uses; another one than NUMERICS gives the
                identity that an older version recorded for this config. The key is absent for 1, the first number.
        """
        tree = self.model_dump(mode="json")
        train_keys = ["num_steps", "global_batch", "precision"]
        train_keys += [key for key in ("init_from", "init_generator_from") if tree["train"][key]]
        objective = _without_new_defaults(tree["objective"])
        if not self.objective.draws_at_random:
            # Runs of versions without these keys have the same identity.
            objective = {key: value for key, value in objective.items() if key not in ("random_share", "random_from")}
        identity = {
            "seed": tree["seed"],
            "model": tree["model"],
            "objective": objective,
            "optimizer": self._optimizer_identity(),
            "data": {key: tree["data"][key] for key in ("seq_len", "shuffle_window_shards")},
            "train": {key: tree["train"][key] for key in train_keys},
        }
        if numerics != FIRST_NUMERICS:
            identity["numerics"] = numerics
        return identity

    def _optimizer_identity(self) -> dict[str, Any]:
        """Return the part of the identity that the section `optimizer` gives.

        It has no `implementation`, and `generator` only if that is set, with the keys that are set there.
        """
        section = self.optimizer.model_dump(mode="json", exclude={"implementation", "generator"})
        if self.optimizer.generator is not None:
            section["generator"] = self.optimizer.generator.model_dump(mode="json", exclude_none=True)
        return section

    def identity_sha256(self, numerics: int = NUMERICS) -> str:
        """Return the SHA-256 of `identity(numerics)` in hexadecimal.

        Checkpoints with another digest belong to another run, or to this run before NUMERICS was raised.
        """
        return hashlib.sha256(canonical_json(self.identity(numerics)).encode()).hexdigest()

    def older_identities(self) -> dict[int, str]:
        """Return the digests that versions with older numerics computed for this config: numerics -> digest."""
        return {numerics: self.identity_sha256(numerics) for numerics in range(FIRST_NUMERICS, NUMERICS)}


# Keys that are newer than runs that exist. At these values a run is the same as before there was such a key.
_NEW_DEFAULTS: dict[str, Any] = {"discriminator_mlm_weight": 0.0, "generator_sha256": None}


def _without_new_defaults(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section of the config without the keys of `_NEW_DEFAULTS` that have their default value.

    Identities do not list them, so that a run that was begun before a key existed keeps its identity.
    """
    return {key: value for key, value in section.items() if key not in _NEW_DEFAULTS or value != _NEW_DEFAULTS[key]}


def canonical_json(tree: Any) -> str:
    """Return a JSON text that is equal for equal values: sorted keys, no spaces, ASCII only.

    Digests of configs and manifests are computed from this text.

    Raises:
        ValueError: The tree holds NaN or an infinity, which JSON does not have.
    """
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

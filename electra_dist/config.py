"""The configuration: one frozen pydantic tree. YAML in (`config_file.py`), DeepSpeed JSON out (`engine/engine.py`).

Every field says what it is and in what unit; that text is the manual (`electra-dist config --describe`). Unknown keys
are errors. Each component is passed the smallest section it needs. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]

CHECKPOINTS_DIR = "checkpoints"  # in the run folder, unless checkpoint.targets names other places
CACHE_DIR = "cache"  # in the run folder, unless data.cache_dir names another place


class Section(BaseModel):
    """A frozen section: keyword-only, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TowerConfig(Section):
    """One transformer tower."""

    hidden_size: Positive = Field(description="width of the tower, in features")
    num_layers: Positive = Field(description="transformer layers")
    num_heads: Positive = Field(description="attention heads; must divide hidden_size")
    intermediate_size: Positive = Field(description="width of the feed-forward layer, in features")

    @model_validator(mode="after")
    def _heads_divide(self) -> TowerConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}")
        return self


class ModelConfig(Section):
    """Both towers and what they share."""

    vocab_size: Positive = Field(default=30522, description="WordPiece entries; must be the corpus's")
    embedding_size: Positive = Field(default=1024, description="width of the shared embedding tables, in features")
    max_positions: Positive = Field(default=512, description="rows of the position table, in tokens")
    type_vocab_size: Positive = Field(default=2, description="token types (segment A, segment B)")
    discriminator: TowerConfig = Field(description="the tower that is kept")
    generator: TowerConfig = Field(
        description="the small tower that fills masked positions; sizes: docs/objectives.md"
    )
    sharing: Literal["embeddings", "none", "gdes", "all"] = Field(
        default="embeddings",
        description="what the towers share. embeddings: the token, position and type tables and their LayerNorm "
        "(Google's code; the paper names tokens and positions); none: nothing; gdes: the discriminator's tables are "
        "the generator's, without gradient, plus a difference of its own (DeBERTa-v3); all: embeddings and layers",
    )
    generator_embedding_size: Positive | None = Field(
        default=None,
        description="width of the generator's own tables with sharing `none`, in features; default: embedding_size "
        "(Google's code: generator.hidden_size)",
    )
    hidden_dropout: Probability = Field(default=0.1, description="dropout on embeddings and sub-layer outputs")
    attention_dropout: Probability = Field(default=0.1, description="dropout on attention probabilities")
    layer_norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-12, description="epsilon of every LayerNorm")
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the truncated-normal initialisation"
    )

    @model_validator(mode="after")
    def _can_share(self) -> ModelConfig:
        if self.sharing == "all" and self.generator != self.discriminator:
            raise ValueError("sharing `all` needs two towers of one size; set model.generator to the discriminator's")
        if self.generator_embedding_size and self.sharing != "none":
            raise ValueError("generator_embedding_size needs sharing `none`; with shared tables there is one width")
        return self

    @property
    def generator_embedding_width(self) -> int:
        """Width of the tables that the generator reads, in features."""
        return self.generator_embedding_size or self.embedding_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table: the vocabulary rounded up to 128, so that rows of logits are aligned on a GPU."""
        return -(-self.vocab_size // 128) * 128


class ObjectiveConfig(Section):
    """What is learnt: masking, sampling and the losses."""

    name: Literal["rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial"] = Field(
        default="rtd",
        description="rtd: ELECTRA; mlm: BERT without NSP; rtd_masked_only: ELECTRA 15 %; replace_mlm: the large tower "
        "predicts the masked tokens from the generator's text; all_tokens_mlm: every token, with a copy gate; "
        "electric: two-tower cloze model; adversarial: the generator works against the discriminator (REINFORCE)",
    )
    generator: Literal["trained", "uniform", "unigram"] = Field(
        default="trained",
        description="where replacements come from: the generator; any token alike (Google's code); tokens as often as "
        "in the corpus (the paper)",
    )
    generator_only_steps: NonNegative = Field(
        default=0,
        description="two-stage training: steps of MLM on the generator alone; the discriminator then begins as its "
        "copy and the generator is frozen; 0: both from the start",
    )
    mask_prob: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.25, description="fraction of a row's real tokens that is masked (0.25 means 25 %)"
    )
    mask_token_prob: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.85,
        description="fraction of the chosen positions that show [MASK], the rest keep their token (Google's code: "
        "0.85; the paper: 1.0)",
    )
    masking: Literal["without_replacement", "reference"] = Field(
        default="without_replacement",
        description="how positions are drawn; `reference` repeats Google's draw with replacement, duplicates and all",
    )
    mlm_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="weight of the generator's loss, whatever it learns by (with `mlm`: of the only loss)"
    )
    rtd_weight: Annotated[float, Field(ge=0)] = Field(default=50.0, description="weight of the discriminator's loss")
    token_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="weight of the large tower's loss where it predicts tokens (replace_mlm, all_tokens_mlm)",
    )
    temperature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="divides the generator's logits before sampling (never in its loss)"
    )
    disallow_correct: bool = Field(default=False, description="never sample the true token")
    loss_mean: Literal["global", "per_replica"] = Field(
        default="global",
        description="token mean over the global batch, or (Google's way) over each micro-batch, then averaged",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> ObjectiveConfig:
        if self.generator != "trained" and self.name in ("mlm", "electric", "adversarial"):
            raise ValueError(f"generator `{self.generator}` does not go with objective `{self.name}`")
        if self.generator_only_steps and (self.name, self.generator) != ("rtd", "trained"):
            raise ValueError("generator_only_steps needs objective `rtd` and a trained generator")
        if self.name == "adversarial" and self.disallow_correct:
            raise ValueError("objective `adversarial` may sample the true token; set disallow_correct: false")
        return self


class DataConfig(Section):
    """Where rows come from and in which order."""

    corpus: str = Field(description="folder or s3:// prefix that holds corpus.json and the shards")
    heldout: str | None = Field(default=None, description="a second corpus that is never trained on; evaluated")
    seq_len: Positive = Field(default=512, description="tokens per row; must be the corpus's")
    shuffle_window_shards: Positive = Field(default=64, description="shards whose rows are shuffled together")
    cache_dir: str | None = Field(
        default=None, description="node-local folder for shards fetched from S3; default: cache/ in the run folder"
    )
    cache_limit_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="size that cache_dir is kept below, in 1e9 bytes; default: the disk is the limit"
    )
    fetch_threads: Positive = Field(default=8, description="parallel shard downloads per node")
    endpoint_url: str | None = Field(default=None, description="S3 endpoint other than AWS's, for every s3:// here")


class TrainConfig(Section):
    """The step."""

    num_steps: Positive = Field(description="optimizer steps of the whole run")
    global_batch: Positive = Field(description="rows per step over all ranks")
    micro_batch: Positive = Field(
        description="rows per rank per forward pass, the rest is gradient accumulation; auto: the most that fit"
    )
    largest_micro_batch: bool = Field(default=False, description="what `micro_batch: auto` means; set that")
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="compute precision; master weights, moments and gradient sums are always fp32"
    )
    skip_steps: tuple[NonNegative, ...] = Field(
        default=(), description="steps (from 0) that are passed over: their rows are not used, nothing is updated"
    )
    init_from: str | None = Field(
        default=None,
        description="begin with the weights of a run, an export or a Hugging Face ELECTRA folder, at step 0 with "
        "new moments; read until the run has a checkpoint of its own",
    )
    init_generator_from: str | None = Field(
        default=None, description="with a Hugging Face folder in init_from: the one of its generator"
    )

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Until it is found out, one row a pass: what any number of ranks can share."""
        if isinstance(value, dict) and value.get("micro_batch") == "auto":
            return {**value, "micro_batch": 1, "largest_micro_batch": True}
        return value

    @model_validator(mode="after")
    def _generator_of_something(self) -> TrainConfig:
        if self.init_generator_from and not self.init_from:
            raise ValueError("init_generator_from needs init_from, the folder of the discriminator")
        return self

    def micro_batches(self, num_ranks: int) -> int:
        """Return how many micro-batches each of `num_ranks` ranks runs in a step; 0 if they cannot share it evenly."""
        micro_batches, rest = divmod(self.global_batch, self.micro_batch * num_ranks)
        return 0 if rest else micro_batches

    def possible_ranks(self) -> list[int]:
        """Return the numbers of ranks that can share the global batch evenly, ascending."""
        most = self.global_batch // self.micro_batch
        return [ranks for ranks in range(1, most + 1) if self.micro_batches(ranks)]


class GuardConfig(Section):
    """When a step is stopped before the optimizer, and when the run goes back to a checkpoint."""

    window: Annotated[int, Field(ge=2)] = Field(default=128, description="accepted steps that a spike is measured by")
    spike_sigma: Annotated[float, Field(ge=0)] = Field(
        default=6.0, description="standard deviations above the window's mean loss that make a spike; 0: never"
    )
    max_in_a_row: Positive = Field(default=3, description="stopped steps in a row that send the run back")
    skip_before: NonNegative = Field(
        default=16, description="steps before the first stopped one that are skipped too when the run goes back"
    )
    max_rollbacks: NonNegative = Field(default=5, description="times that a run may go back before it ends with 78")


class OptimizerConfig(Section):
    """AdamW as the paper used it, and its schedule: lr * min(1, t/warmup) * (1 - t/num_steps) ** decay_power."""

    name: Literal["adamw", "lamb"] = Field(
        default="adamw", description="lamb: each parameter's step is scaled by its norm (engine.zero_stage 0 only)"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=2e-4, description="peak learning rate")
    warmup_steps: NonNegative = Field(default=10_000, description="linear warm-up, in steps; overlaps the decay")
    decay_power: Annotated[float, Field(ge=0)] = Field(default=1.0, description="power of the decay to zero")
    beta1: Probability = Field(default=0.9, description="decay of the first moment")
    beta2: Probability = Field(default=0.999, description="decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="decoupled, times lr; not on LayerNorm and bias"
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="bound of the global gradient norm")
    implementation: Literal["auto", "apex", "deepspeed", "foreach"] = Field(
        default="auto",
        description="auto: apex's, else (adamw) DeepSpeed's fused one on a GPU; our foreach one on a CPU",
    )


class EngineConfig(Section):
    """DeepSpeed. Nothing here changes what is computed, only where."""

    zero_stage: Literal[0, 1, 2, 3] = Field(default=1, description="ZeRO stage")
    offload_optimizer: bool = Field(default=False, description="keep optimizer state in host memory (stages 1 to 3)")
    activation_checkpointing: bool = Field(
        default=False, description="keep only what goes in between layers, and compute it again in the backward pass"
    )
    attention: Literal["auto", "sdpa", "flex"] = Field(
        default="auto",
        description="flex: FlexAttention, which skips what lies between examples (a GPU, no attention dropout); sdpa: "
        "torch's own with a bias; auto: flex where it can run and passes a trial",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile for the towers' layers (stages 0 to 2): the first step takes a minute longer, "
        "unless data.cache_dir has the code from before",
    )
    early_generator: bool = Field(
        default=False,
        description="make the generator's gradients before the discriminator runs, so that the activations of both "
        "are never in memory together (stages 0 to 2)",
    )

    @model_validator(mode="after")
    def _whole_parameters(self) -> EngineConfig:
        if self.early_generator and self.zero_stage == 3:
            raise ValueError("early_generator needs whole parameters; with zero_stage 3 use activation_checkpointing")
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile needs whole parameters; with zero_stage 3 leave it out")
        return self


class CheckpointConfig(Section):
    """When to save, where, and what to keep."""

    every_steps: Positive | Literal["auto"] = Field(
        default=1000,
        description="steps between checkpoints; auto: what loses least, from the measured stall and interruptions",
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description="folders or s3:// prefixes; each checkpoint is written to all; default: checkpoints/ of the run",
    )
    endpoint_url: str | None = Field(default=None, description="S3 endpoint other than AWS's, for targets")
    keep_last: Positive = Field(default=3, description="newest checkpoints kept")
    keep_every_steps: NonNegative = Field(
        default=0, description="checkpoints of steps that this divides are kept for ever; 0: none"
    )
    keep_steps: tuple[Positive, ...] = Field(
        default=(), description="steps that are saved besides, and whose checkpoints are kept for ever"
    )
    keep_best: NonNegative = Field(default=0, description="checkpoints of the lowest held-out RTD loss kept")


class LogConfig(Section):
    """What a user sees."""

    every_steps: Positive = Field(default=10, description="steps between log lines and metrics records")
    eval_every_steps: NonNegative = Field(default=0, description="steps between evaluations; 0: only at the end")
    eval_rows: Positive = Field(default=512, description="held-out rows per evaluation")
    tensorboard: bool = Field(default=True, description="write TensorBoard events into the run folder")


class CorpusConfig(Section):
    """How `electra-dist corpus build` makes rows."""

    packing: Literal["rows", "none"] = Field(
        default="rows", description="rows: several examples share a row, none crossing; none: one example a row"
    )
    lowercase: bool = Field(default=True, description="lower-case and strip accents (BERT uncased)")
    single_segment_prob: Probability = Field(
        default=0.1, description="examples with one segment only (reference: 0.1)"
    )
    short_target_prob: Probability = Field(
        default=0.05, description="examples with a target length drawn uniformly from [5, seq_len] (reference: 0.05)"
    )
    shard_size_mb: Annotated[float, Field(gt=0)] = Field(default=16.0, description="target size of a shard, MB")
    heldout_fraction: Probability = Field(
        default=0.0, description="fraction of documents written to OUTPUT/heldout instead, chosen by content hash"
    )


class KernelsConfig(Section):
    """Which implementation of the fused operations runs."""

    backend: Literal["auto", "triton", "cuda", "reference"] = Field(
        default="auto", description="auto: triton on a GPU, the plain-PyTorch reference elsewhere"
    )


class ClusterConfig(Section):
    """How a run is watched and what counts against a node. Nothing here changes what is computed."""

    hang_step_factor: Annotated[float, Field(gt=1)] = Field(
        default=5.0, description="a rank is hung after this many learned step times without a heartbeat ..."
    )
    hang_step_floor_s: Annotated[float, Field(gt=0)] = Field(default=30.0, description="... but never sooner, seconds")
    hang_setup_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="the same for start, restore and the first steps, seconds"
    )
    hang_checkpoint_s: Annotated[float, Field(gt=0)] = Field(default=600.0, description="the same for a save, seconds")
    hang_eval_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="the same for an evaluation, seconds"
    )
    max_fruitless_restarts: Positive = Field(
        default=3, description="restarts in a row without a new checkpoint that end the run"
    )
    strike_expires_h: Annotated[float, Field(gt=0)] = Field(
        default=24.0, description="hours that a strike keeps a node out of the next submission"
    )


class PlanConfig(Section):
    """Assumptions of `--dry-run`; they change nothing in a run."""

    gpu: str = Field(default="H100", description="GPU whose dense bf16 peak is assumed (H200, H100, A100, V100)")
    num_gpus: Positive = Field(default=8, description="GPUs assumed")
    utilisation: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.4, description="share of the peak assumed (MFU)"
    )


class Config(Section):
    """A run."""

    run_dir: str = Field(description="folder of the run: config, checkpoints, metrics, report")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=42, description="seed of everything random")
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig
    train: TrainConfig
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
        if self.data.seq_len > self.model.max_positions:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} exceeds model.max_positions {self.model.max_positions}"
            )
        if self.train.global_batch % self.train.micro_batch:
            raise ValueError(
                f"train.micro_batch {self.train.micro_batch} does not divide "
                f"train.global_batch {self.train.global_batch}"
            )
        if self.engine.attention == "flex" and (self.model.attention_dropout or self.objective.name == "electric"):
            raise ValueError(
                "engine.attention: flex knows neither dropout nor directions: set model.attention_dropout to 0 and "
                "another objective than electric, or leave it out"
            )
        if self.engine.early_generator and self.objective.name in ("mlm", "electric", "adversarial"):
            raise ValueError(
                f"engine.early_generator: objective {self.objective.name} has no generator whose loss is all that it "
                f"learns by; leave it out"
            )
        return self

    @property
    def cache_folder(self) -> Path:
        """What this node keeps: shards fetched from S3, compiled code."""
        return Path(self.data.cache_dir or Path(self.run_dir) / CACHE_DIR)

    @property
    def checkpoint_urls(self) -> tuple[str, ...]:
        """Where every checkpoint is written, the preferred place first; default: checkpoints/ in the run folder."""
        return self.checkpoint.targets or (str(Path(self.run_dir) / CHECKPOINTS_DIR),)

    def identity(self) -> dict[str, Any]:
        """What defines the trajectory of a run. All else (ranks, ZeRO stage, logging) may change at a restart."""
        tree = self.model_dump(mode="json")
        origin = [key for key in ("init_from", "init_generator_from") if tree["train"][key]]
        return {
            "seed": tree["seed"],
            "model": tree["model"],
            "objective": tree["objective"],
            "optimizer": {k: v for k, v in tree["optimizer"].items() if k != "implementation"},
            "data": {k: tree["data"][k] for k in ("seq_len", "shuffle_window_shards")},
            "train": {k: tree["train"][k] for k in ("num_steps", "global_batch", "precision", *origin)},
        }

    def identity_sha256(self) -> str:
        """Digest of `identity()`: a checkpoint of another digest belongs to another run."""
        return hashlib.sha256(canonical_json(self.identity()).encode()).hexdigest()


def canonical_json(tree: Any) -> str:
    """One text for one value: sorted keys, no spaces, ASCII."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

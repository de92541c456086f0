"""Define the sections `model` and `objective`: the shapes of both towers, and what they learn."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from electra_dist.config_sections.facts import OBJECTIVES, ObjectiveFacts
from electra_dist.config_sections.section import NonNegative, Probability, Section, Size
from electra_dist.schedule import (
    FractionOrSchedule,
    InnerFractionOrSchedule,
    NonNegativeOrSchedule,
    PositiveOrSchedule,
    Schedule,
    largest_value,
)

_VOCAB_MULTIPLE = 128  # Rows of the token table are padded to a multiple of this.
# Defaults of these keys for a config with `architecture: modern`; they are the values of ModernBERT.
_MODERN_DEFAULTS = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-5}


class TowerConfig(Section):
    """Shape of one of ELECTRA's two transformers ("towers"): the discriminator or the generator."""

    hidden_size: Size = Field(description="Width of the tower: number of features of each token in every layer.")
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = Field(
        description="Number of transformer layers in the tower."
    )
    num_heads: Size = Field(description="Number of attention heads in each layer; must divide hidden_size.")
    intermediate_size: Size = Field(
        description="Width of the feed-forward network in each layer, in features; BERT uses 4 x hidden_size. With "
        "model.architecture: modern, this is the width after gating; ModernBERT uses 1.5 x hidden_size."
    )

    @model_validator(mode="after")
    def _check_num_heads(self) -> TowerConfig:
        """Refuse a number of heads that does not divide hidden_size, because all heads get equal parts of it."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; change one of them"
            )
        return self


class ModelConfig(Section):
    """Shapes of the two transformers ("towers"), the weights that they share, dropout and initialisation."""

    architecture: Literal["bert", "modern"] = Field(
        default="bert",
        description="Architecture of both towers. bert: as in the ELECTRA paper, with a table of positions and "
        "LayerNorm after each sub-layer. modern: as in ModernBERT, with rotary positions, LayerNorm before each "
        "sub-layer, a gated feed-forward network, local and global attention, and almost no biases.",
    )
    global_every: Size = Field(
        default=3,
        description="With architecture: modern, the spacing of global layers, in which a token attends to its whole "
        "example: with 3, layers 0, 3, 6 and so on are global. In all other layers a token attends to a window. "
        "1: all layers are global.",
    )
    local_window: Annotated[int, Field(ge=2, le=2**24)] = Field(
        default=128,
        description="With architecture: modern, the size of the window in local layers, in tokens: a token attends "
        "to the tokens up to half of it away on each side.",
    )
    global_rope_theta: Annotated[float, Field(gt=1)] = Field(
        default=160000.0,
        description="With architecture: modern, the base of the wavelengths of rotary positions in global layers. "
        "ModernBERT uses 10000 for rows of 1,024 tokens and 160000 for rows of 8,192.",
    )
    local_rope_theta: Annotated[float, Field(gt=1)] = Field(
        default=10000.0,
        description="With architecture: modern, the base of the wavelengths of rotary positions in local layers.",
    )
    vocab_size: Size = Field(
        default=30522,
        description="Number of WordPiece tokens; must equal the size of the vocabulary that the corpus was built "
        "with. 30522 is BERT's uncased vocabulary.",
    )
    embedding_size: Size = Field(
        default=1024,
        description="Width of the embedding tables that the towers share, in features. A tower with another "
        "hidden_size projects the embeddings to its own width.",
    )
    max_positions: Size = Field(
        default=512,
        description="Number of positions that have an embedding, which is the longest row the model can read, in "
        "tokens. Must be at least data.seq_len. With architecture: modern there is no table of positions, and an "
        "export states this number as the longest row.",
    )
    type_vocab_size: Size = Field(
        default=2,
        description="Number of token types; the two types distinguish segment A from segment B. Must be at least 2 "
        "with architecture: bert.",
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
    generator_embedding_size: Size | None = Field(
        default=None,
        description="Width of the generator's own embedding tables, in features; valid only with sharing: none. "
        "Unset: embedding_size. Google's code uses generator.hidden_size.",
    )
    hidden_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability on the embeddings and on the output of each attention and feed-forward "
        "sub-layer. With architecture: modern the default is 0.",
    )
    attention_dropout: Probability = Field(
        default=0.1,
        description="Dropout probability on the attention weights, after the softmax. Must be 0 for "
        "engine.attention: flex. With architecture: modern the default is 0.",
    )
    layer_norm_eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-12,
        description="Epsilon that every LayerNorm adds to the variance. With architecture: modern the default is "
        "1e-5.",
    )
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02,
        description="Standard deviation of the truncated normal distribution from which weights are initialised.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_architecture(cls, section: Any) -> Any:
        """If `architecture` is `modern`, use `_MODERN_DEFAULTS` for the keys that the config does not set."""
        if isinstance(section, dict) and section.get("architecture") == "modern":
            return _MODERN_DEFAULTS | section
        return section

    @model_validator(mode="after")
    def _is_modern_shape(self) -> ModelConfig:
        """Refuse shapes of the towers that the architecture `modern` does not support.

        Rotary positions rotate pairs of features, so the width of a head must be even. The embeddings must be as wide
        as the discriminator, because Hugging Face's ModernBERT has no projection between them.
        """
        if self.architecture != "modern":
            return self
        if self.embedding_size != self.discriminator.hidden_size:
            raise ValueError(
                f"architecture `modern` needs embedding_size {self.embedding_size} to equal discriminator.hidden_size "
                f"{self.discriminator.hidden_size}; set model.embedding_size: {self.discriminator.hidden_size}"
            )
        for tower in (self.discriminator, self.generator):
            head_width = tower.hidden_size // tower.num_heads
            if head_width % 2:
                raise ValueError(
                    f"architecture `modern` needs heads of an even width, but hidden_size {tower.hidden_size} with "
                    f"num_heads {tower.num_heads} gives {head_width}; change num_heads or hidden_size"
                )
        return self

    @model_validator(mode="after")
    def _can_share(self) -> ModelConfig:
        """Refuse tower shapes that contradict `sharing`, such as unequal towers that share all weights."""
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
        """Return the width of the embedding tables that the generator reads, in features."""
        return self.generator_embedding_size or self.embedding_size

    def is_global(self, layer: int) -> bool:
        """Return whether tokens in layer `layer` (from 0) attend to their whole example and not only to a window."""
        return self.architecture == "bert" or layer % self.global_every == 0

    def visible_keys(self, num_layers: int, seq_len: int) -> int:
        """Return how many tokens a token attends to at most, added up over the layers of one network.

        A global layer counts all `seq_len` tokens of a row, a local layer the tokens of its window.
        """
        num_global = num_layers if self.architecture == "bert" else math.ceil(num_layers / self.global_every)
        window = min(seq_len, 2 * (self.local_window // 2) + 1)
        return num_global * seq_len + (num_layers - num_global) * window

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
        """Refuse an option that does not go with the chosen objective."""
        if self.generator != "trained" and not self.facts.generator_can_be_fixed:
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
        takes_joint_mlm = self.facts.takes_joint_mlm and not self.generator_only_steps
        if self.discriminator_mlm_weight and not takes_joint_mlm:
            raise ValueError(
                "discriminator_mlm_weight needs objective `rtd` or `rtd_masked_only` and no generator_only_steps; set "
                "objective.discriminator_mlm_weight: 0, or choose another objective.name"
            )
        if self.facts.generator_estimates_reward and self.disallow_correct:
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
        if self.draws_at_random and (is_fixed_generator or not self.facts.generator_can_be_fixed):
            raise ValueError(
                f"random_share does not go with objective `{self.name}` and generator `{self.generator}`, because it "
                f"takes the place of some of a trained generator's samples; remove objective.random_share, or set "
                f"objective.name: rtd and objective.generator: trained"
            )
        return self

    @property
    def facts(self) -> ObjectiveFacts:
        """Return what is true of the objective, whatever the other keys are."""
        return OBJECTIVES[self.name]

    @property
    def runs_generator(self) -> bool:
        """Return whether a generator network draws the replacements, be it trained or frozen."""
        return self.facts.has_generator and self.generator in ("trained", "frozen")

    @property
    def trains_generator(self) -> bool:
        """Return whether the objective trains a generator network.

        `mlm` does not, because it replaces no tokens. The other objectives do, unless `generator` is "uniform" or
        "unigram" (replacements have fixed probabilities) or "frozen" (the generator's network is not trained).
        """
        return self.facts.has_generator and self.generator == "trained"

    @property
    def draws_at_random(self) -> bool:
        """Return whether random_share is above 0 at some step, so that some replacements are drawn at random."""
        return largest_value(self.random_share) > 0


def check_sharing(model: ModelConfig, objective: ObjectiveConfig) -> None:
    """Raise ValueError if the shapes of both networks, or the weights that they share, contradict the objective."""
    if objective.generator_only_steps:
        _check_two_stage(model)
    if objective.generator == "frozen" and model.sharing not in ("embeddings", "none"):
        raise ValueError(
            f"model.sharing is {model.sharing}, but a frozen generator has tables and layers of its own; remove "
            f"model.sharing, or set it to none"
        )
    has_one_tower = not objective.runs_generator
    if has_one_tower and model.sharing != "embeddings":
        raise ValueError(
            f"model.sharing is {model.sharing}, but objective.name {objective.name} with objective.generator "
            f"{objective.generator} has one tower only; remove model.sharing from the config"
        )
    if objective.facts.has_cloze_generator and model.sharing == "all":
        raise ValueError(
            "model.sharing is all, but the generator of objective.name electric is two causal towers, which cannot be "
            "the discriminator; set model.sharing: embeddings"
        )


def _check_two_stage(model: ModelConfig) -> None:
    """Raise ValueError unless generator and discriminator have the same sizes and share no parameters.

    After `objective.generator_only_steps` steps the discriminator starts as a copy of the generator, so the sizes must
    be equal. From then on the generator is frozen, so the discriminator cannot train shared parameters.
    """
    same_layers = model.generator == model.discriminator
    same_embedding_width = model.generator_embedding_width == model.embedding_size
    if not same_layers or not same_embedding_width:
        raise ValueError(
            "objective.generator_only_steps: the discriminator starts as a copy of the generator, so they must be "
            "of one size; set model.generator to the sizes of model.discriminator and remove "
            "model.generator_embedding_size"
        )
    if model.sharing != "none":
        raise ValueError(
            f"objective.generator_only_steps: a frozen generator cannot share parameters with the discriminator, "
            f"but model.sharing is {model.sharing}; set model.sharing: none"
        )

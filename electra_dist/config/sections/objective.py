"""Define the section `objective`: what the towers learn, and what is true of each objective.

Everything that depends on the kind of an objective reads `OBJECTIVES`: networks and heads, parameters and FLOPs, the
memory of a plan, the checks of a config, the export. A new objective is its class, one row there, and its name in
`ObjectiveConfig`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from electra_dist.config.schedule import (
    FractionOrSchedule,
    InnerFractionOrSchedule,
    NonNegativeOrSchedule,
    PositiveOrSchedule,
    largest_value,
)
from electra_dist.config.sections.base import NonNegative, Section


class ObjectiveFacts(NamedTuple):
    """Properties of a pretraining objective, such as whether it has a generator and what the large tower predicts.

    The defaults are those of replaced-token detection.
    """

    has_generator: bool = True  # without one, the large tower is the only network, and it reads [MASK]
    generator_can_be_fixed: bool = True  # `objective.generator` and `objective.random_share` may replace its samples
    generator_estimates_reward: bool = False  # it has a second head, and it may always sample the true token
    has_cloze_generator: bool = False  # two one-way towers, which together predict every token from its two sides
    predicts_tokens: bool = False  # the large tower predicts tokens and does not detect replacements
    copies_tokens: bool = False  # it predicts at every position, and a gate may copy the input token
    gives_energies: bool = False  # the detection head's output is an energy, without the noise model's offset
    takes_joint_mlm: bool = False  # `objective.discriminator_mlm_weight` may add a head that predicts tokens


OBJECTIVES = {
    "rtd": ObjectiveFacts(takes_joint_mlm=True),
    "mlm": ObjectiveFacts(has_generator=False, generator_can_be_fixed=False, predicts_tokens=True),
    "rtd_masked_only": ObjectiveFacts(takes_joint_mlm=True),
    "replace_mlm": ObjectiveFacts(predicts_tokens=True),
    "all_tokens_mlm": ObjectiveFacts(predicts_tokens=True, copies_tokens=True),
    "electric": ObjectiveFacts(generator_can_be_fixed=False, has_cloze_generator=True, gives_energies=True),
    "adversarial": ObjectiveFacts(generator_can_be_fixed=False, generator_estimates_reward=True),
}


class ObjectiveConfig(Section):
    """Settings of what is learned: the objective, which tokens are masked, what replaces them, the loss weights."""

    name: Literal["rtd", "mlm", "rtd_masked_only", "replace_mlm", "all_tokens_mlm", "electric", "adversarial"] = Field(
        default="rtd",
        description="Pretraining objective. rtd: ELECTRA's replaced-token detection. mlm: BERT's masked language "
        "modelling, without a generator. rtd_masked_only: ELECTRA 15 %. replace_mlm, all_tokens_mlm: the paper's. "
        "electric: Electric. adversarial: rtd with a generator that is trained by REINFORCE to fool the "
        "discriminator. docs/objectives.md says what the towers read and learn.",
    )
    generator: Literal["trained", "frozen", "uniform", "unigram"] = Field(
        default="trained",
        description="Source of the replacement tokens. trained: the generator network. frozen: a ready network that "
        "does not learn, named by train.init_generator_from. uniform: every token alike. unigram: tokens by their "
        "frequency in the corpus.",
    )
    generator_sha256: str | None = Field(
        default=None,
        description="SHA-256 of the weights of a frozen generator. A run fills it in at its first start.",
    )
    generator_only_steps: NonNegative = Field(
        default=0,
        description="Two-stage training: number of steps that train only the generator, which is then frozen; the "
        "discriminator starts as its copy. Needs model.sharing: none and towers of the same shape.",
    )
    mask_prob: InnerFractionOrSchedule = Field(
        default=0.25,
        description="Fraction of a row's tokens, padding excluded, that is masked (0.25 means 25 %).",
    )
    mask_token_prob: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.85,
        description="Fraction of the masked positions that show [MASK]; the others keep their token.",
    )
    masking: Literal["without_replacement", "reference"] = Field(
        default="without_replacement",
        description="How masked positions are drawn. without_replacement: each position at most once. reference: "
        "with replacement, as in Google's code.",
    )
    mlm_weight: NonNegativeOrSchedule = Field(
        default=1.0,
        description="Weight of the generator's loss in the total loss, or with objective mlm of the only loss.",
    )
    rtd_weight: NonNegativeOrSchedule = Field(
        default=50.0,
        description="Weight of the discriminator's loss in the total loss (the paper's lambda).",
    )
    rtd_balance: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of the replaced tokens in a row's weight in the discriminator's loss, however many they "
        "are; 0.5: both classes count alike. The sum of a row's weights does not change, and a row of one class has "
        "equal weights. Needs objective rtd. Unset: every token counts alike.",
    )
    token_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="Weight of the loss with which the discriminator's tower predicts tokens (replace_mlm and "
        "all_tokens_mlm).",
    )
    discriminator_mlm_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Joint MLM: weight of a second loss of the discriminator, which then also predicts the original "
        "tokens at the masked positions. Needs objective rtd or rtd_masked_only. 0: none.",
    )
    temperature: PositiveOrSchedule = Field(
        default=1.0,
        description="Divides the generator's logits before a replacement is sampled; above 1, samples are more "
        "random.",
    )
    disallow_correct: bool = Field(
        default=False,
        description="Whether sampling excludes the original token, so that every sample is a replacement.",
    )
    random_share: FractionOrSchedule = Field(
        default=0.0,
        description="Fraction of the masked positions whose replacement is drawn from random_from instead of from the "
        "generator.",
    )
    random_from: Literal["uniform", "unigram"] = Field(
        default="uniform",
        description="Tokens from which random_share draws. uniform: all but the special ones alike. unigram: by their "
        "frequency in the corpus.",
    )
    loss_mean: Literal["global", "per_replica"] = Field(
        default="global",
        description="How a loss is averaged over tokens. global: one mean over the global batch. per_replica: a mean "
        "for each micro-batch, then the mean of these means.",
    )

    @property
    def facts(self) -> ObjectiveFacts:
        """Return the properties that the objective's name alone decides."""
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

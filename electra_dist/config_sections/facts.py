"""State what is true of each pretraining objective, whatever the other keys of a config are.

Everything that depends on the kind of an objective reads this table: networks and heads, parameters and FLOPs, the
memory of a plan, the checks of a config, the export. A new objective is its class, one row here, and its name in
`ObjectiveConfig`.
"""

from __future__ import annotations

from typing import NamedTuple


class ObjectiveFacts(NamedTuple):
    """Properties of an objective. The defaults are those of replaced-token detection."""

    has_generator: bool = True  # without one, the large tower is the only network, and it reads [MASK]
    generator_can_be_fixed: bool = True  # `objective.generator` and `objective.random_share` may replace its samples
    generator_estimates_reward: bool = False  # it has a second head, and it may always sample the true token
    has_cloze_generator: bool = False  # two one-way towers, which together predict every token from its two sides
    predicts_tokens: bool = False  # the large tower predicts tokens and does not detect replacements
    copies_tokens: bool = False  # it predicts at every position, and a gate may copy the input token
    counts_masked_only: bool = False  # its mean is over the masked positions, not over all tokens
    gives_energies: bool = False  # the detection head's output is an energy, without the noise model's offset
    takes_joint_mlm: bool = False  # `objective.discriminator_mlm_weight` may add a head that predicts tokens


OBJECTIVES = {
    "rtd": ObjectiveFacts(takes_joint_mlm=True),
    "mlm": ObjectiveFacts(has_generator=False, generator_can_be_fixed=False, predicts_tokens=True),
    "rtd_masked_only": ObjectiveFacts(takes_joint_mlm=True, counts_masked_only=True),
    "replace_mlm": ObjectiveFacts(predicts_tokens=True, counts_masked_only=True),
    "all_tokens_mlm": ObjectiveFacts(predicts_tokens=True, copies_tokens=True),
    "electric": ObjectiveFacts(generator_can_be_fixed=False, has_cloze_generator=True, gives_energies=True),
    "adversarial": ObjectiveFacts(generator_can_be_fixed=False, generator_estimates_reward=True),
}

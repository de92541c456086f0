"""Define schedules: config values that change over a run, as functions of the share of the run that is done.

    objective.temperature: 2.0                                                        # a plain number is constant
    objective.temperature: {from: 4, to: 1, shape: exponential, tau: 0.15}            # a schedule

Guarantee: the value of step t is a pure function of the schedule and of u = t / num_steps, computed in float64, so it
is the same on every rank and after every restart. All shapes are monotone: every value lies between `from` and `to`.

How: a key that may be scheduled has a type such as `PositiveOrSchedule`. Validation decides by the input: a mapping is
a schedule, anything else a number. Both ends of a schedule must be values that the key accepts as a plain number.

Limits: this module must not import torch, because commands on a login node load a config without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_serializer, model_validator

from electra_dist.config.sections.base import Section, refuse_boolean

Number = TypeVar("Number")

# Tags of the two types of a key that may be scheduled. They appear in the path of a validation error, and, having a
# space, are never the name of a key.
NUMBER_TAG = "a number"
SCHEDULE_TAG = "a schedule"


class Schedule(Section, Generic[Number]):
    """Config value that changes over a run from one number to another: by a curve, along a line, or in one step.

    The type parameter is the type of both numbers, with their limits.
    """

    start: Number = Field(alias="from", description="Value at the first step.")
    end: Number = Field(
        alias="to", description="Value at the end of the change; an exponential comes near it and does not reach it."
    )
    shape: Literal["exponential", "linear", "cosine", "step"] = Field(
        description="How the value changes with u = t / train.num_steps at step t. exponential: to + (from - to) x "
        "e^(-u / tau). linear: along a line that reaches `to` at u = over. cosine: along half a cosine that reaches "
        "it there. step: `from` before u = over, `to` from there on."
    )
    over: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Share of the run after which the value is `to`; for linear, cosine and step.",
    )
    tau: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Share of the run after which the distance to `to` has fallen to 1/e; exponential only, which "
        "needs it.",
    )

    @model_validator(mode="after")
    def _options_fit_shape(self) -> Schedule[Number]:
        if self.shape == "exponential":
            if self.tau is None:
                raise ValueError("shape exponential needs `tau`; add for example tau: 0.15, or set another shape")
            if "over" in self.model_fields_set:
                raise ValueError("shape exponential does not use `over`; remove it, or set shape: linear")
        elif self.tau is not None:
            raise ValueError(f"shape {self.shape} does not use `tau`; remove it, or set shape: exponential")
        return self

    @model_serializer
    def _canonical(self) -> dict[str, Any]:
        """Return a mapping of only the keys that the shape uses, so that equal schedules give equal mappings."""
        ends_and_shape = {"from": self.start, "to": self.end, "shape": self.shape}
        if self.shape == "exponential":
            return ends_and_shape | {"tau": self.tau}
        return ends_and_shape | {"over": self.over}


NumberOrSchedule: TypeAlias = float | Schedule[Any]


def _tag(value: Any) -> str:
    """Return a tag that tells pydantic whether to validate a config value as a schedule or as a plain number."""
    return SCHEDULE_TAG if isinstance(value, (Mapping, Schedule)) else NUMBER_TAG


_Number = Annotated[float, BeforeValidator(refuse_boolean)]
_PositiveNumber = Annotated[_Number, Field(gt=0)]
PositiveOrSchedule = Annotated[
    Annotated[_PositiveNumber, Tag(NUMBER_TAG)] | Annotated[Schedule[_PositiveNumber], Tag(SCHEDULE_TAG)],
    Discriminator(_tag),
]
_NonNegativeNumber = Annotated[_Number, Field(ge=0)]
NonNegativeOrSchedule = Annotated[
    Annotated[_NonNegativeNumber, Tag(NUMBER_TAG)] | Annotated[Schedule[_NonNegativeNumber], Tag(SCHEDULE_TAG)],
    Discriminator(_tag),
]
_InnerFraction = Annotated[_Number, Field(gt=0, lt=1)]
InnerFractionOrSchedule = Annotated[
    Annotated[_InnerFraction, Tag(NUMBER_TAG)] | Annotated[Schedule[_InnerFraction], Tag(SCHEDULE_TAG)],
    Discriminator(_tag),
]
_Fraction = Annotated[_Number, Field(ge=0, le=1)]
FractionOrSchedule = Annotated[
    Annotated[_Fraction, Tag(NUMBER_TAG)] | Annotated[Schedule[_Fraction], Tag(SCHEDULE_TAG)],
    Discriminator(_tag),
]


def value_at(value: NumberOrSchedule, progress: float) -> float:
    """Return the number that a plain or scheduled config value has at step t; `progress` is t / num_steps."""
    if not isinstance(value, Schedule):
        return value
    start = float(value.start)
    end = float(value.end)
    if value.shape == "exponential":
        assert value.tau is not None
        return end + (start - end) * math.exp(-progress / value.tau)
    if progress >= value.over:
        return end
    if value.shape == "step":
        return start
    share_of_change = progress / value.over
    if value.shape == "linear":
        return start + (end - start) * share_of_change
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share_of_change))


def mean_value(value: NumberOrSchedule) -> float:
    """Return the mean of a plain or scheduled value over a run: its integral over progress = t / num_steps in [0, 1].

    The mean over the single steps differs from this integral by at most |from - to| / num_steps.
    """
    if not isinstance(value, Schedule):
        return value
    start = float(value.start)
    end = float(value.end)
    if value.shape == "exponential":
        assert value.tau is not None
        return end + (start - end) * value.tau * (1.0 - math.exp(-1.0 / value.tau))
    # Until u = over, a line and a half cosine lie on average in the middle between both ends.
    mean_of_change = start if value.shape == "step" else 0.5 * (start + end)
    return value.over * mean_of_change + (1.0 - value.over) * end


def largest_value(value: NumberOrSchedule) -> float:
    """Return a bound that a plain or scheduled config value never exceeds during a run: the larger of its ends."""
    if not isinstance(value, Schedule):
        return value
    return max(float(value.start), float(value.end))


def schedules_of(section: Section) -> dict[str, Schedule[Any]]:
    """Return a config section's scheduled values, as key -> schedule, in the order of the fields."""
    return {key: value for key, value in section if isinstance(value, Schedule)}


def describe(value: NumberOrSchedule) -> str:
    """Return a config key's value as a short text, for example "4 to 1 (exponential, tau 0.15)", or "2"."""
    if not isinstance(value, Schedule):
        return f"{value:g}"
    extent = f"tau {value.tau:g}" if value.shape == "exponential" else f"over {value.over:g}"
    return f"{float(value.start):g} to {float(value.end):g} ({value.shape}, {extent})"

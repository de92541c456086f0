"""Define what all sections of the config share: their base class and the types of common numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base class of all sections of the config, a pydantic model whose values cannot be changed once it is created.

    Unknown keys and infinite or NaN numbers are validation errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

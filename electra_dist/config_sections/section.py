"""Define what all sections of the config share: their base class and the types of common numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _without_tilde(folder: str) -> str:
    """Return the path of a folder, in which a leading `~` or `~USER` is replaced by that user's home folder.

    Raises:
        ValueError: there is no such user.
    """
    try:
        return str(Path(folder).expanduser()) if folder.startswith("~") else folder
    except RuntimeError:
        raise ValueError(f"{folder}: there is no such user; write the whole path") from None


Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
LocalFolder = Annotated[str, AfterValidator(_without_tilde)]  # read by several parts, which must mean one folder


class Section(BaseModel):
    """Base class of all sections of the config, a pydantic model whose values cannot be changed once it is created.

    Unknown keys and infinite or NaN numbers are validation errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""The base of every section of a recipe."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One typed, immutable section of a recipe; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

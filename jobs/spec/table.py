"""Define what all tables of a specification have in common."""

from pydantic import BaseModel, ConfigDict


class SpecTable(BaseModel):
    """A table that refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, hide_input_in_errors=True)

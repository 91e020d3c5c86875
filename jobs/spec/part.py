"""What every table of a specification has in common."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A table: no key that is not known, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, hide_input_in_errors=True)

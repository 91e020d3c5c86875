"""The built-in choices, which need no custom file."""

from __future__ import annotations

from training.config import choices
from training.federation.config import FOLDERS


def built_in(field: str) -> list[str]:
    """Return the names, sorted."""
    return [name for name, choice in choices.describe(FOLDERS[field]).items() if not choice.is_open]

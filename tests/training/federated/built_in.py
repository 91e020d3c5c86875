"""What there is to choose without a file of somebody's own."""

from __future__ import annotations

from training.config import choices
from training.federation.config import FOLDERS


def built_in(field: str) -> list[str]:
    """Return the names, sorted."""
    return [name for name, choice in choices.describe(FOLDERS[field]).items() if not choice.is_open]

"""A piece of a statement, as the listing puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sql:
    """A piece of a statement, and what goes into its places."""

    text: str
    params: tuple[Any, ...] = ()

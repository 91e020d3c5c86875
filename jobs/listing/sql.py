"""Define a fragment of an SQL statement with its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sql:
    """A fragment of an SQL statement with its parameters."""

    text: str
    params: tuple[Any, ...] = ()

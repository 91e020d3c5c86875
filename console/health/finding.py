"""Describe what a check of the portal's own health finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["unchecked", "warning", "error"]
"""`error`: the portal does not work. `warning`: it may soon fail. `unchecked`: it cannot be checked from here."""


@dataclass(frozen=True)
class Finding:
    """A problem with the portal.

    `code` and `title` are public (/readyz): no paths, machines, addresses or users. `detail` and `remedy` are for
    sysadmins.
    """

    check: str
    code: str  # of what is wrong, such as `worker.follow`; the key of its notice
    level: Level
    title: str
    detail: str = ""
    remedy: str = ""

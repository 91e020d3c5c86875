"""What a check of the portal's own health finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["warning", "error"]
"""`error`: the portal does not do its work. `warning`: it does, and will not for long."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    `code` and `title` are public (/readyz): no paths, machines, addresses or users. `detail` and `remedy` are for
    sysadmins.
    """

    check: str
    code: str  # of the thing, such as `worker.follow`; the key of its notice
    level: Level
    title: str
    detail: str = ""
    remedy: str = ""

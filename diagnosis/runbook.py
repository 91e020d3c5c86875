"""Runbooks: a page of Markdown for each cause, shipped with the code (docs/runbooks/)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from diagnosis.causes import CAUSES

FOLDER = Path(__file__).resolve().parent / "runbooks"  # a link to docs/runbooks: a wheel has the files themselves
_LINK = re.compile(r"([a-z_]+(?:\.[a-z_]+)?)\.md(#.*)?")


@cache
def shipped_runbook(code: str) -> str:
    """Return Vigil's own runbook for a cause as Markdown; "" if there is no such cause."""
    if code not in CAUSES:
        return ""
    return (FOLDER / f"{code}.md").read_text(encoding="utf-8")


def without_title(text: str) -> str:
    """Return the text after its first heading, as pages show the title themselves."""
    return re.sub(r"\A\s*# [^\n]*\n+", "", text)


def linked_cause(href: str) -> str | None:
    """Return the cause whose runbook a link from another runbook leads to; None if it leads elsewhere."""
    found = _LINK.fullmatch(href)
    return found[1] if found and found[1] in CAUSES else None

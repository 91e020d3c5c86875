"""Runbooks: a page of Markdown for each cause, shipped with the code (docs/runbooks/). No Django here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from diagnosis.causes import CAUSES

FOLDER = Path(__file__).resolve().parent / "runbooks"  # a link to docs/runbooks: a wheel has the files themselves
_LINK = re.compile(r"([a-z_]+(?:\.[a-z_]+)?)\.md(#.*)?")


@cache
def own(code: str) -> str:
    """Vigil's own runbook of a cause; "" where there is no such cause."""
    if code not in CAUSES:
        return ""
    return (FOLDER / f"{code}.md").read_text(encoding="utf-8")


def without_title(text: str) -> str:
    """The text after its first heading: pages say the title themselves."""
    return re.sub(r"\A\s*# [^\n]*\n+", "", text)


def linked(href: str) -> str | None:
    """The cause whose runbook a link leads to, as files link to each other; None: it leads elsewhere."""
    found = _LINK.fullmatch(href)
    return found[1] if found and found[1] in CAUSES else None

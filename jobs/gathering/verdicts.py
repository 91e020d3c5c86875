"""Why an attempt ended badly, as a job's page tells it: the newest verdict, each line with the log that it is in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from jobs.causes import CAUSES
from jobs.models import Attempt, Diagnosis, Incident

SHOWN = 6  # pieces of evidence on a job's page
_RANK = re.compile(r"(\d{1,9})\.(\d{1,9})\.log")
_LAUNCHER = re.compile(r"launcher\.(\d{1,9})\.log")
_OWNERS = {"both": "researcher or sysadmin", "nobody": "nobody has to act"}


@dataclass(frozen=True)
class Piece:
    """One line that the verdict goes by. `link`: its log, looked through for it; "" where there is none."""

    role: str
    where: str
    text: str
    count: int
    link: str


@dataclass(frozen=True)
class Shown:
    """The newest verdict on an attempt's end. `told`: as `vigil diagnose --json` prints it."""

    incident: Incident
    told: dict[str, Any]
    evidence: list[Piece]

    @property
    def owner(self) -> str:
        owner = CAUSES[self.incident.cause].owner
        return _OWNERS.get(owner, owner)

    @property
    def sure(self) -> float:
        return self.incident.confidence or 0.0


def of(attempt: Attempt) -> Shown | None:
    """None while there is no verdict, or where nothing went wrong."""
    if attempt.is_alive:
        return None
    incident = Incident.objects.filter(attempt=attempt, incarnation=None, version__gt=0).first()
    if incident is None or incident.cause not in CAUSES:
        return None
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").first()
    if newest is None:
        return None
    pieces = [_piece(attempt, one) for one in newest.verdict.get("evidence", ())[:SHOWN]]
    return Shown(incident, newest.verdict, pieces)


def _piece(attempt: Attempt, one: dict[str, Any]) -> Piece:
    name, line = str(one.get("file", "")), one.get("line") or 0
    where = f"{_named(name)}, line {line:,}" if line else _named(name)
    return Piece(
        str(one["role"]), where, str(one["text"]), int(one.get("count", 1)), _link(attempt, name, one) if line else ""
    )


def _named(name: str) -> str:
    if match := _RANK.fullmatch(name):
        return f"rank {match[2]}"
    if match := _LAUNCHER.fullmatch(name):
        return f"launcher of node {match[1]}"
    return "batch script" if name.startswith("batch.") else name


def _link(attempt: Attempt, name: str, one: dict[str, Any]) -> str:
    words = str(one["text"]).splitlines()[0][:80] if one["text"] else ""
    query: dict[str, Any] = {"attempt": attempt.number, "q": words}
    if match := _RANK.fullmatch(name):
        query |= {"rank": match[2], "incarnation": match[1]}
    elif match := _LAUNCHER.fullmatch(name):
        query |= {"rank": -1 - int(match[1])}
    elif name.startswith("batch."):
        query |= {"rank": "batch"}
    else:
        return ""
    return f"{reverse('job_logs', args=[attempt.job_id])}?{urlencode(query)}"

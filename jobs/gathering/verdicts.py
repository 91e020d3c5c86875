"""Why an attempt ended badly, as a job's page tells it: the newest verdict, each line with the log that it is in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from diagnosis import verdict
from diagnosis.causes import CAUSES, UNKNOWN
from jobs.models import Attempt, Diagnosis, Incident, Job
from jobs.postmortem import incident_notices
from jobs.presenting.rank_steps import named
from vigil_core import untrusted
from vigil_core.masking import DOTS, masked

SHOWN = 6  # pieces of evidence on a job's page
_DIGITS = re.compile(r"\d+")
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
    at: datetime | None = None
    rank: int | None = None
    node: str = ""


@dataclass(frozen=True)
class Shown:
    """The newest verdict on a bad end, or a person's word. `told`: as `vigil diagnose --json` prints the machine's."""

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

    @property
    def says(self) -> str:
        return says(self.incident)

    @property
    def advice(self) -> str:
        return advice(self.incident, self.told)

    @property
    def reported_by(self) -> str:
        return reported_by(self.incident, self.told)


def says(incident: Incident) -> str:
    """What happened in a sentence: a person's word on the cause comes before the verdict's."""
    if incident.is_overruled and incident.cause in CAUSES:
        cause, why = CAUSES[incident.cause], incident.overruled_why.splitlines()[0][:300]
        end = "" if why.endswith((".", "!", "?", "…")) else "."
        return f"{cause.heading}, according to {incident.overruled_by or 'somebody'}: {why}{end}"
    return incident.says


def advice(incident: Incident, told: dict[str, Any]) -> str:
    """Return what to do: the verdict's advice, or that for the cause which a person named."""
    if incident.is_overruled or not told:
        return incident_notices.advice_on(incident, CAUSES[incident.cause or UNKNOWN])
    return str(told["advice"])


def reported_by(incident: Incident, told: dict[str, Any]) -> str:
    """Return whose word the cause is, where a sysadmin must act on it; else ""."""
    if not incident.is_overruled:
        return verdict.reported_by(told)
    if CAUSES[incident.cause].owner != "sysadmin":
        return ""
    confirmed = "" if incident.is_confirmed else "; not confirmed by the machine"
    return f"{incident.overruled_by or 'somebody'}{confirmed}"


def of(attempt: Attempt) -> Shown | None:
    """None while there is no verdict, or where nothing went wrong."""
    if attempt.is_alive:
        return None
    rows = Incident.objects.filter(attempt=attempt, incarnation=None, version__gt=0)
    incident = rows.select_related("overruled_by").first()
    if incident is None or incident.cause not in CAUSES:
        return None
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").first()
    if newest is None:
        return None
    told = masked_verdict(newest.verdict)
    return Shown(incident, told, pieces(attempt, told, SHOWN))


def masked_verdict(told: dict[str, Any]) -> dict[str, Any]:
    """Return a stored verdict with its evidence masked by the forms known today: an older release knew fewer."""
    evidence = [{**one, "text": masked(str(one.get("text", "")))} for one in told.get("evidence", ())]
    return {**told, "evidence": evidence} if evidence else told


def before(attempts: Sequence[Attempt]) -> Shown | None:
    """Of the attempt before the latest, where the job goes on since."""
    return of(attempts[-2]) if len(attempts) > 1 else None


def in_place(attempts: Sequence[Attempt]) -> dict[int, list[Incident]]:
    """By attempt, the incidents after which its ranks were started again, oldest first."""
    found: dict[int, list[Incident]] = {}
    rows = Incident.objects.filter(attempt__in=attempts).exclude(incarnation=None)
    for one in rows.select_related("overruled_by").order_by("attempt", "incarnation"):
        found.setdefault(one.attempt_id, []).append(one)
    return found


def restarted_in_place(job: Job, number: int | None) -> int | None:
    """Return the attempt of that number if it restarted in place, or the newest that did; None where none did."""
    found = Incident.objects.filter(attempt__job=job).exclude(incarnation=None).order_by("-attempt__number")
    rows = found if number is None else found.filter(attempt__number=number)
    return rows.values_list("attempt__number", flat=True).first()


def pieces(attempt: Attempt, told: dict[str, Any], most: int) -> list[Piece]:
    """The verdict's evidence, each with its place in the logs of that attempt."""
    return [_piece(attempt, one) for one in told.get("evidence", ())[:most]]


def grouped(found: Sequence[Piece]) -> list[Piece]:
    """Those that say the same but for digits, in the same role, as one: the first of them, and who else said it."""
    groups: dict[tuple[str, str], list[Piece]] = {}
    for one in found:
        groups.setdefault((one.role, _DIGITS.sub("#", one.text)), []).append(one)
    return [_together(group) for group in groups.values()]


def _together(group: list[Piece]) -> Piece:
    first = group[0]
    ranks = sorted({one.rank for one in group if one.rank is not None})
    if len(group) == 1:
        return first
    where = named(ranks) if len(ranks) > 1 else f"{first.where} and {len(group) - 1:,} more"
    times = [one.at for one in group if one.at is not None]
    node = first.node if all(one.node == first.node for one in group) else ""
    return replace(first, where=where, count=sum(one.count for one in group), at=min(times, default=None), node=node)


def _piece(attempt: Attempt, one: dict[str, Any]) -> Piece:
    name, line = str(one.get("file", "")), one.get("line") or 0
    return Piece(
        role=str(one["role"]),
        where=f"{_named(name)}, line {line:,}" if line else _named(name),
        text=str(one["text"]),
        count=int(one.get("count", 1)),
        link=_link(attempt, name, one) if line else "",
        at=untrusted.moment(one.get("at")),
        rank=one.get("rank"),
        node=str(one.get("node", "")),
    )


def _named(name: str) -> str:
    if match := _RANK.fullmatch(name):
        return f"rank {match[2]}"
    if match := _LAUNCHER.fullmatch(name):
        return f"launcher of node {match[1]}"
    return "batch script" if name.startswith("batch.") else name


def _link(attempt: Attempt, name: str, one: dict[str, Any]) -> str:
    line = next(iter(str(one["text"]).splitlines()), "")
    words = line.partition(DOTS)[0][:80]  # no log has a secret as it is shown here
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

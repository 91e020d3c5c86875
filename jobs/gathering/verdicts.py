"""Load why an attempt failed, for a job's page: the newest verdict, each line of evidence with a link to its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from diagnosis import verdict
from diagnosis.causes import CAUSES, UNKNOWN
from jobs.models import Attempt, Diagnosis, Incident, Job
from jobs.postmortem import incident_notices
from jobs.presenting.postmortems.evidence import EvidencePiece
from jobs.presenting.postmortems.rank_steps import ranks_text
from vigil_core import untrusted
from vigil_core.masking import DOTS, masked

MAX_SHOWN = 6  # pieces of evidence on a job's page
_DIGITS = re.compile(r"\d+")
_RANK = re.compile(r"(\d{1,9})\.(\d{1,9})\.log")
_LAUNCHER = re.compile(r"launcher\.(\d{1,9})\.log")
_OWNERS = {"both": "researcher or sysadmin", "nobody": "nobody has to act"}


@dataclass(frozen=True)
class ShownVerdict:
    """The newest verdict on a failure, or a person's. `verdict` is in the format of `vigil diagnose --json`."""

    incident: Incident
    verdict: dict[str, Any]
    evidence: list[EvidencePiece]

    @property
    def owner(self) -> str:
        owner = CAUSES[self.incident.cause].owner
        return _OWNERS.get(owner, owner)

    @property
    def confidence(self) -> float:
        return self.incident.confidence or 0.0

    @property
    def summary(self) -> str:
        return summary(self.incident)

    @property
    def advice(self) -> str:
        return advice(self.incident, self.verdict)

    @property
    def reported_by(self) -> str:
        return reported_by(self.incident, self.verdict)


def summary(incident: Incident) -> str:
    """Return what happened in a sentence; a person's cause takes precedence over the verdict."""
    if incident.is_overruled and incident.cause in CAUSES:
        cause, why = CAUSES[incident.cause], incident.overruled_why.splitlines()[0][:300]
        end = "" if why.endswith((".", "!", "?", "…")) else "."
        return f"{cause.heading}, according to {incident.overruled_by or 'somebody'}: {why}{end}"
    return incident.says


def advice(incident: Incident, verdict: dict[str, Any]) -> str:
    """Return what to do: the verdict's advice, or that for the cause that a person named."""
    if incident.is_overruled or not verdict:
        return incident_notices.advice_on(incident, CAUSES[incident.cause or UNKNOWN])
    return str(verdict["advice"])


def reported_by(incident: Incident, stored: dict[str, Any]) -> str:
    """Return who reported the cause, if a sysadmin must act on it; else ""."""
    if not incident.is_overruled:
        return verdict.reported_by(stored)
    if CAUSES[incident.cause].owner != "sysadmin":
        return ""
    confirmed = "" if incident.is_confirmed else "; not confirmed by the machine"
    return f"{incident.overruled_by or 'somebody'}{confirmed}"


def newest_verdict(attempt: Attempt) -> ShownVerdict | None:
    """Return the newest verdict; None if there is none yet, or nothing failed."""
    if attempt.is_alive:
        return None
    rows = Incident.objects.filter(attempt=attempt, incarnation=None, version__gt=0)
    incident = rows.select_related("overruled_by").first()
    if incident is None or incident.cause not in CAUSES:
        return None
    newest = Diagnosis.objects.filter(incident=incident).order_by("-version").first()
    if newest is None:
        return None
    masked_newest = masked_verdict(newest.verdict)
    return ShownVerdict(incident, masked_newest, pieces(attempt, masked_newest, MAX_SHOWN))


def masked_verdict(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a stored verdict with secrets masked by today's rules: an older release knew fewer."""
    evidence = [{**piece, "text": masked(str(piece.get("text", "")))} for piece in verdict.get("evidence", ())]
    return {**verdict, "evidence": evidence} if evidence else verdict


def previous_verdict(attempts: Sequence[Attempt]) -> ShownVerdict | None:
    """Return the verdict on the attempt before the latest, if the job has continued since."""
    return newest_verdict(attempts[-2]) if len(attempts) > 1 else None


def incidents_in_place(attempts: Sequence[Attempt]) -> dict[int, list[Incident]]:
    """Return the incidents after which ranks restarted in place, by attempt id, oldest first."""
    found: dict[int, list[Incident]] = {}
    rows = Incident.objects.filter(attempt__in=attempts).exclude(incarnation=None)
    for incident in rows.select_related("overruled_by").order_by("attempt", "incarnation"):
        found.setdefault(incident.attempt_id, []).append(incident)
    return found


def restarted_in_place(job: Job, number: int | None) -> int | None:
    """Return the attempt of that number if it restarted in place, or the newest that did; None where none did."""
    found = Incident.objects.filter(attempt__job=job).exclude(incarnation=None).order_by("-attempt__number")
    rows = found if number is None else found.filter(attempt__number=number)
    return rows.values_list("attempt__number", flat=True).first()


def pieces(attempt: Attempt, verdict: dict[str, Any], limit: int) -> list[EvidencePiece]:
    """Return the verdict's evidence, each piece with its place in the attempt's logs."""
    return [_piece(attempt, raw) for raw in verdict.get("evidence", ())[:limit]]


def grouped(found: Sequence[EvidencePiece]) -> list[EvidencePiece]:
    """Group pieces of the same role whose text differs only in digits."""
    groups: dict[tuple[str, str], list[EvidencePiece]] = {}
    for piece in found:
        groups.setdefault((piece.role, _DIGITS.sub("#", piece.text)), []).append(piece)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[EvidencePiece]) -> EvidencePiece:
    first = group[0]
    ranks = sorted({piece.rank for piece in group if piece.rank is not None})
    if len(group) == 1:
        return first
    where = ranks_text(ranks) if len(ranks) > 1 else f"{first.where} and {len(group) - 1:,} more"
    times = [piece.at for piece in group if piece.at is not None]
    node = first.node if all(piece.node == first.node for piece in group) else ""
    return replace(
        first, where=where, count=sum(piece.count for piece in group), at=min(times, default=None), node=node
    )


def _piece(attempt: Attempt, raw: dict[str, Any]) -> EvidencePiece:
    name, line = str(raw.get("file", "")), raw.get("line") or 0
    return EvidencePiece(
        role=str(raw["role"]),
        where=f"{_log_name(name)}, line {line:,}" if line else _log_name(name),
        text=str(raw["text"]),
        count=int(raw.get("count", 1)),
        link=_link(attempt, name, raw) if line else "",
        at=untrusted.moment(raw.get("at")),
        rank=raw.get("rank"),
        node=str(raw.get("node", "")),
    )


def _log_name(name: str) -> str:
    if match := _RANK.fullmatch(name):
        return f"rank {match[2]}"
    if match := _LAUNCHER.fullmatch(name):
        return f"launcher of node {match[1]}"
    return "batch script" if name.startswith("batch.") else name


def _link(attempt: Attempt, name: str, raw: dict[str, Any]) -> str:
    line = next(iter(str(raw["text"]).splitlines()), "")
    words = line.partition(DOTS)[0][:80]  # secrets in logs are already masked
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

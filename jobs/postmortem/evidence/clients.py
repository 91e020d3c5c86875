"""Collect what a federation reported about its clients: dropouts with their errors, exclusions and lost rounds."""

from __future__ import annotations

import re

from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs.client_name import client_name
from jobs.models import Event, Incident
from jobs.postmortem.evidence.collected import IncidentEvidence, context, first_few
from jobs.postmortem.evidence.ranks import EVENTS
from training.federation.tables import NAME_CHARACTERS
from vigil_core import untrusted

MAX_DROPPED = 4  # listed one by one, each with a different error
MAX_EVENTS = 64
MAX_NAMED = 1_000  # excluded clients
SHOWN_CHARACTERS, MAX_CHARACTERS = 700, 8_000  # of a traceback, shown and read
FEDERATED = "federated"
_NONE_FINITE = re.compile(r"none of the [\d,]+ updates was (?:finite|made of numbers)")  # the latter: before 0.2
_ENDS = {"ClientsFailed": "federated.clients", "QuorumLost": "federated.quorum", "CoverageError": "federated.coverage"}
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::|\Z)")


def collect_federation_clients(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add the clients that dropped out last, each with the end of its traceback, and those that are excluded."""
    if incident.attempt.job.spec.get("kind") != FEDERATED:
        return
    found.available.add("clients")
    _run_end(incident, found)
    _dropped_clients(incident, found)
    _excluded_clients(incident, found)


def _run_end(incident: Incident, found: IncidentEvidence) -> None:
    """Add what rank 0 reported when the run ended: a root if its log is gone."""
    rows = Event.objects.filter(attempt=incident.attempt, kind="run.failed", incarnation=found.incarnation)
    for event in rows.order_by("id")[:MAX_EVENTS]:
        cause = _ENDS.get(untrusted.name(event.data.get("exception"), 64))
        if cause is None:
            continue
        text = _text(event.data.get("error"))
        if cause == "federated.quorum" and _NONE_FINITE.search(text.partition(". ")[0]):
            cause = "numerics.nan"
        prefix = Prefix(stamp=event.time.timestamp(), is_dated=True)
        role = "confirmation" if found.logs else "root"
        found.signs.append(
            Sign(EVENTS, 0, _shortened(text), cause=cause, role=role, prefix=prefix, source_kind="trainer")
        )
        return


def _dropped_clients(incident: Incident, found: IncidentEvidence) -> None:
    """Add the first dropout of the newest round, one for each kind of error."""
    rows = Event.objects.filter(attempt=incident.attempt, kind="client.dropped", incarnation=found.incarnation)
    signs: dict[str, Sign] = {}
    for event in sorted(rows.order_by("-id")[:MAX_EVENTS], key=lambda event: (-_round_of(event), event.pk)):
        client, text = untrusted.count(event.data.get("client")), _text(event.data.get("traceback"))
        if client is not None and text and _round_of(event):
            who = client_name(client, _name(event.data))
            dropout = f"{who} dropped out in round {_round_of(event):,}: {_shortened(text)}"
            sign = context(EVENTS, dropout, cause="federated.clients", at=event.time.timestamp())
            signs.setdefault(_exception_line(text).partition(":")[0], sign)
    found.signs += list(signs.values())[:MAX_DROPPED]


def _round_of(event: Event) -> int:
    return untrusted.count(event.data.get("step")) or 0


def _excluded_clients(incident: Incident, found: IncidentEvidence) -> None:
    """Add since which round each client is excluded, in any attempt of the job: an exclusion is permanent."""
    attempt = incident.attempt
    rows = Event.objects.filter(
        attempt__job=attempt.job_id, attempt__number__lte=attempt.number, kind="client.quarantined"
    )
    since: dict[int, tuple[int, str]] = {}
    for data in rows.order_by("id").values_list("data", flat=True)[:MAX_NAMED]:
        client, round_ = untrusted.count(data.get("client")), untrusted.count(data.get("step"))
        if client is not None and round_ is not None:
            since.setdefault(client, (round_, client_name(client, _name(data))))
    if since:
        each = first_few(f"{who} since round {round_:,}" for _, (round_, who) in sorted(since.items()))
        text = f"excluded because their updates were not finite: {each}"
        found.signs.append(context(EVENTS, text, cause="numerics.nan"))


def _name(data: dict[str, object]) -> str:
    return untrusted.name(data.get("name"), NAME_CHARACTERS)


def _text(value: object) -> str:
    """Return a traceback in lines that are safe to display."""
    return "\n".join(map(untrusted.line, value[:MAX_CHARACTERS].splitlines())) if isinstance(value, str) else ""


def _shortened(traceback: str) -> str:
    """Return the exception, then the innermost frames, so that the first words are the most useful ones."""
    raised, place = _exception_line(traceback), traceback.rfind('\n  File "')
    if place < 0 or raised == traceback:
        return traceback[:SHOWN_CHARACTERS]
    frames = traceback[: traceback.rfind(f"\n{raised}")] if f"\n{raised}" in traceback else traceback
    while (before := frames.rfind('\n  File "', 0, place)) >= 0 and len(frames) - before < SHOWN_CHARACTERS - len(
        raised
    ):
        place = before
    return f"{raised}{frames[place:]}"


def _exception_line(traceback: str) -> str:
    """Return the last line that begins with an exception's name and is not a frame's."""
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()]
    return next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1] if lines else "")[:300]

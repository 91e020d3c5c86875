"""What a federation told of its clients: who dropped out and how, who is not asked any more, which rounds were lost."""

from __future__ import annotations

import re

from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs.client_name import client_name
from jobs.models import Event, Incident
from jobs.postmortem.evidence.collected import Evidence, context, some
from jobs.postmortem.evidence.ranks import EVENTS
from training.federation.tables import NAME_LETTERS
from vigil_core import untrusted

MOST_DROPPED = 4  # that are told of one by one, each with another error
LOOKED_AT = 64
MOST_NAMED = 1_000  # who are not asked any more
LETTERS, MOST_LETTERS = 700, 8_000  # of a traceback that are shown, and read
FEDERATED = "federated"
_ENDS = {"ClientsFailed": "federated.clients", "QuorumLost": "federated.quorum", "CoverageError": "federated.coverage"}
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::|\Z)")


def clients_of_federation(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Names clients: those that dropped out last, each with the end of its traceback, and those that are left out."""
    if incident.attempt.job.spec.get("kind") != FEDERATED:
        return
    found.seen.add("clients")
    _end(incident, found)
    _dropped(incident, found)
    _left_out(incident, found)


def _end(incident: Incident, found: Evidence) -> None:
    """What rank 0 told of the run's end: a reason where its log is gone."""
    rows = Event.objects.filter(attempt=incident.attempt, kind="run.failed", incarnation=found.incarnation)
    for event in rows.order_by("id")[:LOOKED_AT]:
        cause = _ENDS.get(untrusted.name(event.data.get("exception"), 64))
        if cause is None:
            continue
        text = _text(event.data.get("error"))
        if cause == "federated.quorum" and "made of numbers" in text.partition(". ")[0]:
            cause = "numerics.nan"
        prefix = Prefix(stamp=event.time.timestamp(), is_dated=True)
        role = "confirmation" if found.logs else "root"
        found.signs.append(Sign(EVENTS, 0, _shortened(text), cause, role, prefix, source_kind="trainer"))
        return


def _dropped(incident: Incident, found: Evidence) -> None:
    """The newest round's first, of each kind of error one."""
    rows = Event.objects.filter(attempt=incident.attempt, kind="client.dropped", incarnation=found.incarnation)
    told: dict[str, Sign] = {}
    for event in sorted(rows.order_by("-id")[:LOOKED_AT], key=lambda one: (-_round_of(one), one.pk)):
        client, text = untrusted.count(event.data.get("client")), _text(event.data.get("traceback"))
        if client is not None and text and _round_of(event):
            name = client_name(client, _name(event.data))
            said = f"{name} dropped out in round {_round_of(event):,}: {_shortened(text)}"
            sign = context(EVENTS, said, cause="federated.clients", at=event.time.timestamp())
            told.setdefault(_raised(text).partition(":")[0], sign)
    found.signs += list(told.values())[:MOST_DROPPED]


def _round_of(event: Event) -> int:
    return untrusted.count(event.data.get("step")) or 0


def _left_out(incident: Incident, found: Evidence) -> None:
    """Since which round, whichever attempt of the job it was in: who has been left out stays left out."""
    attempt = incident.attempt
    rows = Event.objects.filter(
        attempt__job=attempt.job_id, attempt__number__lte=attempt.number, kind="client.quarantined"
    )
    since: dict[int, tuple[int, str]] = {}
    for data in rows.order_by("id").values_list("data", flat=True)[:MOST_NAMED]:
        client, round_ = untrusted.count(data.get("client")), untrusted.count(data.get("step"))
        if client is not None and round_ is not None:
            since.setdefault(client, (round_, client_name(client, _name(data))))
    if since:
        each = some(f"{who} since round {round_:,}" for _, (round_, who) in sorted(since.items()))
        text = f"not asked any more, as their updates were not made of numbers: {each}"
        found.signs.append(context(EVENTS, text, cause="numerics.nan"))


def _name(data: dict[str, object]) -> str:
    return untrusted.name(data.get("name"), NAME_LETTERS)


def _text(value: object) -> str:
    """A traceback in lines that do nothing to whoever reads them."""
    return "\n".join(map(untrusted.line, value[:MOST_LETTERS].splitlines())) if isinstance(value, str) else ""


def _shortened(traceback: str) -> str:
    """What was raised, then the innermost frames: whoever reads a few words of it reads the most telling ones."""
    raised, place = _raised(traceback), traceback.rfind('\n  File "')
    if place < 0 or raised == traceback:
        return traceback[:LETTERS]
    frames = traceback[: traceback.rfind(f"\n{raised}")] if f"\n{raised}" in traceback else traceback
    while (before := frames.rfind('\n  File "', 0, place)) >= 0 and len(frames) - before < LETTERS - len(raised):
        place = before
    return f"{raised}{frames[place:]}"


def _raised(traceback: str) -> str:
    """The line that says what was raised: the last that begins with an exception's name, and is no frame's."""
    lines = [line for line in traceback.splitlines() if line and not line[0].isspace()]
    return next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1] if lines else "")[:300]

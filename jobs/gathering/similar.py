"""Find similar incidents: the same failure or the same node, among those that the reader may see."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.models import Incident
from portal.models import User

MAX_SIMILAR = 10


@dataclass(frozen=True)
class SimilarIncident:
    """Another incident, and what it has in common with this one."""

    incident: Incident
    what: str


def find(incident: Incident, user: User) -> list[SimilarIncident]:
    """Return incidents with the same fingerprint, then those on the same node, newest first.

    Incidents of projects that the user cannot see are never included.
    """
    similar: dict[int, SimilarIncident] = {}
    others = Incident.objects.visible_to(user).exclude(pk=incident.pk).with_people().order_by("-at", "-id")
    for what, same in (("same failure", {"fingerprint": incident.fingerprint}), ("same node", {"node": incident.node})):
        if not next(iter(same.values())):
            continue
        for other in others.filter(**same).exclude(pk__in=similar)[: MAX_SIMILAR - len(similar)]:
            similar[other.pk] = SimilarIncident(other, what)
    return list(similar.values())

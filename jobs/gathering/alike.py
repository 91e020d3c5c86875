"""Like this one: other bad ends of the same program, or on the same node, of those that the reader may see."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.models import Incident
from portal.models import User

MOST = 10


@dataclass(frozen=True)
class Like:
    """Another incident, and what it has in common with this one."""

    incident: Incident
    what: str


def of(incident: Incident, user: User) -> list[Like]:
    """The same fingerprint first, then the same node; newest first. Another project's failures are never among them."""
    found: dict[int, Like] = {}
    others = Incident.objects.visible_to(user).exclude(pk=incident.pk).with_people().order_by("-at", "-id")
    for what, same in (("same failure", {"fingerprint": incident.fingerprint}), ("same node", {"node": incident.node})):
        if not next(iter(same.values())):
            continue
        for one in others.filter(**same).exclude(pk__in=found)[: MOST - len(found)]:
            found[one.pk] = Like(one, what)
    return list(found.values())

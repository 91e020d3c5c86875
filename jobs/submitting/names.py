"""What a spec names of Slurm and Slurm does not have, as far as the rows tell; where there are none, nothing is."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta

from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.cluster import read, sync
from nodes.models import Association, AssociationQuerySet, License, Node, Partition, Qos, Reading, Reservation
from nodes.schedulers import cluster
from nodes.scheduling import gpu_types, licenses
from nodes.scheduling.capacity import may_use
from portal.models import User
from vigil_core import formatting

SHOWN = 6
PARTS = {
    "partition": Reading.Part.PARTITIONS, "qos": Reading.Part.ACCOUNTS, "reservation": Reading.Part.RESERVATIONS,
    "licenses": Reading.Part.LICENSES, "gpu_type": Reading.Part.NODES, "require_nodes": Reading.Part.NODES,
    "exclude_nodes": Reading.Part.NODES,
}  # fmt: skip
FRESH = timedelta(seconds=2)  # what was read since needs no second look
WAIT_S, LOOK_S = 4.0, 0.1
"""A tick of the follower comes every two seconds, and a reading takes a fraction of one."""
TITLES = {"partition": "partition", "qos": "QOS", "reservation": "reservation", "gpu_type": "GPU of type"}


def problems(spec: JobSpec) -> Iterator[Problem]:
    """Each name that there is not, with the near ones. A machine that plays all nodes knows no names."""
    asked = spec.resources
    if Node.objects.told().filter(plays_many=True).exists():
        if asked.licenses:
            text = "Jobs run on one machine here, which counts no licences. Take licenses out."
            yield Problem("resources.licenses", text)
        return
    for field, title in TITLES.items():
        name, there = getattr(asked, field), _THERE[field]() if getattr(asked, field) else set()
        if name and field == "gpu_type":
            name = gpu_types.spelling(name, there) or name
        if (there or (name and _has_none(field))) and name not in there:
            yield Problem(f"resources.{field}", f'Slurm has no {title} "{name}"{_as_of(field)}. {_near(name, there)}')
    yield from _licenses(asked.licenses)
    for field in ("require_nodes", "exclude_nodes"):
        there = _THERE["nodes"]() if getattr(asked, field) else set()
        missing = [name for name in getattr(asked, field) if name not in there]
        if missing and there:
            near = _near(missing[0], there)
            yield Problem(f"resources.{field}", f'Slurm has no node "{missing[0]}"{_as_of(field)}. {near}')


def _licenses(asked: str) -> Iterator[Problem]:
    """Name the first licence that there is not, or of which there are fewer in all: Slurm refuses both."""
    totals = dict(License.objects.told().values_list("name", "total")) if asked else {}
    if not asked or not (totals or _has_none("licenses")):
        return
    for name, wanted in licenses.counts(asked).items():
        if name not in totals:
            text = f'Slurm has no licence "{name}"{_as_of("licenses")}. {_near(name, totals)}'
        elif wanted > totals[name]:
            there = formatting.plural(totals[name], f"{name} licence")
            text = f"Slurm has {there} in all{_as_of('licenses')}; this asks for {wanted:,}. Ask for fewer."
        else:
            continue
        yield Problem("resources.licenses", text)
        return


def refresh(fields: Iterable[str]) -> bool:
    """Have the worker read anew what these fields are checked against; return whether it has within WAIT_S.

    A partition that was made a moment ago is there. Only whoever would be refused waits, and for one reading at most.
    """
    wanted = {PARTS[name] for field in fields if (name := field.removeprefix("resources.")) in PARTS}
    now = timezone.now()
    due = {reading.part for reading in _readings(wanted) if reading.read_at and now - reading.read_at > FRESH}
    if not due or connection.in_atomic_block:  # the worker could not write while we wait
        return False
    for part in due:
        sync.hurry(Reading.Part(part))
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if all(reading.read_at and reading.read_at > now for reading in _readings(due)):
            return True
        time.sleep(LOOK_S)
    return False


def _readings(parts: Collection[str]) -> QuerySet[Reading]:
    return Reading.objects.filter(part__in=parts)


def _as_of(field: str) -> str:
    """Return when the scheduler said so: " (as of 21:04)"."""
    read_at = Reading.objects.filter(part=PARTS[field]).values_list("read_at", flat=True).first()
    return f" (as of {formatting.clock(read_at)})" if read_at else ""


def known(user: User, field: str) -> list[str]:
    """What this person can choose for a field of [resources]; empty where nothing is known."""
    name = "nodes" if field.endswith("_nodes") else field
    if narrowed := _OPEN.get(name):
        return sorted(narrowed(user))
    return sorted(_THERE[name]()) if name in _THERE else []


def _has_none(field: str) -> bool:
    """Return whether the scheduler has said that there are none: a cluster without these is a usual one."""
    if field not in {"reservation", "licenses"}:
        return False
    return Reading.objects.filter(part=PARTS[field]).exclude(read_at=None).exists()


def _near(name: str, there: Iterable[str]) -> str:
    names = sorted(there)
    if not names:
        return "It has none. Take it out."
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f'Did you mean "{close[0]}"?'
    more = ", …" if len(names) > SHOWN else ""
    return f"It has {', '.join(names[:SHOWN])}{more}."


def _gpu_types() -> set[str]:
    return set(read.gpu_types())


def _features() -> set[str]:
    return {name for names in Node.objects.told().values_list("features", flat=True) for name in names}


def _nodes() -> set[str]:
    return set(Node.objects.told().values_list("name", flat=True))


def _accounts(user: User) -> set[str]:
    """The accounts that they compute for; empty where the scheduler tells none."""
    return set(_own(user).values_list("account", flat=True))


def _own(user: User) -> AssociationQuerySet:
    return Association.objects.told().filter(user=user.slurm_user) if user.slurm_user else Association.objects.none()


def _open_partitions(user: User) -> set[str]:
    """The partitions that take one of their accounts; what is closed for now can be waited for."""
    accounts = _accounts(user)
    return {
        one.name
        for one in Partition.objects.told()
        if not accounts
        or any(
            name not in one.denied_accounts and (not one.allowed_accounts or name in one.allowed_accounts)
            for name in accounts
        )
    }


def _open_qos(user: User) -> set[str]:
    """The QOS of their associations; all where these name none."""
    there = _THERE["qos"]()
    own = {name for names in _own(user).values_list("qos", flat=True) for name in names}
    return there & own or there


def _open_reservations(user: User) -> set[str]:
    """The reservations made for them or one of their accounts."""
    found, accounts = set(), _accounts(user) or {""}
    for one in Reservation.objects.told():
        made = cluster.ReservationInfo(name=one.name, users=tuple(one.users), accounts=tuple(one.accounts))
        if any(may_use(made, user=user.slurm_user or "", account=name) for name in accounts):
            found.add(one.name)
    return found


_THERE: dict[str, Callable[[], set[str]]] = {
    "partition": lambda: set(Partition.objects.told().values_list("name", flat=True)),
    "qos": lambda: set(Qos.objects.told().values_list("name", flat=True)),
    "reservation": lambda: set(Reservation.objects.told().values_list("name", flat=True)),
    "licenses": lambda: set(License.objects.told().values_list("name", flat=True)),
    "gpu_type": _gpu_types,
    "constraint": _features,
    "nodes": _nodes,
}
_OPEN: dict[str, Callable[[User], set[str]]] = {
    "partition": _open_partitions,
    "qos": _open_qos,
    "reservation": _open_reservations,
}

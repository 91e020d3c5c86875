"""Check the names in a spec against what Slurm has, as far as it has been read; without rows nothing is checked."""

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

MAX_SHOWN = 6
PARTS = {
    "partition": Reading.Part.PARTITIONS, "qos": Reading.Part.ACCOUNTS, "reservation": Reading.Part.RESERVATIONS,
    "licenses": Reading.Part.LICENSES, "gpu_type": Reading.Part.NODES, "require_nodes": Reading.Part.NODES,
    "exclude_nodes": Reading.Part.NODES,
}  # fmt: skip
FRESH_FOR = timedelta(seconds=2)  # readings newer than this are not repeated
WAIT_S, POLL_S = 4.0, 0.1
"""A tick of the follower comes every two seconds, and a reading takes a fraction of one."""
TITLES = {"partition": "partition", "qos": "QOS", "reservation": "reservation", "gpu_type": "GPU of type"}


def problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield each unknown name, with similar ones. A single machine that plays all nodes has no names."""
    resources = spec.resources
    if Node.objects.reported().filter(plays_many=True).exists():
        if resources.licenses:
            text = "Jobs run on one machine here, which has no licenses. Remove licenses."
            yield Problem("resources.licenses", text)
        return
    for field, title in TITLES.items():
        name, there = getattr(resources, field), _EXISTING[field]() if getattr(resources, field) else set()
        if name and field == "gpu_type":
            name = gpu_types.spelling(name, there) or name
        if (there or (name and _has_none(field))) and name not in there:
            yield Problem(
                f"resources.{field}", f'Slurm has no {title} "{name}"{_as_of(field)}. {_suggestion(name, there)}'
            )
    yield from _licenses(resources.licenses)
    for field in ("require_nodes", "exclude_nodes"):
        there = _EXISTING["nodes"]() if getattr(resources, field) else set()
        missing = [name for name in getattr(resources, field) if name not in there]
        if missing and there:
            near = _suggestion(missing[0], there)
            yield Problem(f"resources.{field}", f'Slurm has no node "{missing[0]}"{_as_of(field)}. {near}')


def _licenses(requested: str) -> Iterator[Problem]:
    """Yield the first unknown license, or one of which there are fewer in total: Slurm refuses both."""
    totals = dict(License.objects.reported().values_list("name", "total")) if requested else {}
    if not requested or not (totals or _has_none("licenses")):
        return
    for name, wanted in licenses.counts(requested).items():
        if name not in totals:
            text = f'Slurm has no license "{name}"{_as_of("licenses")}. {_suggestion(name, totals)}'
        elif wanted > totals[name]:
            there = formatting.plural(totals[name], f"{name} license")
            text = f"Slurm has {there} in all{_as_of('licenses')}; this job requests {wanted:,}. Request fewer."
        else:
            continue
        yield Problem("resources.licenses", text)
        return


def refresh(fields: Iterable[str]) -> bool:
    """Have the worker re-read what these fields are checked against; return whether it has within WAIT_S.

    This finds a partition that was created a moment ago. Only requests that would be refused wait, for one reading at
    most.
    """
    wanted = {PARTS[name] for field in fields if (name := field.removeprefix("resources.")) in PARTS}
    now = timezone.now()
    due = {reading.part for reading in _readings(wanted) if reading.read_at and now - reading.read_at > FRESH_FOR}
    if not due or connection.in_atomic_block:  # the worker could not write while we wait
        return False
    for part in due:
        sync.hurry(Reading.Part(part))
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if all(reading.read_at and reading.read_at > now for reading in _readings(due)):
            return True
        time.sleep(POLL_S)
    return False


def _readings(parts: Collection[str]) -> QuerySet[Reading]:
    return Reading.objects.filter(part__in=parts)


def _as_of(field: str) -> str:
    """Return when the scheduler said so: " (as of 21:04)"."""
    read_at = Reading.objects.filter(part=PARTS[field]).values_list("read_at", flat=True).first()
    return f" (as of {formatting.clock(read_at)})" if read_at else ""


def choices_for(user: User, field: str) -> list[str]:
    """Return what this person can choose for a field of [resources]; empty if nothing is known."""
    name = "nodes" if field.endswith("_nodes") else field
    if narrowed := _USABLE.get(name):
        return sorted(narrowed(user))
    return sorted(_EXISTING[name]()) if name in _EXISTING else []


def _has_none(field: str) -> bool:
    """Return whether the scheduler has said that there are none: a cluster without these is a usual one."""
    if field not in {"reservation", "licenses"}:
        return False
    return Reading.objects.filter(part=PARTS[field]).exclude(read_at=None).exists()


def _suggestion(name: str, there: Iterable[str]) -> str:
    names = sorted(there)
    if not names:
        return "It has none. Remove it."
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f'Did you mean "{close[0]}"?'
    more = ", …" if len(names) > MAX_SHOWN else ""
    return f"It has {', '.join(names[:MAX_SHOWN])}{more}."


def _gpu_types() -> set[str]:
    return set(read.gpu_types())


def _features() -> set[str]:
    return {name for names in Node.objects.reported().values_list("features", flat=True) for name in names}


def _nodes() -> set[str]:
    return set(Node.objects.reported().values_list("name", flat=True))


def _accounts(user: User) -> set[str]:
    """Return the person's accounts; empty if the scheduler reports none."""
    return set(_associations_of(user).values_list("account", flat=True))


def _associations_of(user: User) -> AssociationQuerySet:
    return (
        Association.objects.reported().filter(user=user.slurm_user) if user.slurm_user else Association.objects.none()
    )


def _open_partitions(user: User) -> set[str]:
    """Return the partitions that accept one of the person's accounts; a closed one can be waited for."""
    accounts = _accounts(user)
    return {
        partition.name
        for partition in Partition.objects.reported()
        if not accounts
        or any(
            name not in partition.denied_accounts
            and (not partition.allowed_accounts or name in partition.allowed_accounts)
            for name in accounts
        )
    }


def _open_qos(user: User) -> set[str]:
    """Return the QOS of the person's associations; all if these name none."""
    there = _EXISTING["qos"]()
    qos = {name for names in _associations_of(user).values_list("qos", flat=True) for name in names}
    return there & qos or there


def _open_reservations(user: User) -> set[str]:
    """Return the reservations made for the person or one of their accounts."""
    found, accounts = set(), _accounts(user) or {""}
    for row in Reservation.objects.reported():
        reservation = cluster.ReservationInfo(name=row.name, users=tuple(row.users), accounts=tuple(row.accounts))
        if any(may_use(reservation, user=user.slurm_user or "", account=name) for name in accounts):
            found.add(row.name)
    return found


_EXISTING: dict[str, Callable[[], set[str]]] = {
    "partition": lambda: set(Partition.objects.reported().values_list("name", flat=True)),
    "qos": lambda: set(Qos.objects.reported().values_list("name", flat=True)),
    "reservation": lambda: set(Reservation.objects.reported().values_list("name", flat=True)),
    "licenses": lambda: set(License.objects.reported().values_list("name", flat=True)),
    "gpu_type": _gpu_types,
    "constraint": _features,
    "nodes": _nodes,
}
_USABLE: dict[str, Callable[[User], set[str]]] = {
    "partition": _open_partitions,
    "qos": _open_qos,
    "reservation": _open_reservations,
}

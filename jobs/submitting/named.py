"""What a spec names of Slurm and Slurm does not have, as far as the rows tell; where there are none, nothing is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.models import Node, Partition, Qos, Reservation

SHOWN = 6
TITLES = {"partition": "partition", "qos": "QOS", "reservation": "reservation", "gpu_type": "GPU of type"}


def problems(spec: JobSpec) -> Iterator[Problem]:
    """Each name that there is not, with the near ones. A machine that plays all nodes knows no names."""
    if Node.objects.told().filter(plays_many=True).exists():
        return
    asked = spec.resources
    for field, title in TITLES.items():
        name, there = getattr(asked, field), _THERE[field]() if getattr(asked, field) else set()
        if there and name not in there:
            yield Problem(f"resources.{field}", f'Slurm has no {title} "{name}". {_near(name, there)}')
    for field in ("require_nodes", "exclude_nodes"):
        there = _THERE["nodes"]() if getattr(asked, field) else set()
        missing = [name for name in getattr(asked, field) if name not in there]
        if missing and there:
            yield Problem(f"resources.{field}", f'Slurm has no node "{missing[0]}". {_near(missing[0], there)}')


def known(field: str) -> list[str]:
    """What can be chosen for a field of [resources]; empty where nothing is known."""
    found = _THERE.get("nodes" if field.endswith("_nodes") else field)
    return sorted(found()) if found else []


def _near(name: str, there: Iterable[str]) -> str:
    names = sorted(there)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f'Did you mean "{close[0]}"?'
    more = ", …" if len(names) > SHOWN else ""
    return f"It has {', '.join(names[:SHOWN])}{more}."


def _gpu_types() -> set[str]:
    return set(Node.objects.told().exclude(gpu_type="").values_list("gpu_type", flat=True))


def _features() -> set[str]:
    return {name for names in Node.objects.told().values_list("features", flat=True) for name in names}


def _nodes() -> set[str]:
    return set(Node.objects.told().values_list("name", flat=True))


_THERE: dict[str, Callable[[], set[str]]] = {
    "partition": lambda: set(Partition.objects.told().values_list("name", flat=True)),
    "qos": lambda: set(Qos.objects.told().values_list("name", flat=True)),
    "reservation": lambda: set(Reservation.objects.told().values_list("name", flat=True)),
    "gpu_type": _gpu_types,
    "constraint": _features,
    "nodes": _nodes,
}

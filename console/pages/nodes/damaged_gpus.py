"""Find GPUs that agents report as lost or broken; the scheduler's list of nodes does not show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db.models import Q

from nodes.models import Gpu, Node
from vigil_core import formatting

Damage = Mapping[int, str]
""""lost" or "broken" by GPU index."""
MARKS = {"lost": "×", "broken": "!"}


def by_node() -> dict[str, Damage]:
    """Return the damaged GPUs of every node that has any."""
    rows = Gpu.objects.filter(Q(lost_at__isnull=False) | ~Q(fault=""), gone_at=None).order_by("index")
    found: dict[str, dict[int, str]] = {}
    for node, index, lost_at in rows.values_list("agent__node", "index", "lost_at"):
        found.setdefault(node, {})[index] = "broken" if lost_at is None else "lost"
    return dict(found)


def sentence(nodes: Iterable[Node], damage: Mapping[str, Damage]) -> str:
    """Return "GPU 3 of dgx-05 is broken." for nodes in service; "" where nothing is damaged."""
    found = [
        (node.name, index, state)
        for node in nodes
        if node.is_in_service
        for index, state in damage.get(node.name, {}).items()
    ]
    if len(found) == 1:
        return "GPU {1} of {0} is {2}.".format(*found[0])
    names = list(dict.fromkeys(name for name, *_ in found))
    where = f"of {names[0]}" if len(names) == 1 else f"on {formatting.plural(len(names), 'node')}"
    return f"{formatting.plural(len(found), 'GPU')} {where} are lost or broken." if found else ""

"""Read the inventory of software on all nodes, and the minimum versions in force."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import monotonic

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from nodes.inventory import minimums
from nodes.inventory.comparison import Inventory
from nodes.inventory.minimums import BadMinimum, MinimumVersion, MinimumVersions
from nodes.inventory.software import NodeSoftware, read_facts
from nodes.models import Agent, Node

logger = logging.getLogger(__name__)
CACHE_S = 30.0
DROPPED_AFTER = timedelta(days=30)
"""Nodes whose agent has been silent for longer are not part of the inventory any more."""


def recent_inventory() -> Inventory:
    """Return the inventory as it was at most CACHE_S ago: it takes seconds to parse the facts of thousands of nodes."""
    return _inventory(minimums_in_force(), int(monotonic() // CACHE_S))


@lru_cache(maxsize=1)
def _inventory(minimum_versions: MinimumVersions, interval: int) -> Inventory:
    return read_inventory()


def read_inventory() -> Inventory:
    """Return the software that the agents of all nodes last reported. Two queries, however many nodes there are."""
    agents = reporting_agents().order_by("node").only("node", "facts")
    return Inventory([node for node in read_nodes(agents.iterator()) if node.versions], minimums_in_force())


def reporting_agents() -> QuerySet[Agent]:
    """Select the agents whose nodes are part of the inventory."""
    return Agent.objects.filter(heard_at__gt=timezone.now() - DROPPED_AFTER).exclude(facts={})


def read_nodes(agents: Iterable[Agent]) -> Iterator[NodeSoftware]:
    """Yield the software that these agents last reported."""
    partitions = {name: names[0] for name, names in Node.objects.values_list("name", "partitions") if names}
    for agent in agents:
        yield read_facts(agent.node, str(partitions.get(agent.node, "")), agent.facts)


def minimums_in_force() -> MinimumVersions:
    """Return the shipped minimum versions and the site's; only the shipped ones while the site's file is unreadable."""
    return site_minimums()[0]


def site_minimums() -> tuple[MinimumVersions, str]:
    """Return the minimum versions in force, and why the site's file cannot be used; "" if it can."""
    if not settings.VIGIL_MINIMUM_VERSIONS:
        return _in_force(()), ""
    path = Path(settings.VIGIL_MINIMUM_VERSIONS)
    try:
        found = path.stat()
        site, problem = _read(path, found.st_ctime_ns, found.st_size)
    except OSError as error:
        site, problem = (), f"{path}: {error.strerror}."
    return _in_force(site), problem


@lru_cache(maxsize=2)
def _in_force(site: tuple[MinimumVersion, ...]) -> MinimumVersions:
    return minimums.with_site(site)


@lru_cache(maxsize=2)
def _read(path: Path, changed_ns: int, size: int) -> tuple[tuple[MinimumVersion, ...], str]:
    """Read the site's file once per change of it. Raises OSError, which is not cached."""
    try:
        return minimums.read_site_file(path), ""
    except BadMinimum as error:
        problem = f"{path}: {error}."
        logger.warning("minimum versions of the site are ignored: %s", problem)
        return (), problem

"""Name what drains nodes for Vigil besides health rules: hot spares, burn-ins and maintenance windows. No Django.

These names stand where an order otherwise names its health rule, and in the scheduler's reason.
"""

from __future__ import annotations

SPARE, BURN_IN = "spare", "burn-in"
SPARE_REASON = "[node] hot spare"
MAINTENANCE_PREFIX = "maintenance-"
"""Begins the name of a maintenance window; its number follows."""


def is_health_rule(requester: str) -> bool:
    """Return whether a name by which Vigil ordered something is that of a health rule."""
    return requester not in (SPARE, BURN_IN) and not requester.startswith(MAINTENANCE_PREFIX)

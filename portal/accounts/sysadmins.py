"""Ensure that the site always has an active sysadmin."""

from __future__ import annotations

from collections.abc import Collection

from portal.models import User

LAST_SYSADMIN = "is the last sysadmin: nobody could manage Vigil any more. Make somebody else a sysadmin first."


def would_leave_none(leaving: Collection[int]) -> bool:
    """Return whether no active sysadmin would be left without these people. Call it in the transaction of the change.

    All sysadmins are locked until the transaction ends: if two remove each other's right at once, the second waits and
    then sees that the first is no longer a sysadmin.
    """
    active = User.objects.select_for_update().filter(is_superuser=True, is_active=True).order_by("pk")
    ids = list(active.values_list("pk", flat=True))
    return bool(set(ids) & set(leaving)) and set(ids) <= set(leaving)

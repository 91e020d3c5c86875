"""Decide how far Vigil goes with each action of health rules: sysadmins set it, VIGIL_HEALTH is the ceiling.

act: Vigil does it. propose: a sysadmin decides about each finding. ignore: the finding is only counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import transaction

from nodes.health.rules.rule import ACTIONS, OUT_OF_SERVICE, Action
from nodes.models import ActionPolicy
from portal.access import note
from portal.audit import Change
from portal.models import User

Mode = ActionPolicy.PolicyMode
GOVERNED: tuple[Action, ...] = tuple(action for action in ACTIONS if action != "ignore")


class BadPolicy(ValueError):
    """Raised for a policy that cannot be; the message says why."""


@dataclass(frozen=True)
class Policy:
    """What is set for an action, and what holds: `effective` is less where VIGIL_HEALTH only lets Vigil propose."""

    action: Action
    mode: str
    effective: str
    changed_by: str | None = None
    changed_at: datetime | None = None


def modes() -> dict[str, str]:
    """Return by action what is set; an action without a policy is done."""
    return {action: str(Mode.ACT) for action in GOVERNED} | dict(ActionPolicy.objects.values_list("action", "mode"))


def policies() -> list[Policy]:
    """Return the policies of all actions, from the mildest action to the most serious."""
    stored = {row.action: row for row in ActionPolicy.objects.select_related("changed_by")}
    found = []
    for action in GOVERNED:
        row = stored.get(action)
        mode = row.mode if row else str(Mode.ACT)
        by = row.changed_by.username if row and row.changed_by else None
        found.append(Policy(action, mode, _effective(action, mode), by, row.changed_at if row else None))
    return found


def set_modes(user: User, wanted: Mapping[str, str], reason: str) -> None:
    """Set the policies of some actions. Raises BadPolicy. They apply to findings that open from now on."""
    for action, mode in wanted.items():
        if action not in GOVERNED:
            raise BadPolicy(f"{action:.40} has no policy. Actions with a policy: {', '.join(GOVERNED)}.")
        if mode not in choices(action):
            raise BadPolicy(f"{action} can be set to {' or '.join(choices(action))}, not to {mode:.40}.")
    with transaction.atomic():
        rows = ActionPolicy.objects.select_for_update().in_bulk(list(wanted), field_name="action")
        for action, mode in sorted(wanted.items()):
            before = rows[action].mode if action in rows else str(Mode.ACT)
            if before == mode:
                continue
            ActionPolicy.objects.update_or_create(action=action, defaults={"mode": mode, "changed_by": user})
            note(user, "health_policy.changed", action, reason, Change(before={"mode": before}, after={"mode": mode}))


def choices(action: str) -> tuple[str, ...]:
    """Return what an action can be set to: what is only listed needs nobody's decision."""
    return (Mode.ACT, Mode.IGNORE) if action == "watch" else (Mode.ACT, Mode.PROPOSE, Mode.IGNORE)


def _effective(action: Action, mode: str) -> str:
    if mode == Mode.ACT and action in OUT_OF_SERVICE and settings.VIGIL_HEALTH != "act":
        return str(Mode.PROPOSE)
    return mode

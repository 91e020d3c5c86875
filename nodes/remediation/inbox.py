"""What a sysadmin decides about health entries: approve the action, dismiss it, or clear the entry."""

from __future__ import annotations

from collections.abc import Collection

from django.db import transaction
from django.utils import timezone

from nodes.cluster import drain
from nodes.health import engine
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, Node, NodeOrder
from nodes.monitoring.rule_progress import progress_of
from nodes.remediation.existing_drain import existing_drain
from nodes.remediation.reason import drain_reason
from portal.access import note
from portal.audit import Change
from portal.models import User

Decision = HealthEntry.EntryDecision
State = HealthEntry.EntryState


class NotPossible(Exception):
    """Raised if the decision does not fit the entry's state; the message says why."""


def approve(user: User, pk: int, reason: str, *, replaces: str | None = None) -> HealthEntry:
    """Do what the rule proposes, in the person's name. Raises NotPossible, and DrainedByAnother as a drain does.

    The drain is one for a finding: nobody else has to agree to its end. Hence it does not replace even this person's
    own drain unless `replaces` is its reason.
    """
    with transaction.atomic():
        HealthControl.locked()
        entry = _entry(pk)
        if entry.state not in (State.OPEN, State.DISMISSED):
            raise NotPossible(f"Finding {pk} is {entry.state}: there is nothing to approve.")
        if entry.action == "exclude" and entry.decision in (Decision.PROPOSED, Decision.DISMISSED):
            _decided(entry, user, Decision.APPROVED, State.OPEN, reason)
            return entry
        if entry.action not in OUT_OF_SERVICE:
            raise NotPossible(f"The rule {entry.rule} proposes no action on the node.")
        existing = existing_drain(entry.node, timezone.now())
        is_done = entry.decision in (Decision.APPROVED, Decision.AUTOMATIC)
        if is_done and existing is not None and entry.order == existing:
            return entry
        entry.order = existing or _drain(user, entry, replaces)
        _decided(entry, user, Decision.APPROVED, State.OPEN, reason)
    return entry


def _drain(user: User, entry: HealthEntry, replaces: str | None) -> NodeOrder:
    node = Node.objects.reported().filter(name=entry.node).first()
    if node is None:
        raise NotPossible(f"The scheduler does not know {entry.node}.")
    action, reason = NodeOrder.Action.DRAIN, f"{drain_reason(entry)}: {entry.rule}"
    if node.reason != replaces and drain.is_obstacle(node, action, None, entry.rule):
        raise drain.DrainedByAnother(node)
    try:
        return drain.request_order(user, node, action, reason, replaces=replaces)
    except drain.NodeGone as error:
        raise NotPossible(str(error)) from None


def dismiss(user: User, pk: int, reason: str) -> HealthEntry:
    """Decide that nothing is to be done while this lasts; once it has cleared, new evidence opens a new entry."""
    with transaction.atomic():
        HealthControl.locked()
        entry = _entry(pk)
        if entry.state == State.CLEARED:
            raise NotPossible(f"Finding {pk} is cleared already.")
        if entry.state == State.WATCHING:
            raise NotPossible(f"Finding {pk} is only watched: nothing is proposed yet.")
        _decided(entry, user, Decision.DISMISSED, State.DISMISSED, reason)
        withdraw_drains([entry.pk])
    return entry


def clear(user: User | None, pk: int, reason: str) -> HealthEntry:
    """End the entry: what was observed until now never opens it again. `user` is None for a passed burn-in."""
    with transaction.atomic():
        HealthControl.locked()
        entry = _entry(pk)
        if entry.state == State.CLEARED:
            return entry
        now = timezone.now()
        progress = progress_of(entry)
        engine.clear(progress, now.timestamp())
        entry.progress, entry.cleared_at, entry.due_at = progress.as_payload(), now, None
        _decided(entry, user, entry.decision, State.CLEARED, reason)
        withdraw_drains([entry.pk])
    return entry


def withdraw_drains(entries: Collection[int]) -> None:
    """Withdraw the drains for these entries that are not carried out yet, and that no other open entry needs.

    One that the scheduler is carrying out just now is undone afterwards (`nodes.cluster.drain`).
    """
    drains = NodeOrder.objects.open().filter(action=NodeOrder.Action.DRAIN, health_entries__in=entries)
    drains.exclude(health_entries__state=State.OPEN).update(
        state=NodeOrder.State.REFUSED, outcome="The finding was dismissed or cleared.", ended_at=timezone.now()
    )


def reset_breaker(user: User, reason: str) -> None:
    """Let Vigil act by itself again."""
    with transaction.atomic():
        control = HealthControl.locked()
        if control.tripped_at is None:
            raise NotPossible("The breaker is not tripped.")
        note(user, "health_breaker.reset", control.tripped_by, reason)
        control.tripped_at, control.tripped_by, control.tripped_detail = None, "", ""
        control.reset_at, control.reset_by = timezone.now(), user
        control.save()


def _entry(pk: int) -> HealthEntry:
    found = HealthEntry.objects.select_for_update(of=("self",)).select_related("gpu", "order").filter(pk=pk).first()
    if found is None:
        raise HealthEntry.DoesNotExist(f"There is no finding {pk}.")
    return found


def _decided(entry: HealthEntry, user: User | None, decision: str, state: str, reason: str) -> None:
    change = Change(
        before={"state": entry.state, "decision": entry.decision}, after={"state": state, "decision": decision}
    )
    entry.state, entry.decision, entry.decided_by, entry.decided_at = state, decision, user, timezone.now()
    entry.decision_reason = reason
    entry.save()
    action = f"finding.{'approved' if state == State.OPEN else state}"
    note(user, action, f"{entry.rule} on {entry.node}", reason, change)

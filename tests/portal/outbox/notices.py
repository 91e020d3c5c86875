"""Create a notice and run the outbox."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from portal.models import Channel, Delivery
from portal.notify import raise_notice
from portal.sending.due import send_due


def raise_notice_to(to: Any, key: str = "incident:1", **more: Any) -> bool:
    return raise_notice(key, **{"kind": "incident", "to": to, "title": "wren died.", "link": "/jobs/7", **more})


def send() -> int:
    return send_due(budget_s=5)


def only() -> Delivery:
    return Delivery.objects.get()


def is_due(**fields: Any) -> None:
    """Make everything that waits for its time due now."""
    Channel.objects.update(rests_until=None)
    Delivery.objects.unsent().update(due_at=timezone.now(), **fields)

"""Define the Celery tasks for the portal's own records."""

from __future__ import annotations

from datetime import timedelta

from axes.models import AccessAttempt, AccessLog
from celery import shared_task
from django.core.management import call_command
from django.utils import timezone

from portal import notify
from portal.models import Channel, IdempotencyKey, LoginLink
from portal.outbox import kinds
from portal.outbox.filling import failure_notice_key
from portal.outbox.pruning import remove_old as remove_old_deliveries

SIGN_INS_DAYS = 90  # retention of sign-ins and attempts with their addresses


@shared_task(name="portal.tasks.tidy", expires=24 * 3600)
def tidy() -> None:
    """Remove expired sessions, sign-in links, idempotency keys, records of sign-ins, notices and messages."""
    now = timezone.now()
    call_command("clearsessions")
    LoginLink.objects.filter(expires_at__lt=now - timedelta(days=1)).delete()
    IdempotencyKey.objects.filter(created_at__lt=now - IdempotencyKey.LIFE).delete()
    long_ago = now - timedelta(days=SIGN_INS_DAYS)
    AccessAttempt.objects.filter(attempt_time__lt=long_ago).delete()
    AccessLog.objects.filter(attempt_time__lt=long_ago).delete()
    going = Channel.objects.filter(is_paused=False).values_list("pk", flat=True)
    notify.withdraw_missing("channel", [failure_notice_key(pk) for pk in going])
    notify.remove_old(kinds.EVENTS)
    remove_old_deliveries()


@shared_task(name="portal.tasks.send", expires=5)
def send() -> None:
    """Send due messages from the outbox, for a few seconds at most."""
    from portal.sending.due import send_due

    send_due(budget_s=8.0)

"""Send the outbox: take due messages, send them, and record the outcome, one message per channel at a time.

A row is taken by a conditional update that postpones it by LEASE: if the process dies between sending and recording,
the message is sent again after that, with the same id, by which receivers recognise it. A failing channel pauses for
growing intervals, so one that hangs costs only a few seconds now and then. Sending happens outside of any transaction.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from smtplib import SMTPException

import httpx
from django.db.models import F, Min, Q
from django.utils import timezone

from portal import database, notify
from portal.models import Channel, Delivery
from portal.outbox import kinds
from portal.outbox.filling import content_of, failure_notice_key, hours_of
from portal.sending import gathering, mail, outside, slack, webhook
from vigil_core.untrusted import line

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16  # channels that are sent to concurrently
LEASE = timedelta(minutes=2)
MAX_TRIES = 12
FIRST_RETRY_S, MAX_RETRY_S = 30.0, 7200.0  # between attempts: doubled each time; all of them take some eight hours
SENT, WAITING, GIVEN_UP, DROPPED = (Delivery.State[name] for name in ("SENT", "WAITING", "GIVEN_UP", "DROPPED"))


@dataclass(frozen=True, slots=True)
class DeliveryFailure:
    """Why a message was not delivered. `is_for_good`: retrying would not help."""

    message: str
    is_for_good: bool = False
    retry_after_s: float | None = None


def send_due(budget_s: float) -> int:
    """Send due messages for at most `budget_s` seconds; return how many were tried."""
    until, count = time.monotonic() + budget_s, 0
    gathering.release_held(timezone.now())
    with asyncio.Runner() as runner:
        while time.monotonic() < until and (taken := _take(timezone.now())):
            count += len(taken)
            loop = runner.get_loop()
            going = {loop.create_task(_send(delivery)): delivery for delivery in taken}
            while going:
                done, _ = runner.run(asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED))
                for task in done:  # recorded immediately: an unrecorded message is sent again
                    database.retried(partial(_note, going.pop(task), task.result()))
    return count


def _take(now: datetime) -> list[Delivery]:
    """Take and return the oldest due message of each channel that is not pausing after a failure."""
    awake = Q(channel__rests_until=None) | Q(channel__rests_until__lte=now)
    due = Delivery.objects.filter(awake, state=WAITING, due_at__lte=now, channel__is_paused=False)
    oldest = (
        due.order_by().values("channel").annotate(oldest=Min("pk")).values_list("oldest", flat=True)[:MAX_CONCURRENT]
    )
    rows = Delivery.objects.filter(pk__in=list(oldest)).select_related("channel__user", "notice")
    return [row for row in rows if _is_ours(row, now)]


def _is_ours(delivery: Delivery, now: datetime) -> bool:
    """Claim the message and return whether this process got it; its content is fixed at the first attempt."""
    ours = Delivery.objects.filter(pk=delivery.pk, state=WAITING, due_at=delivery.due_at)
    if delivery.content is None and (notice := delivery.notice) is not None and notice.withdrawn_at is None:
        delivery.content = content_of(notice)
    if delivery.content is None or not _may_get(delivery.channel):
        ours.update(state=DROPPED)
        return False
    delivery.title, delivery.due_at = delivery.content["title"], now + LEASE
    changes = {"due_at": delivery.due_at, "title": delivery.title, "content": delivery.content}
    if ours.update(**changes, tries=F("tries") + 1) != 1:
        return False
    delivery.tries += 1
    return True


def _may_get(channel: Channel) -> bool:
    return channel.user is None or channel.user.is_active


async def _send(delivery: Delivery) -> DeliveryFailure | None:
    """Send the message; return None if it was accepted."""
    channel = delivery.channel
    try:
        if channel.kind == Channel.Kind.EMAIL:
            return await asyncio.to_thread(_mail, delivery)
        body, headers = (slack if channel.kind == Channel.Kind.SLACK else webhook).message(delivery)
        return _judge(await outside.post(channel.address, body, headers), channel)
    except outside.AddressRefused as error:
        return DeliveryFailure(str(error), is_for_good=True)
    except (TimeoutError, httpx.TimeoutException):
        return DeliveryFailure(f"{channel.where} did not answer within {outside.TOTAL_S:g} seconds.")
    except (httpx.HTTPError, OSError) as error:
        return DeliveryFailure(f"{channel.where} cannot be reached: {error or type(error).__name__}")
    except Exception:
        logger.exception("delivery %s failed", delivery.pk)
        return DeliveryFailure("Sending failed; Vigil's log has the reason.")


def _mail(delivery: Delivery) -> DeliveryFailure | None:
    if not mail.is_set_up():
        return DeliveryFailure("This site cannot send e-mail: a sysadmin must set EMAIL_URL.")
    try:
        mail.send(delivery)
    except (OSError, SMTPException) as error:
        return DeliveryFailure(mail.error_message(error), is_for_good=mail.is_for_good(error))
    return None


def _judge(answer: outside.ExternalResponse, channel: Channel) -> DeliveryFailure | None:
    status, response_text = answer.status, line(" ".join(answer.text.split()), 120)
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return DeliveryFailure(
            f"{channel.where} redirects to another address ({status}): use that one.", is_for_good=True
        )
    message = f"{channel.where} answered {status}{f': {response_text}' if response_text else '.'}"
    if status in {408, 425, 429} or status >= 500:
        return DeliveryFailure(message, retry_after_s=answer.retry_after_s)
    return DeliveryFailure(message, is_for_good=True)


def _note(delivery: Delivery, failure: DeliveryFailure | None) -> None:
    """Store the outcome of an attempt. At worst another process has sent it too; then either outcome is true."""
    now, rows = timezone.now(), Delivery.objects.filter(pk=delivery.pk, state=WAITING)
    channel = Channel.objects.filter(pk=delivery.channel_id)
    if failure is None:
        rows.update(state=SENT, sent_at=now, error="")
        if delivery.channel.rests_until is not None:
            channel.update(rests_until=None)
        notify.withdraw(failure_notice_key(delivery.channel_id))
        logger.info("delivery %s: %s to channel %s", delivery.pk, delivery.kind, delivery.channel_id)
        return
    is_last = failure.is_for_good or delivery.tries >= MAX_TRIES
    again_at = _after_quiet_hours(delivery, now + timedelta(seconds=wait_s(delivery.tries, failure.retry_after_s)))
    # Only if no other process has it by now: a time-out may be recorded late.
    ours = rows.filter(due_at=delivery.due_at)
    if not ours.update(error=failure.message[:300], **({"state": GIVEN_UP} if is_last else {"due_at": again_at})):
        return
    channel.update(rests_until=None if failure.is_for_good else again_at)
    logger.warning("delivery %s, try %s: %s", delivery.pk, delivery.tries, failure.message)
    if is_last:
        _notify_failure(delivery, failure)


def _after_quiet_hours(delivery: Delivery, at: datetime) -> datetime:
    """Return `at`, or the end of quiet hours around it; a test message is never delayed."""
    until = None if delivery.kind == kinds.TEST else hours_of(delivery.channel).quiet_until(at)
    return until or at


def wait_s(tries: int, retry_after_s: float | None = None) -> float:
    """Return the seconds until the next attempt: doubled each time, ± 50 % jitter, no earlier than Retry-After."""
    doubled: float = FIRST_RETRY_S * 2 ** (tries - 1)
    return max(min(doubled, MAX_RETRY_S) * random.uniform(0.5, 1.5), min(retry_after_s or 0.0, MAX_RETRY_S))


def _notify_failure(delivery: Delivery, failure: DeliveryFailure) -> None:
    """Notify the owner of a channel that does not work; for a project's channel, the sysadmins."""
    channel = delivery.channel
    # a test's result is shown on its page, and a notice about one channel must not cause another
    if delivery.kind in {"channel", "test"}:
        return
    where = str(channel) if channel.user else f"{channel} of {channel.project}"
    title = f"Messages to {where} cannot be delivered."
    notify.raise_notice(
        failure_notice_key(channel.pk),
        kind="channel",
        to=channel.user or notify.SYSADMINS,
        title=title,
        detail=failure.message,
        link="/me/",
    )

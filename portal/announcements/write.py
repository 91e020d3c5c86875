"""Announce something to everybody, and withdraw it."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from portal.access import note
from portal.announcements.current import forget
from portal.audit import Change
from portal.models import Announcement, User
from vigil_core.untrusted import plain

MAX_PENDING = 50
"""Announcements that are shown or planned at one time."""
MAX_DISTANCE = timedelta(days=366)


class BadAnnouncement(ValueError):
    """Raised for an announcement that cannot be made; `field` names what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def announce(
    user: User, text: str, level: str, starts_at: datetime | None = None, ends_at: datetime | None = None
) -> Announcement:
    """Show the text to everybody between these times; by default from now on. Raises BadAnnouncement."""
    now = timezone.now()
    text, starts_at = " ".join(plain(text).split()), starts_at or now
    if not text or len(text) > Announcement.MAX_LENGTH:
        raise BadAnnouncement("text", f"Write a text of at most {Announcement.MAX_LENGTH} characters.")
    if not text.isprintable():
        raise BadAnnouncement("text", "The text contains characters that cannot be printed. Remove them.")
    if level not in Announcement.Level.values:
        raise BadAnnouncement("level", f"Choose one of {', '.join(Announcement.Level.values)}.")
    if starts_at < now - MAX_DISTANCE:
        raise BadAnnouncement("starts_at", "The start is more than a year ago. Leave it out.")
    if starts_at > now + MAX_DISTANCE:
        raise BadAnnouncement("starts_at", "The start is more than a year ahead. Choose an earlier one.")
    if ends_at is not None and ends_at <= max(starts_at, now):
        raise BadAnnouncement("ends_at", "The end must be after the start, and in the future.")
    if ends_at is not None and ends_at > starts_at + MAX_DISTANCE:
        raise BadAnnouncement("ends_at", "The end is more than a year after the start. Leave it out.")
    with transaction.atomic():
        if Announcement.objects.pending(now).count() >= MAX_PENDING:
            raise BadAnnouncement("text", f"There are {MAX_PENDING} announcements already. Withdraw one first.")
        row = Announcement.objects.create(
            text=text, level=level, starts_at=starts_at, ends_at=ends_at, written_by=user, written_at=now
        )
        note(user, "announcement.made", f"announcement {row.pk}", text, Change(after={"level": level, "text": text}))
    forget()
    return row


def withdraw(user: User, row: Announcement) -> bool:
    """End the announcement; return whether it was pending."""
    now = timezone.now()
    with transaction.atomic():
        if not Announcement.objects.pending(now).filter(pk=row.pk).update(withdrawn_at=now):
            return False
        note(user, "announcement.withdrawn", f"announcement {row.pk}", row.text)
    forget()
    return True

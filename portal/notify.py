"""Notify people: one notice per key, raised once and withdrawn when its reason ends.

    notify.raise_notice(f"gpu.idle:{gpu}", kind="gpu.idle", to=owner, title="…", link=reverse("job", args=[7]))
    notify.withdraw(f"gpu.idle:{gpu}")

A notice is shown on the home page, and is sent by e-mail, Slack or webhook where people set that up (`portal.outbox`).
Callers may raise the same notice as often as they like and from several processes: a key is reported once. Titles,
details and facts may contain untrusted text: it becomes lines of bounded length with secrets masked, and pages and
messages escape it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from portal.models import Notice, NoticeRead, Project, User
from portal.outbox.filling import drop_duplicates, fill
from vigil_core import untrusted
from vigil_core.masking import masked

logger = logging.getLogger(__name__)

SYSADMINS: Final = Notice.Audience.SYSADMINS
WITHDRAWN_RETENTION = timedelta(days=30)
MAX_TITLE, MAX_DETAIL, MAX_KEY, MAX_LINK, MAX_EDITION = 300, 1000, 200, 500, 64
MAX_FACTS, MAX_NAME, MAX_FACT = 12, 40, 400
Facts = Sequence[tuple[str, str]]
_KIND = re.compile(r"[a-z][a-z0-9._-]{0,63}")
_LINK = re.compile(r"/(?![/\\])[^\s\\]*")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)", re.DOTALL)  # of terminals


def raise_notice(
    key: str,
    *,
    kind: str,
    to: User | Literal[Notice.Audience.SYSADMINS],
    title: str,
    detail: str = "",
    link: str = "",
    tone: Literal["notice", "warn"] = "notice",
    facts: Facts = (),
    project: Project | None = None,
    edition: str = "",
    settle: timedelta = timedelta(),
) -> bool:
    """Raise a notice for a person or the sysadmins, and return whether it is new.

    While it is active, raising it again only updates its text; once withdrawn, it is new again. `project`: its channels
    are notified as well. `edition`: a different one makes an active notice new again. `settle`: how long messages wait
    for further details; later changes of the text are not sent.
    """
    now = timezone.now()
    words = _words(title, detail, link) | {"tone": tone, "facts": _facts(facts), "last_raised_at": now}
    news = {"kind": _kind(kind), "edition": edition[:MAX_EDITION], "raised_at": now, "withdrawn_at": None}
    values = {**words, **_audience(to), **news}
    rows = Notice.objects.filter(key=_key(key))
    with transaction.atomic():
        if rows.active().filter(edition=news["edition"]).update(**words):
            return False
        if rows.exclude(withdrawn_at=None, edition=news["edition"]).update(**values):
            NoticeRead.objects.filter(notice__key=key).delete()
        elif not Notice.objects.get_or_create(key=key, defaults=values)[1]:
            return False  # another process has just raised it
        fill(rows.get(), project=project, settle=settle)
        transaction.on_commit(partial(_log_raised, key))
    return True


def withdraw(key: str) -> bool:
    """Withdraw a notice because its reason has ended; return whether it was active until now."""
    return bool(Notice.objects.active().filter(key=key).update(withdrawn_at=timezone.now()))


def rename(old: str, new: str) -> None:
    """Move a notice to another key, without sending it again."""
    with transaction.atomic():
        Notice.objects.exclude(withdrawn_at=None).filter(key=new).delete()
        found = Notice.objects.in_bulk([old, new], field_name="key")
        if len(found) == 2:
            drop_duplicates(found[new], found[old])
            withdraw(old)
        else:
            Notice.objects.filter(key=old).update(key=_key(new))


def withdraw_missing(kind: str, keys: Collection[str]) -> int:
    """Withdraw all notices of a kind except these keys, whose reason persists; return how many were withdrawn."""
    gone = Notice.objects.active().filter(kind=kind).exclude(key__in=keys)
    return gone.update(withdrawn_at=timezone.now())


def withdraw_stale(kind: str, since: timedelta) -> int:
    """Withdraw notices of a kind that no process has raised for so long; return how many.

    For findings of several processes, each on its own machine: what one does not find may still be true for another.
    """
    now = timezone.now()
    stale = Notice.objects.active().filter(kind=kind, last_raised_at__lt=now - since)
    return stale.update(withdrawn_at=now)


def mark_read(notice: Notice, user: User) -> None:
    """Mark a notice as read; repeating it is harmless."""
    NoticeRead.objects.bulk_create(
        [NoticeRead(notice=notice, user=user, read_at=timezone.now())], ignore_conflicts=True
    )


def remove_old(kinds: Collection[str] = ()) -> None:
    """Remove notices withdrawn long ago; of `kinds` that are never withdrawn, those not raised for as long."""
    long_ago = timezone.now() - WITHDRAWN_RETENTION
    Notice.objects.filter(Q(withdrawn_at__lt=long_ago) | Q(kind__in=kinds, last_raised_at__lt=long_ago)).delete()


def _log_raised(key: str) -> None:
    logger.info("notice %s was raised", key)


def _words(title: str, detail: str, link: str) -> dict[str, Any]:
    title_line = _line(title, MAX_TITLE)
    if not title_line:
        raise ValueError("A notice needs a title.")
    if link and (len(link) > MAX_LINK or not _LINK.fullmatch(link)):
        raise ValueError(f"{link[:100]!r} is not a path of this site: use reverse(…).")
    return {"title": title_line, "detail": _line(detail, MAX_DETAIL), "link": link}


def _facts(facts: Facts) -> list[list[str]]:
    pairs = ([_line(name, MAX_NAME), _line(text, MAX_FACT)] for name, text in facts[:MAX_FACTS])
    return [pair for pair in pairs if all(pair)]


def _line(text: str, most: int) -> str:
    return untrusted.line(masked(" ".join(_ESCAPES.sub("", text).split())), most)


def _audience(to: User | Literal[Notice.Audience.SYSADMINS]) -> dict[str, Any]:
    if isinstance(to, User):
        return {"audience": Notice.Audience.PERSON, "user": to}
    return {"audience": to, "user": None}


def _kind(kind: str) -> str:
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind[:100]!r} is not a kind of notification: use lower-case words separated by dots.")
    return kind


def _key(key: str) -> str:
    if not untrusted.name(key, MAX_KEY):
        raise ValueError(f"{key[:100]!r} is not a valid key: use printable characters, at most {MAX_KEY} characters.")
    return key

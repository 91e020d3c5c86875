"""Read the announcements that are shown now, cheaply: every page and every request of `vigil` needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.http import HttpRequest, HttpResponse

from portal.models import Announcement

MAX_ANNOUNCEMENTS = 5
"""Announcements that are shown at once: the most urgent, the newest of them first."""
FRESH_S = 5.0
HEADER = "Vigil-Announcements"
MAX_HEADER_BYTES = 2_000
"""Bytes of the header. A proxy that has no room for all headers, in nginx 4 KiB by default, answers 502 instead."""
CUT = quote("…")
URGENCY = {Announcement.Level.CRITICAL: 0, Announcement.Level.WARNING: 1, Announcement.Level.INFO: 2}
_cached: tuple[float, str, tuple[Announcement, ...]] | None = None


def current() -> tuple[Announcement, ...]:
    """Return what is shown now, as of at most five seconds ago."""
    global _cached
    database = str(settings.DATABASES["default"]["NAME"])
    if _cached is None or time.monotonic() - _cached[0] > FRESH_S or _cached[1] != database:
        rows = sorted(
            Announcement.objects.shown()[: 10 * MAX_ANNOUNCEMENTS],
            key=lambda row: URGENCY[Announcement.Level(row.level)],
        )
        _cached = (time.monotonic(), database, tuple(rows[:MAX_ANNOUNCEMENTS]))
    return tuple(row for row in _cached[2] if row.is_shown)


def forget() -> None:
    """Read them again at the next request of this process, because one was written or withdrawn."""
    global _cached
    _cached = None


def add_header(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Tell the `vigil` command what is announced, in a header of whatever it asked for."""

    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        response = view(request, *args, **kwargs)
        # An endpoint that anybody may ask sets no `auth`: announcements are for those who are signed in.
        is_command = request.headers.get("User-Agent", "").startswith("vigil-cli") and getattr(request, "auth", None)
        if is_command and response.status_code < 400 and (shown := current()):
            response.headers[HEADER] = _header(shown)
        return response

    return answer


def _header(shown: Sequence[Announcement]) -> str:
    """Return `level;text` of each, quoted. Long texts are cut: each gets its share of what earlier ones left."""
    parts: list[str] = []
    room = MAX_HEADER_BYTES
    for number, row in enumerate(shown):
        share = room // (len(shown) - number)
        parts.append(f"{row.level};{_quoted(row.text, share - len(row.level) - 2)}")  # with `;` and `,`
        room -= len(parts[-1]) + 1
    return ",".join(parts)


def _quoted(text: str, most: int) -> str:
    """Return the text quoted, in at most so many bytes: letters outside ASCII take up to twelve."""
    letters = [quote(letter, safe=" ") for letter in text]
    if sum(map(len, letters)) <= most:
        return "".join(letters)
    ends = accumulate(map(len, letters))
    return "".join(letter for letter, end in zip(letters, ends, strict=True) if end <= most - len(CUT)) + CUT

"""What is said about a cause here: Vigil's own runbook, or the one that sysadmins wrote in its place."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils import timezone

from diagnosis import runbook
from portal.access import note
from portal.audit import Change
from portal.models import SiteRunbook, User
from vigil_core.untrusted import plain


@dataclass(frozen=True)
class Runbook:
    """Both texts; `site` is None where the site has none of its own."""

    code: str
    own: str
    site: SiteRunbook | None

    @property
    def text(self) -> str:
        return self.site.text if self.site else self.own


def of(code: str) -> Runbook:
    site = SiteRunbook.objects.select_related("changed_by").filter(code=code).first()
    return Runbook(code, runbook.shipped_runbook(code), site)


def write(user: User, code: str, text: str) -> None:
    """Put the site's own in place of Vigil's; ValueError says what is wrong with it."""
    text = plain(text).replace("\r\n", "\n").strip()
    if not text:
        raise ValueError("There is nothing in it. To show Vigil's own again, press the button for that.")
    if len(text) > SiteRunbook.MOST:
        raise ValueError(f"It has {len(text):,} characters; {SiteRunbook.MOST:,} are the most.")
    fields = {"text": f"{text}\n", "changed_by": user, "changed_at": timezone.now()}
    before = SiteRunbook.objects.filter(code=code).values_list("text", flat=True).first()
    SiteRunbook.objects.update_or_create(code=code, defaults=fields)
    note(user, "runbook.changed", code, change=Change(before={"text": before}, after={"text": fields["text"]}))


def forget(user: User, code: str) -> bool:
    """Back to Vigil's own; whether there was another."""
    before = SiteRunbook.objects.filter(code=code).values_list("text", flat=True).first()
    gone = bool(SiteRunbook.objects.filter(code=code).delete()[0])
    if gone:
        note(user, "runbook.forgotten", code, change=Change(before={"text": before}))
    return gone

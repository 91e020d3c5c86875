"""Read and edit the runbook of a cause: Vigil's text, or the one that sysadmins wrote for this site."""

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
    """Both texts. `site` is None if the site has not written one."""

    code: str
    builtin: str
    site: SiteRunbook | None

    @property
    def text(self) -> str:
        return self.site.text if self.site else self.builtin


def find(code: str) -> Runbook:
    site = SiteRunbook.objects.select_related("changed_by").filter(code=code).first()
    return Runbook(code, runbook.shipped_runbook(code), site)


def write(user: User, code: str, text: str) -> None:
    """Replace Vigil's text with the site's. Raises ValueError if the text is invalid."""
    text = plain(text).replace("\r\n", "\n").strip()
    if not text:
        raise ValueError("The text is empty. To restore Vigil's text, use the button for that.")
    if len(text) > SiteRunbook.MAX_LENGTH:
        raise ValueError(f"The text has {len(text):,} characters; at most {SiteRunbook.MAX_LENGTH:,} are allowed.")
    fields = {"text": f"{text}\n", "changed_by": user, "changed_at": timezone.now()}
    before = SiteRunbook.objects.filter(code=code).values_list("text", flat=True).first()
    SiteRunbook.objects.update_or_create(code=code, defaults=fields)
    note(user, "runbook.changed", code, change=Change(before={"text": before}, after={"text": fields["text"]}))


def reset(user: User, code: str) -> bool:
    """Restore Vigil's text; return whether the site had its own."""
    before = SiteRunbook.objects.filter(code=code).values_list("text", flat=True).first()
    gone = bool(SiteRunbook.objects.filter(code=code).delete()[0])
    if gone:
        note(user, "runbook.forgotten", code, change=Change(before={"text": before}))
    return gone

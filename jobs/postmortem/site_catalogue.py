"""The catalogue of this site: what ships with Vigil, and what its sysadmins add.

A changed catalogue counts for the next diagnosis; no verdict that there is changes by it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import re2
from django.db import IntegrityError, transaction
from django.utils import timezone

from diagnosis.signatures.catalogue import Catalogue, as_site_entry, extended_catalogue, shipped_catalogue
from diagnosis.signatures.entry import FIELDS, BadEntry, Entry, parse_entry
from diagnosis.signatures.prefilter import prefilter_of
from diagnosis.trial.checks import EntryTrial
from diagnosis.trial.subprocess_trial import entry_as_json, try_entry
from jobs.errors import Conflict, Problem, SpecError
from jobs.models import SiteCatalogue, SiteEntry
from portal.access import note
from portal.audit import Change
from portal.models import User
from vigil_core import untrusted

logger = logging.getLogger(__name__)
MOST = 500  # entries of a site


def current_catalogue() -> Catalogue:
    """What logs are read by now: the same object as long as no entry changes."""
    return beside(entries())


def beside(more: tuple[Entry, ...]) -> Catalogue:
    """The catalogue with these entries of a site; without any of them where they can't be put together."""
    known = extended_catalogue(more)
    try:
        prefilter_of(known)
    except re2.error as error:
        logger.error("The site's entries are left out: they can't be put together (%s).", error)
        return shipped_catalogue()
    return known


def catalogue_at(moment: datetime) -> Catalogue:
    """What logs were read by then: a verdict is revised for new evidence, never for a changed catalogue."""
    then = SiteCatalogue.objects.filter(at__lte=moment).first()
    told = then.entries if then is not None else []
    return beside(tuple(map(as_site_entry, filter(None, map(_entry, told)))))


def entries(*, but: str = "") -> tuple[Entry, ...]:
    """Those that count, without the one of that name."""
    rows = SiteEntry.objects.filter(is_enabled=True).exclude(name=but)
    return tuple(map(as_site_entry, filter(None, map(written_in, rows))))


def written_in(row: SiteEntry) -> Entry | None:
    """A row's entry as it was written; None where this Vigil no longer takes it, as one with a cause that is gone."""
    return _entry({name: getattr(row, name) for name in FIELDS})


def _entry(values: Mapping[str, Any]) -> Entry | None:
    try:
        return parse_entry(values)
    except BadEntry as error:
        logger.error("An entry of the site is left out: %s.", error)
        return None


def named(name: str) -> SiteEntry | None:
    """The row of that name, whatever somebody wrote into an address."""
    rows = SiteEntry.objects.select_related("made_by", "changed_by")
    return rows.filter(name=name).first() if untrusted.name(name, 64) else None


# What sysadmins change.


def check(raw: Mapping[str, Any], *, instead_of: str = "") -> EntryTrial:
    """What an entry would have to stand, beside the others; nothing is kept."""
    name = untrusted.name(raw.get("name"), 64)
    trial = try_entry(raw, entries(but=instead_of or name))
    if name != instead_of and named(name) is not None:
        trial.add("warn", "name", "The site has an entry of this name. Change that one, or take another name.")
    return trial


def add(user: User, raw: Mapping[str, Any]) -> SiteEntry:
    """A new entry; SpecError where it is not fit, Conflict where there is one of its name."""
    return keep(user, _fit(raw))


def keep(user: User, entry: Entry) -> SiteEntry:
    """A new entry that has been tried."""
    if SiteEntry.objects.count() >= MOST:
        raise Conflict(f"The site has {MOST} entries. Remove some first.")
    try:
        with transaction.atomic():
            row = SiteEntry.objects.create(made_by=user, changed_by=user, **_values(entry))
            _changed(user, "add", row, Change(after=_audited(row)))
    except IntegrityError:
        raise Conflict(f"There is an entry {entry.name} of this site. Change that one, or take another name.") from None
    return row


def change(user: User, row: SiteEntry, raw: Mapping[str, Any]) -> SiteEntry:
    """Write an entry anew, as it was read; it may get another name."""
    entry = _fit(raw, instead_of=row.name)
    as_read = SiteEntry.objects.filter(pk=row.pk, changed_at=row.changed_at)
    try:
        with transaction.atomic():
            if not as_read.update(changed_by=user, changed_at=timezone.now(), **_values(entry)):
                raise Conflict(f"{row.name} was changed or removed meanwhile. Look at it again.")
            before = _audited(row)
            row.refresh_from_db()
            _changed(user, "change", row, Change(before=before, after=_audited(row)))
    except IntegrityError:
        raise Conflict(f"There is another entry {entry.name} of this site. Take another name.") from None
    return row


def enable(user: User, row: SiteEntry, is_enabled: bool) -> SiteEntry:
    """Let an entry count, or no longer."""
    mine = SiteEntry.objects.filter(pk=row.pk, is_enabled=not is_enabled)
    with transaction.atomic():
        if mine.update(is_enabled=is_enabled, changed_by=user, changed_at=timezone.now()):
            change = Change(before={"is_enabled": not is_enabled}, after={"is_enabled": is_enabled})
            _changed(user, "enable" if is_enabled else "disable", row, change)
    row.refresh_from_db()
    return row


def remove(user: User, row: SiteEntry) -> None:
    with transaction.atomic():
        before = _audited(row)
        row.delete()
        _changed(user, "remove", row, Change(before=before))


def _audited(row: SiteEntry) -> dict[str, Any]:
    """Return the values of an entry for the audit log."""
    return {name: getattr(row, name) for name in FIELDS}


def _changed(user: User, how: str, row: SiteEntry, change: Change) -> None:
    """Write down who did what, and which entries count from now on; of old such lists only what revisions need."""
    note(user, f"catalogue.{how}", row.name, row.pattern or row.exception, change)
    now = timezone.now()
    SiteCatalogue.objects.create(at=now, entries=[entry_as_json(entry) for entry in entries()])
    standing = SiteCatalogue.objects.filter(at__lt=now - SiteCatalogue.KEPT).values_list("pk", flat=True)[1:]
    SiteCatalogue.objects.filter(pk__in=list(standing)).delete()


def _fit(raw: Mapping[str, Any], *, instead_of: str = "") -> Entry:
    trial = check(raw, instead_of=instead_of)
    if not trial.is_fit:
        raise SpecError(Problem(finding.field, finding.text) for finding in trial.errors)
    return parse_entry(raw)


def _values(entry: Entry) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

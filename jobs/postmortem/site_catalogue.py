"""Combine the entries that ship with Vigil and those that this site's sysadmins add into the site's catalogue.

A change applies from the next diagnosis on; existing verdicts stay as they are.
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
MAX_ENTRIES = 500  # entries of a site


def current_catalogue() -> Catalogue:
    """Return the catalogue that logs are read with now; the same object until an entry changes."""
    return combined(enabled_entries())


def combined(site_entries: tuple[Entry, ...]) -> Catalogue:
    """Return the catalogue with these entries of the site, or none of them if they cannot be compiled together."""
    catalogue = extended_catalogue(site_entries)
    try:
        prefilter_of(catalogue)
    except re2.error as error:
        logger.error("The site's entries are ignored: they cannot be compiled together (%s).", error)
        return shipped_catalogue()
    return catalogue


def catalogue_at(moment: datetime) -> Catalogue:
    """Return the catalogue of a past moment: a verdict is revised for new evidence, never for a changed catalogue."""
    then = SiteCatalogue.objects.filter(at__lte=moment).first()
    rows = then.entries if then is not None else []
    return combined(tuple(map(as_site_entry, filter(None, map(_entry, rows)))))


def enabled_entries(*, but: str = "") -> tuple[Entry, ...]:
    """Return the site's enabled entries, except the one named `but`."""
    rows = SiteEntry.objects.filter(is_enabled=True).exclude(name=but)
    return tuple(map(as_site_entry, filter(None, map(entry_of_row, rows))))


def entry_of_row(row: SiteEntry) -> Entry | None:
    """Return the entry in a row; None if this release no longer accepts it, as for a cause that was removed."""
    return _entry({name: getattr(row, name) for name in FIELDS})


def _entry(values: Mapping[str, Any]) -> Entry | None:
    try:
        return parse_entry(values)
    except BadEntry as error:
        logger.error("A site entry is ignored: %s.", error)
        return None


def find_row(name: str) -> SiteEntry | None:
    """Return the row of that name, which comes from a URL and may be anything."""
    rows = SiteEntry.objects.select_related("made_by", "changed_by")
    return rows.filter(name=name).first() if untrusted.name(name, 64) else None


# Changes by sysadmins.


def check(raw: Mapping[str, Any], *, instead_of: str = "") -> EntryTrial:
    """Try an entry alongside the site's others; nothing is stored."""
    name = untrusted.name(raw.get("name"), 64)
    trial = try_entry(raw, enabled_entries(but=instead_of or name))
    if name != instead_of and find_row(name) is not None:
        trial.add("warn", "name", "The site has an entry of this name. Edit that one, or choose another name.")
    return trial


def add(user: User, raw: Mapping[str, Any]) -> SiteEntry:
    """Add an entry. Raises SpecError if it fails its trial, Conflict if its name is taken."""
    return store(user, _checked_entry(raw))


def store(user: User, entry: Entry) -> SiteEntry:
    """Store an entry that has passed its trial. Raises Conflict if its name is taken or the site has too many."""
    if SiteEntry.objects.count() >= MAX_ENTRIES:
        raise Conflict(f"The site has {MAX_ENTRIES} entries. Remove some first.")
    try:
        with transaction.atomic():
            row = SiteEntry.objects.create(made_by=user, changed_by=user, **_values(entry))
            _record_change(user, "add", row, Change(after=_audited(row)))
    except IntegrityError:
        raise Conflict(f"The site has an entry {entry.name}. Edit that one, or choose another name.") from None
    return row


def change(user: User, row: SiteEntry, raw: Mapping[str, Any]) -> SiteEntry:
    """Replace an entry as it was read, perhaps under another name. Raises Conflict if somebody changed it meanwhile."""
    entry = _checked_entry(raw, instead_of=row.name)
    as_read = SiteEntry.objects.filter(pk=row.pk, changed_at=row.changed_at)
    try:
        with transaction.atomic():
            if not as_read.update(changed_by=user, changed_at=timezone.now(), **_values(entry)):
                raise Conflict(f"{row.name} was changed or removed meanwhile. Reload it and try again.")
            before = _audited(row)
            row.refresh_from_db()
            _record_change(user, "change", row, Change(before=before, after=_audited(row)))
    except IntegrityError:
        raise Conflict(f"The site has another entry {entry.name}. Choose another name.") from None
    return row


def enable(user: User, row: SiteEntry, is_enabled: bool) -> SiteEntry:
    """Enable or disable an entry."""
    unchanged = SiteEntry.objects.filter(pk=row.pk, is_enabled=not is_enabled)
    with transaction.atomic():
        if unchanged.update(is_enabled=is_enabled, changed_by=user, changed_at=timezone.now()):
            change = Change(before={"is_enabled": not is_enabled}, after={"is_enabled": is_enabled})
            _record_change(user, "enable" if is_enabled else "disable", row, change)
    row.refresh_from_db()
    return row


def remove(user: User, row: SiteEntry) -> None:
    with transaction.atomic():
        before = _audited(row)
        row.delete()
        _record_change(user, "remove", row, Change(before=before))


def _audited(row: SiteEntry) -> dict[str, Any]:
    """Return the values of an entry for the audit log."""
    return {name: getattr(row, name) for name in FIELDS}


def _record_change(user: User, how: str, row: SiteEntry, change: Change) -> None:
    """Write the audit log and which entries apply from now on; delete old such lists that no revision needs."""
    note(user, f"catalogue.{how}", row.name, row.pattern or row.exception, change)
    now = timezone.now()
    SiteCatalogue.objects.create(at=now, entries=[entry_as_json(entry) for entry in enabled_entries()])
    standing = SiteCatalogue.objects.filter(at__lt=now - SiteCatalogue.RETENTION).values_list("pk", flat=True)[1:]
    SiteCatalogue.objects.filter(pk__in=list(standing)).delete()


def _checked_entry(raw: Mapping[str, Any], *, instead_of: str = "") -> Entry:
    trial = check(raw, instead_of=instead_of)
    if not trial.is_fit:
        raise SpecError(Problem(finding.field, finding.text) for finding in trial.errors)
    return parse_entry(raw)


def _values(entry: Entry) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

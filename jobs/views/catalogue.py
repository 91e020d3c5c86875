"""Pages of the failure catalogue for sysadmins: the site's entries, the form with its trial, and the replay."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from diagnosis.signatures.catalogue import shipped_catalogue
from diagnosis.signatures.entry import FIELDS, PATTERNS, BadEntry, read_entries
from diagnosis.signatures.toml_export import to_toml
from diagnosis.trial.checks import EntryTrial, TrialFinding
from diagnosis.trial.subprocess_trial import entry_as_json
from jobs.errors import Conflict, SpecError
from jobs.models import Incident, Replay, SiteEntry
from jobs.postmortem import replay, site_catalogue
from jobs.presenting import entry_fields
from portal.access import sysadmin_of
from portal.http.download import as_download
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import whole

CHANGE = "change the catalogue"
MAX_TEXT = 200_000  # characters of an entry file
MAX_ENTRIES_PER_FILE = 20  # entries per file, because each is tried for up to a second
PREFILLED = ("name", "pattern", "example", "cause", "role")  # by a link to the form


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    sysadmin_of(request, CHANGE)
    if request.GET.get("format") == "toml":
        rows = [row for row in SiteEntry.objects.all() if row.is_enabled or request.GET.get("all")]
        text = to_toml(filter(None, map(site_catalogue.entry_of_row, rows)))
        return as_download(HttpResponse(text, content_type="application/toml"), "catalogue.toml")
    return _index(request)


def _index(request: HttpRequest, *, text: str = "", mistakes: Sequence[str] = ()) -> HttpResponse:
    rows = list(SiteEntry.objects.select_related("changed_by"))
    context = {
        "section": "postmortems",
        "rows": rows,
        "headline": _summary(rows),
        "judged": Incident.objects.judged()[:1].exists(),
        "text": text,
        "mistakes": mistakes,
        "most": MAX_ENTRIES_PER_FILE,
    }
    return render(request, "jobs/catalogue.html", context, status=422 if mistakes else 200)


def _summary(rows: Sequence[SiteEntry]) -> tuple[str, str]:
    shipped = formatting.count(len(shipped_catalogue().entries))
    if not rows:
        return f"{shipped} entries ship with Vigil.", "This site adds none yet."
    count = sum(row.is_enabled for row in rows)
    if not count:
        return f"{shipped} entries ship with Vigil.", "The entries of this site are all disabled."
    lead = f"This site adds {formatting.plural(count, 'entry', 'entries')} to the {shipped} that ship with Vigil."
    off = len(rows) - count
    return lead, f"{formatting.plural(off, 'more is', 'more are')} disabled." if off else ""


@login_required
@require_POST
def add_entries(request: HttpRequest) -> HttpResponse:
    """Add entries given as TOML text: all of them, or none if one is invalid."""
    user = sysadmin_of(request, CHANGE)
    text = request.POST.get("text", "").replace("\r\n", "\n")
    mistakes = []
    try:
        if len(text) > MAX_TEXT:
            raise BadEntry(
                f"The text is longer than {MAX_TEXT:,} characters: add it in parts, or use `vigil catalogue add`."
            )
        given = read_entries(text)
        if not 1 <= len(given) <= MAX_ENTRIES_PER_FILE:
            mistakes = [f"The text has {len(given)} [[entry]] tables; 1 to {MAX_ENTRIES_PER_FILE} are allowed."]
        for entry in given if not mistakes else ():
            trial = site_catalogue.check(entry_as_json(entry))
            mistakes += [f"{entry.name}, {finding.field}: {finding.text}" for finding in trial.errors]
            if site_catalogue.find_row(entry.name) is not None:
                mistakes.append(f"{entry.name}: The site has an entry of this name.")
        with transaction.atomic():
            for entry in given if not mistakes else ():
                site_catalogue.store(user, entry)
    except (tomllib.TOMLDecodeError, BadEntry, RecursionError, Conflict) as error:
        mistakes = [str(error)]
    if mistakes:
        return _index(request, text=text, mistakes=mistakes)
    messages.success(request, f"Added {formatting.plural(len(given), 'entry', 'entries')}.")
    return redirect("catalogue")


# One entry.


@login_required
@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """Show the form for a new entry: empty, filled from a link, or with the entry of a replay."""
    user = sysadmin_of(request, CHANGE)
    if request.method == "POST":
        return _posted(request, user, None)
    given = {name: value for name in PREFILLED if (value := request.GET.get(name, ""))}
    return _form(request, _of_replay(request) or {"role": "root", "scope": "program", **given}, None)


@login_required
@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, name: str) -> HttpResponse:
    """Show the form of an existing entry."""
    user = sysadmin_of(request, CHANGE)
    row = _row(name)
    if request.method == "POST":
        return _posted(request, user, row)
    return _form(request, _of_replay(request) or {name: getattr(row, name) for name in FIELDS}, row)


def _row(name: str) -> SiteEntry:
    row = site_catalogue.find_row(name)
    if row is None:
        raise Http404
    return row


def _of_replay(request: HttpRequest) -> dict[str, Any] | None:
    """Return the entry of the replay from which somebody returned to the form."""
    number = whole(request.GET.get("replay"))
    found = Replay.objects.filter(pk=number).first() if number else None
    return found.entry if found else None


def _posted(request: HttpRequest, user: User, row: SiteEntry | None) -> HttpResponse:
    """Check, replay or save the entry, depending on the button."""
    raw = entry_fields.parse_entry(request.POST)
    instead_of = row.name if row else ""
    try:
        if request.POST.get("do") == "replay":
            return redirect("catalogue_replay", replay_id=replay.start(user, raw, instead_of=instead_of).pk)
        if request.POST.get("do") == "save":
            saved = site_catalogue.change(user, row, raw) if row else site_catalogue.add(user, raw)
            messages.success(request, _saved(saved))
            return redirect("catalogue")
    except SpecError as error:
        trial = EntryTrial([TrialFinding("error", problem.field, problem.message) for problem in error.problems])
    except Conflict as error:
        trial = EntryTrial([TrialFinding("error", "name", str(error))])
    else:
        trial = site_catalogue.check(raw, instead_of=instead_of)
    return _form(request, raw, row, trial, status=200 if trial.is_fit else 422)


def _saved(row: SiteEntry) -> str:
    if not row.is_enabled:
        return f"{row.name} is saved. It is disabled and not used."
    return f"{row.name} is saved, and used from the next diagnosis on. Earlier verdicts do not change."


def _form(
    request: HttpRequest,
    raw: Mapping[str, Any],
    row: SiteEntry | None,
    trial: EntryTrial | None = None,
    status: int = 200,
) -> HttpResponse:
    first, more = entry_fields.fields(raw, trial.findings if trial else ())
    context = {
        "section": "postmortems",
        "row": row,
        "first": first,
        "more": more,
        "is_more_open": any(field.value and field.value != "program" or field.problems for field in more),
        "trial": trial,
    }
    return render(request, "jobs/catalogue_entry.html", context, status=status)


@login_required
@require_POST
def check(request: HttpRequest) -> HttpResponse:
    """Try the entry as typed so far; htmx shows the result next to the form."""
    sysadmin_of(request, CHANGE)
    raw = entry_fields.parse_entry(request.POST)
    is_begun = any(raw.get(name) for name in ("pattern", "exception", "example"))
    trial = site_catalogue.check(raw, instead_of=request.POST.get("instead_of", "")[:64]) if is_begun else None
    return render(request, "jobs/_trial.html", {"trial": trial})


@login_required
@require_POST
def enable(request: HttpRequest, name: str) -> HttpResponse:
    user = sysadmin_of(request, CHANGE)
    row = site_catalogue.enable(user, _row(name), request.POST.get("enabled") == "1")
    messages.success(
        request, f"{row.name} is {'used' if row.is_enabled else 'no longer used'} from the next diagnosis on."
    )
    return redirect("catalogue")


@login_required
@require_POST
def remove(request: HttpRequest, name: str) -> HttpResponse:
    user = sysadmin_of(request, CHANGE)
    site_catalogue.remove(user, _row(name))
    messages.success(request, f"{name} is removed. Verdicts that name it keep its name.")
    return redirect("catalogue")


# Replay.


@login_required
@require_safe
def show_replay(request: HttpRequest, replay_id: int) -> HttpResponse:
    """Show a replay's progress and results; only that part if htmx asks."""
    sysadmin_of(request, CHANGE)
    stored_replay = replay.refresh(get_object_or_404(Replay, pk=replay_id))
    row = site_catalogue.find_row(stored_replay.instead_of)
    context = {
        "section": "postmortems",
        "replay": stored_replay,
        "row": row,
        "headline": replay_summary(stored_replay),
        "fields": [(name, str(value)) for name, value in stored_replay.entry.items() if name in PATTERNS],
    }
    is_fragment = request.headers.get("HX-Target") == "replay"
    answer = render(request, "jobs/_replay.html" if is_fragment else "jobs/catalogue_replay.html", context)
    answer.headers["Vary"] = "HX-Request, HX-Target, Cookie"
    return answer


def replay_summary(found: Replay) -> tuple[str, str]:
    """Return how many verdicts would change, and whether people agree with the changes."""
    many = len(found.changes)
    if not found.of:
        return "There are no verdicts yet.", ""
    if found.is_going and not many:
        return "No verdict would change so far.", ""
    lead = f"{formatting.plural(many, 'verdict')} would change." if many else "No verdict would change."
    agreed = sum(change["by_person"] == change["after"] for change in found.changes)
    against = sum(bool(change["by_person"]) and change["by_person"] == change["before"] for change in found.changes)
    words = [f"{formatting.count(agreed)} of them to the cause named by a person."] if agreed else []
    words += [f"{formatting.count(against)} away from it."] if against else []
    return lead, " ".join(words)


@login_required
@require_POST
def save_replayed(request: HttpRequest, replay_id: int) -> HttpResponse:
    """Save the entry that was replayed."""
    user = sysadmin_of(request, CHANGE)
    stored_replay = get_object_or_404(Replay, pk=replay_id)
    row = site_catalogue.find_row(stored_replay.instead_of)
    try:
        entry = stored_replay.entry
        saved = site_catalogue.change(user, row, entry) if row else site_catalogue.add(user, entry)
    except (SpecError, Conflict) as error:
        messages.error(request, f"Not saved: {error}")
        return redirect("catalogue_replay", replay_id=stored_replay.pk)
    messages.success(request, _saved(saved))
    return redirect("catalogue")


@login_required
@require_POST
def stop(request: HttpRequest, replay_id: int) -> HttpResponse:
    sysadmin_of(request, CHANGE)
    replay.stop(get_object_or_404(Replay, pk=replay_id))
    return redirect("catalogue_replay", replay_id=replay_id)

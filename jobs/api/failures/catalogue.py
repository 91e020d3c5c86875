"""REST: this site's entries in the failure catalogue, what an entry would change, and labelled cases for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import StreamingHttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field, StringConstraints

from diagnosis.signatures.entry import FIELDS
from jobs.models import Replay, SiteEntry
from jobs.postmortem import examples, replay, site_catalogue
from portal.http.api import ApiRequest, stream
from portal.http.openapi import deprecated, described
from portal.http.problems import Problem
from portal.sysadmins import only_sysadmins

router = Router(tags=["failures"])
ONLY_SYSADMINS = "Only for sysadmins with an admin token."
UNFIT = "The entry is invalid: `errors` names each field with valid values and, for a slow pattern, its time."
CONFLICT = "The site has another entry with the new name, or somebody has changed this one."
ACTION = "change the catalogue"
Line = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00]*$")]
Word = Annotated[str, StringConstraints(max_length=64, pattern=r"^[^\x00]*$")]


class CatalogueEntry(Schema):
    """An entry, with the fields of the catalogue's own files (docs/how-to/catalogue.md)."""

    model_config = {"extra": "forbid"}
    name: Word = Field(description="Lower-case letters, digits, - and _, separated by dots.")
    role: Word = Field(description="root, echo, confirmation, exit, handled or completed.")
    cause: Word
    source: Line = Field(description="Where the format comes from.")
    pattern: Line = Field("", description="RE2, matched against the line without prefixes.")
    unless: Line = Field("", description="Lines that match this are excluded.")
    exception: Line = Field("", description="Exception class, for tracebacks.")
    frame: Line = ""
    during: list[Word] = Field(default_factory=list, max_length=16)
    scope: Word = "program"
    is_generic: bool = False
    advice: Line = ""
    frameworks: list[Word] = Field(default_factory=list, max_length=16)
    example: Line = Field(description="A matching line.")
    look_alike: Line = Field(description="A similar line that must not match.")


class SiteEntryShape(CatalogueEntry):
    is_enabled: bool
    made_by: str
    made_at: datetime
    changed_by: str
    changed_at: datetime


class SiteEntries(Schema):
    items: list[SiteEntryShape]
    next: str | None = None


class Enabling(Schema):
    model_config = {"extra": "forbid"}
    is_enabled: bool = Field(description="Whether the entry is used.")


class TrialFinding(Schema):
    level: Literal["error", "warn", "notice"] = Field(description="Errors prevent the entry from being saved.")
    field: str
    text: str


class TrialShape(Schema):
    """The result of trying an entry on its own example lines and on a long log."""

    is_fit: bool
    findings: list[TrialFinding]
    seconds: float | None = Field(description="Time of its patterns; null: they were not tried.")
    megabytes: float = Field(description="Size of the log that was searched in that time.")


class ReplayRequest(CatalogueEntry):
    instead_of: Word = Field("", description="The entry that it replaces, if that has another name.")
    most: int = Field(
        replay.MAX_INCIDENTS,
        ge=1,
        le=replay.MAX_INCIDENTS,
        description="Number of incidents, newest first; those with a person's cause before others.",
    )


class ReplayChange(Schema):
    """A verdict that would change."""

    incident: int
    job: int
    name: str
    attempt: int
    incarnation: int | None
    before: str
    after: str
    confidence: float
    summary: str = Field("", description="The new verdict, in a sentence.")
    says: str = deprecated("summary")
    by_person: str = Field(description="Cause named by a person; empty: none.")


class ReplayShape(Schema):
    """The progress and results of a replay."""

    id: int
    state: Literal["going", "done", "stopped"]
    outcome: str = Field(description="Why the replay stopped early.")
    done: int
    of: int
    read: int = Field(description="Number of incidents done whose logs could be read.")
    named: int = Field(description="Number of those of which the entry would be the root cause.")
    seconds: float
    changes: list[ReplayChange]


class ExampleQuery(Schema):
    limit: int = Field(examples.MAX_CASES, ge=1, le=examples.MAX_CASES, description="Number of cases, newest first.")


@router.get(
    "/entries",
    response=SiteEntries,
    summary="The site's entries (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def entries(request: ApiRequest) -> dict[str, Any]:
    """Return every entry that sysadmins of this site added, including disabled ones, by name."""
    only_sysadmins(request, ACTION)
    return {"items": [_shape(row) for row in SiteEntry.objects.select_related("made_by", "changed_by")]}


@router.post(
    "/entries",
    response={201: SiteEntryShape},
    summary="Add an entry (sysadmins)",
    openapi_extra=described(
        errors={403: ONLY_SYSADMINS, 409: "The site has an entry with this name, or too many entries.", 422: UNFIT}
    ),
)
def add(request: ApiRequest, entry: CatalogueEntry) -> Status[dict[str, Any]]:
    """Add an entry. It is tried first, and used from the next diagnosis on; existing verdicts do not change."""
    only_sysadmins(request, ACTION)
    return Status(201, _shape(site_catalogue.add(request.auth, entry.model_dump())))


@router.get(
    "/entries/{str:name}",
    response=SiteEntryShape,
    summary="One entry (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def entry(request: ApiRequest, name: str) -> dict[str, Any]:
    """Return one of the site's entries by name."""
    only_sysadmins(request, ACTION)
    return _shape(_row(name))


@router.put(
    "/entries/{str:name}",
    response=SiteEntryShape,
    summary="Replace an entry (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS, 409: CONFLICT, 422: UNFIT}),
)
def change(request: ApiRequest, name: str, entry: CatalogueEntry) -> dict[str, Any]:
    """Replace an entry. Send it whole; it may have a new name. It is tried like a new one."""
    only_sysadmins(request, ACTION)
    return _shape(site_catalogue.change(request.auth, _row(name), entry.model_dump()))


@router.patch(
    "/entries/{str:name}",
    response=SiteEntryShape,
    summary="Enable or disable an entry (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def enable(request: ApiRequest, name: str, change: Enabling) -> dict[str, Any]:
    """Enable or disable an entry. A disabled entry is stored unchanged."""
    only_sysadmins(request, ACTION)
    return _shape(site_catalogue.enable(request.auth, _row(name), change.is_enabled))


@router.delete(
    "/entries/{str:name}",
    response={204: None},
    summary="Remove an entry (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def remove(request: ApiRequest, name: str) -> Status[None]:
    """Delete an entry. Verdicts that name it keep its name."""
    only_sysadmins(request, ACTION)
    site_catalogue.remove(request.auth, _row(name))
    return Status(204, None)


@router.post(
    "/check",
    response=TrialShape,
    summary="Try an entry (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def check(request: ApiRequest, entry: CatalogueEntry) -> dict[str, Any]:
    """Try an entry without storing it.

    The trial checks its example and look-alike, its time for 5 MB of log, and overlaps with other entries.
    Patterns run in a separate process, which is stopped after a few seconds.
    """
    only_sysadmins(request, ACTION)
    return site_catalogue.check(entry.model_dump()).as_json()


@router.post(
    "/replays",
    response={202: ReplayShape},
    summary="See which verdicts an entry would change (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS, 422: UNFIT}),
)
def begin(request: ApiRequest, body: ReplayRequest) -> Status[dict[str, Any]]:
    """Start reading the logs of past incidents again as if the entry existed. No verdict is changed.

    Poll the result every few seconds: a replay stops after a minute without polling.
    """
    only_sysadmins(request, ACTION)
    raw = body.model_dump()
    options = {name: raw.pop(name) for name in ("instead_of", "most")}
    return Status(202, _replayed(replay.start(request.auth, raw, **options)))


@router.get(
    "/replays/{int:replay_id}",
    response=ReplayShape,
    summary="A replay's progress (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def show_replay(request: ApiRequest, replay_id: int) -> dict[str, Any]:
    """Return the replay's progress and results so far. They are stored for a day."""
    only_sysadmins(request, ACTION)
    return _replayed(replay.refresh(_replay(replay_id)))


@router.delete(
    "/replays/{int:replay_id}",
    response={204: None},
    summary="Stop a replay (sysadmins)",
    openapi_extra=described(errors={403: ONLY_SYSADMINS}),
)
def stop(request: ApiRequest, replay_id: int) -> Status[None]:
    """Stop a replay and delete its results."""
    only_sysadmins(request, ACTION)
    _replay(replay_id).delete()
    return Status(204, None)


@router.get(
    "/examples",
    summary="Incidents with a person's cause, as cases for --evaluate (sysadmins)",
    openapi_extra=described(
        {
            "responses": {
                200: {
                    "description": "Lines of JSON: id, label, said, why, and log, or logs by their names.",
                    "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
                }
            }
        },
        errors={403: ONLY_SYSADMINS},
    ),
)
def cases(request: ApiRequest, query: Query[ExampleQuery]) -> StreamingHttpResponse:
    """Return a case for each incident whose cause a person confirmed or corrected; secrets are masked.

    Each log is reduced to its head, the lines around the evidence, and its tail.
    """
    only_sysadmins(request, "export incidents with a person's cause")
    return stream(request, _lines(query.limit), "application/x-ndjson")


def _lines(limit: int) -> Iterator[str]:
    yield ""  # answers for an empty text too
    for case in examples.examples(limit):
        yield json.dumps(case) + "\n"


def _row(name: str) -> SiteEntry:
    row = site_catalogue.find_row(name)
    if row is None:
        raise Problem(404, "The site has no entry with this name. `vigil catalogue list` lists them.")
    return row


def _replay(replay_id: int) -> Replay:
    found = Replay.objects.filter(pk=replay_id).first()
    if found is None:
        raise Problem(404, "No such replay; replays are stored for a day.")
    return found


def _shape(row: SiteEntry) -> dict[str, Any]:
    who = {name: person.username if (person := getattr(row, name)) else "" for name in ("made_by", "changed_by")}
    fields = {name: getattr(row, name) for name in (*FIELDS, "is_enabled", "made_at", "changed_at")}
    return fields | who


def _replayed(row: Replay) -> dict[str, Any]:
    state = "going" if row.is_going else "stopped" if row.outcome else "done"
    same = ("outcome", "read", "named", "seconds", "of")
    changes = [{**change, "summary": change["says"]} for change in row.changes]
    fields = {name: getattr(row, name) for name in same}
    return {"id": row.pk, "state": state, "done": row.place, "changes": changes, **fields}

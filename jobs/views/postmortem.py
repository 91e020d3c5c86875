"""The post-mortem of an attempt: its project reads it; its owner, the project's leads and sysadmins edit it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from diagnosis.causes import CAUSES
from jobs.errors import JobError, Refused, SpecError
from jobs.gathering import postmortem as documents
from jobs.gathering import verdicts
from jobs.gathering.postmortem import Document
from jobs.models import Job
from jobs.postmortem import editing
from jobs.postmortem.editing import Action
from jobs.presenting.postmortems import lanes
from portal import markdown as readable
from portal.access import can, user_of
from portal.http.download import as_download
from portal.models import User
from vigil_core.untrusted import plain, whole

PIECES = 16  # pieces of evidence before "all of it"
SPANS = (("near", "Around it"), ("hour", "1 h"), ("attempt", "Attempt"))
NEW_ACTIONS = 2  # empty rows that the form offers
MAX_ROWS = 2 * editing.MAX_ACTIONS  # rows read from a form


@dataclass(frozen=True)
class ActionRow:
    """An action in the form. `key` is the id of its database row, or that of an empty form row."""

    key: str
    text: str = ""
    owner: str = ""
    due: str = ""
    is_done: bool = False


@dataclass(frozen=True)
class PostMortemDraft:
    """The content of the form that people fill in."""

    narrative: str
    factors: str
    rows: list[ActionRow]
    revision: str
    is_refused: bool = False


@login_required
@require_safe
def page(request: HttpRequest, job_id: int) -> HttpResponse:
    job = _job(request, job_id)
    document = _find(request, job)
    return _no_postmortem(request, job) if document is None else _page(request, document)


def _no_postmortem(request: HttpRequest, job: Job) -> HttpResponse:
    """Answer a request for a post-mortem that does not exist.

    Redirect to restarts in place, which have none; otherwise explain why there is none.
    """
    attempt = verdicts.restarted_in_place(job, whole(request.GET.get("attempt"), 2**31))
    if attempt is None:
        return render(request, "404.html", {"job": job, "why": _none_text(request, job)}, status=404)
    messages.info(request, f"Attempt {attempt} has no post-mortem: it restarted in place. Its incidents are below.")
    return redirect(f"{reverse('job_attempts', args=[job.pk])}#attempt-{attempt}")


def _page(request: HttpRequest, document: Document, status: int = 200, **form: object) -> HttpResponse:
    """Render the page. `form` holds rejected input."""
    user = user_of(request)
    span = request.GET.get("span", "near")
    is_whole = request.GET.get("evidence") == "all"
    may_write = can(user, "change", document.job)
    context = {
        "section": "postmortems",
        "doc": document,
        "incident": document.incident,
        "attempt": document.attempt,
        "job": document.job,
        "headline": document.headline,
        "cost": document.cost,
        "timeline": document.timeline(span if span in lanes.SPANS else "near"),
        "spans": SPANS,
        "pieces": document.evidence if is_whole else document.evidence[:PIECES],
        "more_pieces": 0 if is_whole else max(0, len(document.evidence) - PIECES),
        "alike": document.similar_incidents(user),
        "narrative": readable.render(document.written.narrative, deeper=2) if document.written else "",
        "may_write": may_write,
        **({**_form(document), **form} if may_write else {}),
    }
    return render(request, "jobs/postmortem.html", context, status=status)


@login_required
@require_safe
def as_markdown(request: HttpRequest, job_id: int) -> HttpResponse:
    document = _document(request, job_id)
    response = HttpResponse(document.as_markdown(), content_type="text/markdown; charset=utf-8")
    return as_download(response, f"post-mortem-{job_id}-{document.attempt.number}.md")


@login_required
@require_http_methods(["GET", "POST"])
def write(request: HttpRequest, job_id: int) -> HttpResponse:
    """Save narrative, factors and actions from the form."""
    if request.method == "GET":
        return _opened(request, job_id)
    document, draft = _document(request, job_id), _posted(request)
    try:
        editing.write(
            user_of(request),
            document.incident,
            narrative=draft.narrative,
            factors=[line for line in draft.factors.splitlines() if line.strip()],
            actions=_actions(draft),
            revision=whole(draft.revision, 2**31),
        )
    except JobError as error:
        return _refused(request, document, error, "Not saved.", draft=draft)
    messages.success(request, "Saved.")
    return _back(document, "#h-people")


@login_required
@require_POST
def publish(request: HttpRequest, job_id: int) -> HttpResponse:
    document = _document(request, job_id)
    is_published = request.POST.get("published") == "1"
    try:
        editing.publish(user_of(request), document.incident, is_published=is_published)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Published." if is_published else "Changed back to draft.")
    return _back(document)


@login_required
@require_http_methods(["GET", "POST"])
def overrule(request: HttpRequest, job_id: int) -> HttpResponse:
    """Overrule the cause; an empty cause withdraws the overrule."""
    if request.method == "GET":
        return _opened(request, job_id)
    document, user = _document(request, job_id), user_of(request)
    cause, why = plain(request.POST.get("cause", "")), _text(request, "why")
    try:
        if cause:
            editing.overrule(user, document.incident, cause=cause, why=why)
            messages.success(request, f"Overruled: the cause is now {cause}.")
        else:
            editing.withdraw(user, document.incident)
            messages.success(request, "Withdrawn. Vigil's verdict applies again.")
    except JobError as error:
        return _refused(
            request, document, error, "Not overruled.", word={"cause": cause, "why": why, "is_refused": True}
        )
    return _back(document, "#h-evidence")


def _refused(request: HttpRequest, document: Document, error: JobError, what: str, **form: object) -> HttpResponse:
    """Show the page again with the rejected input."""
    if isinstance(error, SpecError):
        messages.error(request, f"{what} {' '.join(problem.message for problem in error.problems)}")
        return _page(request, document, 422, **form)
    messages.error(request, str(error))
    return _page(request, document, 403 if isinstance(error, Refused) else 409, **form)


def _opened(request: HttpRequest, job_id: int) -> HttpResponse:
    """Redirect to the page: links on a page that rejected a form lead to the form's address."""
    return redirect(f"{reverse('job_postmortem', args=[job_id])}?{request.GET.urlencode()}")


def _document(request: HttpRequest, job_id: int) -> Document:
    """Return the post-mortem that the address names, if this person may see its job."""
    job = _job(request, job_id)
    document = _find(request, job)
    if document is None:
        raise Http404(_none_text(request, job))
    return document


def _job(request: HttpRequest, job_id: int) -> Job:
    jobs = Job.objects.visible_to(user_of(request)).select_related("project", "owner").defer("spec_toml", "notes")
    return get_object_or_404(jobs, pk=job_id)


def _find(request: HttpRequest, job: Job) -> Document | None:
    """Return the post-mortem of the attempt in the address, or of the newest failed one."""
    given = request.GET.get("attempt")
    number = whole(given, 2**31)
    return None if given and number is None else documents.load(job, number)


def _none_text(request: HttpRequest, job: Job) -> str:
    given = request.GET.get("attempt")
    which = f"attempt {given[:20]} of it has not" if given else "none of its attempts has"
    return f"#{job.pk} {job.name} has no post-mortem: {which} failed."


def _form(document: Document) -> dict[str, object]:
    members = User.objects.filter(memberships__project=document.job.project_id, is_active=True).order_by("username")
    return {
        "members": list(members.values_list("username", flat=True)[:500]),
        "causes": list(CAUSES.values()),
        "draft": _written(document),
        "word": {"cause": document.cause.code, "why": document.incident.overruled_why},
        "limits": {"narrative": editing.MAX_NARRATIVE, "action": editing.MAX_ACTION, "why": editing.MAX_WHY},
    }


def _written(document: Document) -> PostMortemDraft:
    written, rows = document.written, [ActionRow(f"new{i}") for i in range(NEW_ACTIONS)]
    if written is None:
        return PostMortemDraft("", "", rows, "0")
    there = [
        ActionRow(
            str(follow_up.pk),
            follow_up.text,
            follow_up.owner.username if follow_up.owner else "",
            str(follow_up.due or ""),
            follow_up.done_at is not None,
        )
        for follow_up in document.follow_ups
    ]
    return PostMortemDraft(written.narrative, "\n".join(written.factors), [*there, *rows], str(written.revision))


def _posted(request: HttpRequest) -> PostMortemDraft:
    """Return the posted form; each `row` names one action."""
    rows = [
        ActionRow(
            key=key,
            text=" ".join(_text(request, f"text-{key}").split()),
            owner=_text(request, f"owner-{key}"),
            due=_text(request, f"due-{key}"),
            is_done=request.POST.get(f"done-{key}") == "1",
        )
        for key in map(plain, request.POST.getlist("row")[:MAX_ROWS])
    ]
    revision = plain(request.POST.get("revision", ""))
    return PostMortemDraft(_text(request, "narrative"), _text(request, "factors"), rows, revision, is_refused=True)


def _text(request: HttpRequest, name: str) -> str:
    return plain(request.POST.get(name, "")).replace("\r\n", "\n").strip()


def _actions(draft: PostMortemDraft) -> list[Action]:
    """Return the actions with a text; the others are removed."""
    rows = [row for row in draft.rows if row.text]
    return [
        Action(text=row.text, id=whole(row.key), owner=row.owner, due=_day(row.due, i), is_done=row.is_done)
        for i, row in enumerate(rows)
    ]


def _day(text: str, place: int) -> date | None:
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise SpecError.at(f"actions.{place}.due", f"{text[:20]!r} is not a date. Write it as 2026-11-24.") from None


def _back(document: Document, place: str = "") -> HttpResponse:
    return redirect(f"{address(document)}{place}")


def address(document: Document) -> str:
    return f"{reverse('job_postmortem', args=[document.job.pk])}?attempt={document.attempt.number}"

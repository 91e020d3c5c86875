"""The post-mortem of an attempt: its project reads it; its owner, the project's leads and sysadmins write it."""

from __future__ import annotations

from datetime import date

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from jobs.causes import CAUSES
from jobs.errors import JobError, SpecError
from jobs.gathering import postmortem as documents
from jobs.gathering.postmortem import Document
from jobs.models import Job
from jobs.postmortem import people
from jobs.postmortem.people import Action
from jobs.presenting import lanes, markdown
from portal import markdown as readable
from portal.access import can, user_of
from portal.models import User
from portal.untrusted import plain, whole

PIECES = 16  # of evidence, before "all of it"
SPANS = (("near", "Around it"), ("hour", "1 h"), ("attempt", "Attempt"))
NEW_ACTIONS = 2  # empty rows that the form offers


@login_required
@require_safe
def page(request: HttpRequest, job_id: int) -> HttpResponse:
    user, document = user_of(request), _document(request, job_id)
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
        "alike": document.like_this(user),
        "narrative": readable.render(document.written.narrative, deeper=2) if document.written else "",
        "may_write": may_write,
        **(_form(document) if may_write else {}),
    }
    return render(request, "jobs/postmortem.html", context)


@login_required
@require_safe
def as_markdown(request: HttpRequest, job_id: int) -> HttpResponse:
    document = _document(request, job_id)
    response = HttpResponse(markdown.write(document), content_type="text/markdown; charset=utf-8")
    name = f"post-mortem-{job_id}-{document.attempt.number}.md"
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@login_required
@require_POST
def write(request: HttpRequest, job_id: int) -> HttpResponse:
    """Narrative, factors and actions, as the form has them."""
    document = _document(request, job_id)
    try:
        people.write(
            user_of(request),
            document.incident,
            narrative=_text(request, "narrative", people.NARRATIVE),
            factors=[line for line in _text(request, "factors", 50 * people.FACTOR).splitlines() if line.strip()][:50],
            actions=_actions(request),
            revision=whole(request.POST.get("revision"), 2**31),
        )
    except SpecError as error:
        messages.error(request, f"Not saved. {' '.join(problem.message for problem in error.problems)}")
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Saved.")
    return _back(document, "#h-people")


@login_required
@require_POST
def publish(request: HttpRequest, job_id: int) -> HttpResponse:
    document = _document(request, job_id)
    is_published = request.POST.get("published") == "1"
    try:
        people.publish(user_of(request), document.incident, is_published=is_published)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Published." if is_published else "It is a draft again.")
    return _back(document)


@login_required
@require_POST
def overrule(request: HttpRequest, job_id: int) -> HttpResponse:
    """A person's word on the cause; without one, theirs is withdrawn."""
    document, user = _document(request, job_id), user_of(request)
    try:
        if cause := plain(request.POST.get("cause", "")):
            people.overrule(user, document.incident, cause=cause, why=_text(request, "why", people.WHY))
            messages.success(request, f"The cause is {cause} now, by your word.")
        else:
            people.withdraw(user, document.incident)
            messages.success(request, "The cause is what the evidence says again.")
    except SpecError as error:
        messages.error(request, f"Not overruled. {' '.join(problem.message for problem in error.problems)}")
    except JobError as error:
        messages.error(request, str(error))
    return _back(document, "#h-evidence")


def _document(request: HttpRequest, job_id: int) -> Document:
    """The one that the address names, if this person may see its job."""
    jobs = Job.objects.visible_to(user_of(request)).select_related("project", "owner").defer("spec_toml", "notes")
    job = get_object_or_404(jobs, pk=job_id)
    given = request.GET.get("attempt")
    number = whole(given, 2**31)
    document = None if given and number is None else documents.of(job, number)
    if document is None:
        which = f"Attempt {given[:20]} of it" if given else "It"
        raise Http404(f"#{job_id} has no such post-mortem. {which} has not ended badly.")
    return document


def _form(document: Document) -> dict[str, object]:
    members = User.objects.filter(memberships__project=document.job.project_id, is_active=True).order_by("username")
    return {
        "members": list(members.values_list("username", flat=True)[:500]),
        "causes": list(CAUSES.values()),
        "factors_text": "\n".join(document.written.factors) if document.written else "",
        "blank": [f"new{i}" for i in range(NEW_ACTIONS)],
        "limits": {"narrative": people.NARRATIVE, "action": people.ACTION, "why": people.WHY},
    }


def _text(request: HttpRequest, name: str, most: int) -> str:
    return plain(request.POST.get(name, "")).replace("\r\n", "\n").strip()[:most]


def _actions(request: HttpRequest) -> list[Action]:
    """The rows of the form: `row` names each, and those whose text is empty go."""
    found: list[Action] = []
    for row in request.POST.getlist("row")[: people.ACTIONS + NEW_ACTIONS]:
        text = " ".join(_text(request, f"text-{row}", people.ACTION).split())
        if text:
            owner, due = plain(request.POST.get(f"owner-{row}", "")).strip(), request.POST.get(f"due-{row}", "")
            is_done = request.POST.get(f"done-{row}") == "1"
            found.append(Action(text=text, id=whole(row), owner=owner, due=_day(due, len(found)), is_done=is_done))
    return found[: people.ACTIONS]


def _day(text: str, place: int) -> date | None:
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise SpecError.at(f"actions.{place}.due", f"{text[:20]!r} is no day. Write it as 2026-11-24.") from None


def _back(document: Document, place: str = "") -> HttpResponse:
    return redirect(f"{address(document)}{place}")


def address(document: Document) -> str:
    return f"{reverse('job_postmortem', args=[document.job.pk])}?attempt={document.attempt.number}"

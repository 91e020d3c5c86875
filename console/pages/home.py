"""Render the home page: recent events, running and pending jobs, notifications, free GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from django.contrib.auth.decorators import login_required
from django.db.models import Count, Exists, F, Min, OuterRef, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from console.pages.nodes.free_slots import FreeSlots, free_now
from console.pages.readiness import banner
from jobs.gathering import verdicts
from jobs.gathering.job_row import JobRow
from jobs.gathering.sparklines import sparks
from jobs.listing.jobs import JobSearch
from jobs.models import Attempt, Checkpoint, Incident, Job, Sweep
from jobs.models.job import JobQuerySet
from jobs.presenting.metric_values import number
from jobs.waiting.reasons import reason_of
from nodes.models import Node
from portal import notify
from portal.access import user_of
from portal.models import Notice, User
from vigil_core import formatting

DEFAULT_WINDOW = timedelta(days=1)  # how far back the page goes for somebody who never marked it as seen
MAX_WINDOW = timedelta(days=14)
MAX_NEWS = 20
MAX_ENDED_JOBS = 200  # jobs of a sweep among the newest ends fold into one line, so that they do not fill the page
MAX_ROWS = 10
MAX_NOTICES = 6
MAX_ALIVE_PER_STATE = 5_000  # jobs per state that are loaded and counted


@dataclass(frozen=True)
class EndedAttempt:
    """One line of recent events: an attempt that ended, and what happened to the job afterwards."""

    attempt: Attempt
    job: Job
    why: str
    after: str  # what Vigil did
    move: str  # the action required of the person; "" if there is none
    checkpoint: int | None
    has_postmortem: bool = False
    others: int = 0  # further jobs of its sweep that ended in the same state

    @property
    def ended_badly(self) -> bool:
        return self.attempt.state in Attempt.ENDED_BADLY

    @property
    def was_followed(self) -> bool:
        """Return whether a later attempt of the same job has followed."""
        return self.job.latest_id != self.attempt.pk

    @property
    def duration(self) -> str:
        start, end = self.attempt.started_at, self.attempt.ended_at
        return formatting.duration((end - start).total_seconds()) if start and end else ""

    @property
    def validation(self) -> float | None:
        return number(self.attempt.latest, "validation_loss")


@dataclass(frozen=True)
class PendingLine:
    """A line of pending work: a job, or the pending jobs of a sweep, of which `row` is the first."""

    row: JobRow
    jobs: int

    @property
    def sweep(self) -> Sweep | None:
        return self.row.job.sweep if self.jobs > 1 else None


@login_required
@require_safe
def home(request: HttpRequest) -> HttpResponse:
    user = user_of(request)
    now = timezone.now()
    since = max(user.seen_at or now - DEFAULT_WINDOW, now - MAX_WINDOW)
    news = _news(user, since)
    running, more_running = _rows(user, ("running", "suspended", "completing"), now)
    waiting, more_waiting = _waiting(user, now)
    nodes = list(Node.objects.all())
    unread = Notice.objects.visible_to(user).active().unread_by(user)
    notices = list(unread.order_by("-raised_at", "-id")[:MAX_NOTICES])
    many_notices = unread.count() if len(notices) == MAX_NOTICES else len(notices)
    context = {
        "section": "home",
        "now": now,
        "since": since,
        "news": news,
        "running": running,
        "more_running": more_running,
        "waiting": waiting,
        "more_waiting": more_waiting,
        "trouble": banner(user),
        "notices": notices,
        "more_notices": many_notices - len(notices),
        "sparks": sparks([row.attempt.pk for row in running]),
        "places": [FreeSlots(node) for node in nodes],
        "wide": any(node.gpus > 8 for node in nodes),
        "draws_gpus": any(node.gpus for node in nodes),
        "free": free_now(nodes),
        "has_project": lambda: user.is_sysadmin or user.memberships.exists(),
        "has_jobs": bool(news or running or waiting) or Job.objects.visible_to(user).exists(),
        "headline": headline(
            news, len(running) + more_running, sum(line.jobs for line in waiting) + more_waiting, many_notices, now
        ),
    }
    return render(request, "portal/home.html", context)


@login_required
@require_POST
def acknowledge(request: HttpRequest) -> HttpResponse:
    """Mark everything that the page showed as seen, up to the moment when the page was rendered."""
    user = user_of(request)
    until = now = timezone.now()
    with suppress(ValueError, OverflowError):
        requested = datetime.fromisoformat(request.POST.get("until", ""))
        until = now if timezone.is_naive(requested) else min(requested.astimezone(UTC), now)
    User.objects.filter(pk=user.pk).filter(Q(seen_at=None) | Q(seen_at__lt=until)).update(seen_at=until)
    return redirect("home")


@login_required
@require_POST
def read_notice(request: HttpRequest, notice_id: int) -> HttpResponse:
    user = user_of(request)
    notify.mark_read(get_object_or_404(Notice.objects.visible_to(user), pk=notice_id), user)
    return redirect("home")


def _news(user: User, since: datetime) -> list[EndedAttempt]:
    """Return attempts of the person's own jobs that ended, newest first."""
    owned_job = Job.objects.visible_to(user).filter(pk=OuterRef("job_id"), owner=user)
    # Check the owners of recently ended attempts, newest first, instead of finding all ended jobs of the person.
    ended = Attempt.objects.filter(Exists(owned_job), ended_at__gt=since).order_by("-ended_at")
    first = _first_of_each(ended.values_list("pk", "job__sweep", "state", "job__latest")[:MAX_ENDED_JOBS])
    keys = list(first)[:MAX_NEWS]
    others = _others(ended, {first[pk]: pk for pk in keys if first[pk] is not None})
    related = ("job", "job__latest", "job__project", "job__owner", "job__sweep")
    rows = Attempt.objects.select_related(*related).in_bulk(keys)
    attempts = [rows[key] for key in keys if key in rows]
    newest: dict[int, int] = {}
    checkpoints = (
        Checkpoint.objects.filter(attempt__in=keys).order_by("created_at").values_list("attempt", "step", "state")
    )
    for attempt_id, step, state in checkpoints:
        if state in Checkpoint.RESUMABLE:
            newest[attempt_id] = step
    later = Attempt.objects.filter(job__in=[attempt.job_id for attempt in attempts]).select_related("resume_from")
    following = {(attempt.job_id, attempt.number - 1): attempt for attempt in later}
    died = {incident.attempt_id: incident for incident in Incident.objects.filter(attempt__in=keys, incarnation=None)}
    return [
        replace(
            _line(
                attempt, newest.get(attempt.pk), following.get((attempt.job_id, attempt.number)), died.get(attempt.pk)
            ),
            others=others.get(attempt.pk, 0),
        )
        for attempt in attempts
    ]


def _first_of_each(
    ended: Iterable[tuple[int, int | None, str, int | None]],
) -> dict[int, tuple[int, str] | None]:
    """Return the newest attempt of each sweep and state with that key, and any other attempt by itself.

    An attempt that a later one followed stays by itself: its job's history continues.
    """
    shown_groups: set[tuple[int, str]] = set()
    found: dict[int, tuple[int, str] | None] = {}
    for pk, sweep, state, latest in ended:
        group = (sweep, state) if sweep is not None and pk == latest else None
        if group is None or group not in shown_groups:
            found[pk] = group
        if group is not None:
            shown_groups.add(group)
    return found


def _others(ended: QuerySet[Attempt], first: dict[tuple[int, str] | None, int]) -> dict[int, int]:
    """Return how many further jobs of its sweep ended in the same state, by the attempt that represents them."""
    sweeps = {group[0] for group in first if group is not None}
    if not sweeps:
        return {}
    rows = ended.filter(job__sweep__in=sweeps, job__latest=F("pk")).order_by().values_list("job__sweep", "state")
    return {
        first[sweep, state]: many - 1 for sweep, state, many in rows.annotate(Count("pk")) if (sweep, state) in first
    }


def _line(attempt: Attempt, checkpoint: int | None, following: Attempt | None, died: Incident | None) -> EndedAttempt:
    job, after, move = attempt.job, "", ""
    if following is not None:
        start = following.resume_from
        after = (
            f"Resumed from {job.job_kind.unit} {formatting.count(start.step)}."
            if start
            else "Restarted from the beginning."
        )
    elif attempt.state in Attempt.ENDED_BADLY:
        move = "resume" if checkpoint is not None else "clone"
    why = (verdicts.summary(died) if died is not None else "") or _sentence(reason_of(attempt))
    return EndedAttempt(attempt, job, why, after, move, checkpoint, died is not None)


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".!?…" else f"{text}."


def _rows(user: User, states: tuple[str, ...], now: datetime) -> tuple[list[JobRow], int]:
    """Return the person's own jobs in these states first, then their projects'; and how many more there are."""
    found, many = _in_states(user, states)
    rows = _first(user, found, now)
    return rows, (many - len(rows)) if len(rows) == MAX_ROWS else 0


def _in_states(user: User, states: tuple[str, ...]) -> tuple[JobQuerySet, int]:
    """Return visible jobs in these states and their number, by the listing's index, as few of all jobs are alive."""
    numbers = [pk for _, pk in JobSearch(states=[*states]).finder(user).page(None, MAX_ALIVE_PER_STATE).places]
    return Job.objects.filter(pk__in=numbers), len(numbers)


def _waiting(user: User, now: datetime) -> tuple[list[PendingLine], int]:
    """Return pending jobs, the person's own first, each sweep once as its jobs wait for the same; and how many more."""
    found, all_of_them = _in_states(user, ("pending",))
    of_sweeps = found.exclude(sweep=None).order_by().values("sweep").annotate(first=Min("pk"))
    rows = _first(user, found.filter(Q(sweep=None) | Q(pk__in=of_sweeps.values("first"))).select_related("sweep"), now)
    shown = {row.job.sweep_id for row in rows} - {None}
    many = dict(of_sweeps.filter(sweep__in=shown).values_list("sweep").annotate(jobs=Count("pk")))
    lines = [PendingLine(row, many.get(row.job.sweep_id, 1)) for row in rows]
    return lines, (all_of_them - sum(line.jobs for line in lines)) if len(lines) == MAX_ROWS else 0


def _first(user: User, found: JobQuerySet, now: datetime) -> list[JobRow]:
    ordered = found.with_latest_attempt().order_by("-id")
    owned = list(ordered.filter(owner=user)[:MAX_ROWS])
    return [JobRow(job, now) for job in (*owned, *ordered.exclude(owner=user)[: MAX_ROWS - len(owned)])]


def headline(news: list[EndedAttempt], running: int, waiting: int, notices: int, now: datetime) -> tuple[str, str, str]:
    """Return the page's lead: the worst event that needs the person, else what happened, else the current state.

    With a second sentence, and the place on the page that it links to, if any.
    """
    stuck = [line for line in news if line.move]
    recovered = [line for line in news if line.ended_badly and line.was_followed]
    done = [line for line in news if line.attempt.state == "completed"]
    counts = _counts_sentence(running, waiting)
    if stuck:
        first = stuck[0]
        verb = {"out_of_memory": "ran out of memory", "timeout": "reached its time limit", "node_fail": "lost a node"}
        what = f"{first.job.name} {verb.get(first.attempt.state, 'failed')} {_at(first.attempt.ended_at, now)}"
        many = sum(1 + line.others for line in stuck) - 1
        others = f" So did {formatting.plural(many, 'other')}." if many else ""
        why = f"{first.why} " if first.has_postmortem else ""
        return f"{what} and needs your attention.{others}", f"{why}{counts}", ""
    if recovered:
        first = recovered[0]
        after = first.after[:1].lower() + first.after[1:]
        return f"{first.job.name} failed {_at(first.attempt.ended_at, now)} and was continued: {after}", counts, ""
    if notices:
        return f"{formatting.plural(notices, 'unread notification')}.", counts, "#h-notices"
    if done:
        names = formatting.listed([line.job.name for line in done[:3]])
        many = sum(1 + line.others for line in done) - len(done[:3])
        more = f" and {formatting.count(many)} more" if many else ""
        return f"{names}{more} completed.", counts, ""
    if running or waiting:
        return counts, "Nothing needs your attention.", ""
    return "No jobs are running.", "Nothing needs your attention.", ""


def _counts_sentence(running: int, waiting: int) -> str:
    run = f"{formatting.plural(running, 'job')} running"
    if running:
        return f"{run}, {formatting.count(waiting)} pending." if waiting else f"{run}."
    return f"{formatting.plural(waiting, 'job')} pending." if waiting else "No jobs are running."


def _at(then: datetime | None, now: datetime) -> str:
    if then is None:
        return ""
    clock = formatting.clock(then, now)
    return f"at {clock}" if timezone.localtime(then).date() == timezone.localtime(now).date() else f"on {clock}"

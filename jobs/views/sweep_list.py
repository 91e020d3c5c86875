"""The list of sweeps, newest first, each with its jobs by state."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from jobs.models import Attempt, Sweep
from jobs.models.sweep import states_of
from portal.access import user_of
from portal.http.paging import Page, SortOrder, page_or_first
from portal.models import User
from vigil_core import formatting

ROWS = 25  # each has up to a thousand jobs to count
NEWEST = SortOrder("id", descending=True)


@dataclass(frozen=True)
class SweepRow:
    """A sweep and its jobs by state."""

    sweep: Sweep
    by_state: dict[str, int]

    @property
    def jobs(self) -> int:
        return sum(self.by_state.values())

    @property
    def ended(self) -> int:
        return self.jobs - self.alive

    @property
    def alive(self) -> int:
        return sum(self.by_state.get(state, 0) for state in Attempt.ALIVE)

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Return the number of jobs by state, in the order of a job's life."""
        return [(state, self.by_state[state]) for state in Attempt.State.values if state in self.by_state]

    @property
    def over(self) -> str:
        """Return what the sweep varies: "seed × 3, lr × 4"."""
        return ", ".join(
            f"{path.rpartition('.')[2]} × {formatting.count(len(values))}" for path, values in self.sweep.axes
        )


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    results = _page(user_of(request), request.GET.get("after") or None)
    lines = _lines(results.items)
    context = {
        "section": "jobs",
        "lines": lines,
        "next": results.next,
        "first": "after" not in request.GET,
        "headline": summary(lines),
    }
    return render(request, "jobs/sweeps.html", context)


def _page(user: User, cursor: str | None) -> Page[Sweep]:
    sweeps = Sweep.objects.visible_to(user).select_related("project", "owner").defer("spec_toml")
    return page_or_first(sweeps, NEWEST, cursor=cursor, limit=ROWS)


def _lines(sweeps: list[Sweep]) -> list[SweepRow]:
    stand = states_of(sweeps)
    return [SweepRow(sweep, stand[sweep.pk][0]) for sweep in sweeps]


def summary(lines: list[SweepRow]) -> tuple[str, str]:
    """Return which of the listed sweeps are still active."""
    if not lines:
        return "", ""
    going = [line for line in lines if line.alive]
    if not going:
        return "None of these sweeps has pending or running jobs.", ""
    many = formatting.plural(len(going), "sweep")
    names = formatting.listed([line.sweep.name for line in going]) if len(going) <= 3 else many
    alive = sum(line.alive for line in going)
    verb, pronoun = ("goes", "its") if len(going) == 1 else ("go", "their")
    return (
        f"{names} {verb} on:",
        f"{formatting.count(alive)} of {pronoun} jobs {'waits or runs' if alive == 1 else 'wait or run'}.",
    )

"""Notify the owners of programs that fail in the same way wherever they run, with the evidence and what to do.

An error is one person's: nobody hears of what other people's programs did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.urls import reverse

from jobs.assessing.offenders import MAX_FAILURES, errors_of_programs
from jobs.failures.incidents import ERROR
from jobs.models import Attempt, Job
from nodes.models import HealthEntry
from portal import notify
from portal.models import Notice
from vigil_core import formatting

KIND = "program.failing"
RULE = "failing-program"
MAX_PROGRAMS, MAX_SHOWN = 100, 5
_ITEM = "program "


@dataclass(frozen=True)
class ProgramFailure:
    """An attempt of a program that failed, when, and with what message."""

    at: datetime
    attempt: Attempt
    summary: str

    @property
    def job(self) -> Job:
        return self.attempt.job


def notify_owners(now: datetime) -> None:
    """Raise a notice per program while its finding is open; withdraw the others. Safe to run twice."""
    keys = {key for entry in _findings() for key in _notify(entry, now)}
    if Notice.objects.active().filter(kind=KIND).exists():
        notify.withdraw_missing(KIND, keys)


def _findings() -> Sequence[HealthEntry]:
    return list(HealthEntry.objects.open().filter(rule=RULE, item__startswith=_ITEM).order_by("pk")[:MAX_PROGRAMS])


def _notify(entry: HealthEntry, now: datetime) -> Iterator[str]:
    """Notify the program's owner; yield the notice's key."""
    program = entry.item.removeprefix(_ITEM)
    failures = _failures(program, now)
    if not failures or not failures[0].job.owner.is_active:
        return
    key = f"{KIND}:{program}"[: notify.MAX_KEY]
    newest, nodes = failures[0], sorted({node for failure in failures for node in failure.attempt.nodes})
    times, places = formatting.plural(len(failures), "time"), formatting.plural(len(nodes), "node")
    notify.raise_notice(
        key, kind=KIND, to=newest.job.owner, tone="warn", link=reverse("job_postmortem", args=[newest.job.pk]),
        title=f"{newest.job.name} fails in the same way wherever it runs: {times} on {places}.",
        detail=f"{newest.summary} The nodes are not at fault, so no job avoids them: submitted again, it fails again."
        " Correct the program first. The post-mortem has the log lines that show the error.",
        facts=_facts(failures, nodes),
    )  # fmt: skip
    yield key


def _failures(program: str, now: datetime) -> list[ProgramFailure]:
    """Return the failures of one person's program with this error, newest first."""
    rows = errors_of_programs(now).filter(program=f"{ERROR}{program}")
    newest = rows.select_related("incident__attempt__job__owner").order_by("-at")[:MAX_FAILURES]
    return [ProgramFailure(row.at, row.incident.attempt, row.incident.says) for row in newest if row.incident]


def _facts(failures: Sequence[ProgramFailure], nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the person's jobs, the nodes, and when it failed."""
    jobs = list(dict.fromkeys(f"#{failure.job.pk} {failure.job.name}" for failure in failures))
    first, last = failures[-1].at, failures[0].at
    return [
        ("Your jobs", _shortened(jobs)),
        ("Nodes", _shortened(nodes)),
        ("Failed", f"{formatting.date(first)} to {formatting.minute(last)}"),
    ]


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return formatting.listed([*names[:MAX_SHOWN], *([f"{formatting.count(more)} more"] if more > 0 else [])])

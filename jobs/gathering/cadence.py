"""Measure how often a job saves and how often it should, from its trainer's reports and its nodes' failure rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.gathering.job_life import JobLife
from jobs.models import CadenceOrder, Event
from jobs.presenting.job_page.cadence import CadenceFacts
from jobs.reliability import mtbf, save_interval
from jobs.reliability.node_time import whole
from jobs.submitting.cadence import first_attempt_affected
from vigil_core import untrusted

KIND = "checkpoint.cadence"
WRITES = 2.0
"""Shortest interval as a multiple of the write time, as in the trainer; otherwise a write would always be running."""


@dataclass(frozen=True, kw_only=True)
class SaveCadence(CadenceFacts):
    """The save intervals of a job, and the order that changes them."""

    order: CadenceOrder | None
    from_attempt: int
    """The first attempt that uses the chosen interval, or would use a new one."""


def measure(life: JobLife) -> SaveCadence | None:
    """Return the job's save cadence; None until its trainer has measured a save. Other programs measure none."""
    if not life.job.job_kind.trains:
        return None
    events = Event.objects.filter(attempt__in=life.attempts, kind=KIND, rank=0)
    event = events.order_by("-attempt__number", "-incarnation", "-id").first()
    cost = untrusted.duration(event.data.get("cost_seconds")) if event else None
    if event is None or not cost:
        return None
    nodes, count = _nodes(life)
    order = CadenceOrder.objects.filter(job=life.job).select_related("asked_by").first()
    mtbf_s, source = _between_failures(life, event, nodes, count)
    if not mtbf_s:
        return None
    write = untrusted.duration(event.data.get("write_seconds")) or 0.0
    present = untrusted.duration(event.data.get("interval_seconds")) or None
    best = max(save_interval.best_period(cost, mtbf_s), WRITES * write)
    return SaveCadence(
        cost_s=cost,
        present_s=present,
        best_s=best,
        is_automatic=event.data.get("automatic") is True,
        aim_s=untrusted.duration(event.data.get("best_interval_seconds")) or None,
        mtbf_s=mtbf_s,
        source=source,
        efficiency=save_interval.useful_share(present, cost=cost, mtbf=mtbf_s) if present else None,
        best_efficiency=save_interval.useful_share(best, cost=cost, mtbf=mtbf_s),
        step_s=_step_seconds(life),
        gpus=count * whole(_resources(life).get("gpus_per_node")),
        left_s=life.progress.eta_seconds,
        order=order,
        from_attempt=first_attempt_affected(life.attempts, order.asked_at if order else None),
    )


def _resources(life: JobLife) -> dict[str, Any]:
    return life.job.spec.get("resources") or {}


def _nodes(life: JobLife) -> tuple[list[str], int]:
    """Return the nodes of the newest attempt that had any, and their number.

    Before any attempt has had nodes, the number is the most that it may get.
    """
    names: list[str] = next((attempt.nodes for attempt in reversed(life.attempts) if attempt.nodes), [])
    return names, len(names) or max(1, whole(str(_resources(life).get("nodes", 1)).split(":")[-1]))


def _step_seconds(life: JobLife) -> float | None:
    """Return seconds per step, by the pace of the newest attempt that made some.

    The interval between two saves cannot be used: nobody reports how many steps it had, and the specification's number
    may have been changed by an order.
    """
    paces = (attempt.pace_seconds / attempt.pace_steps for attempt in reversed(life.attempts) if attempt.pace_steps > 0)
    return next((pace for pace in paces if pace > 0), None)


def _between_failures(life: JobLife, event: Event, nodes: list[str], count: int) -> tuple[float | None, str]:
    """Return the mean time between failures in seconds and its source.

    The source is configured, observed, or assumed by the trainer.
    """
    assumed = untrusted.number(event.data.get("mtbf_seconds"))
    if event.data.get("source") == "config":
        return assumed, "config"
    hours = mtbf.hours_between_failures(count, partition=_resources(life).get("partition") or "", names=nodes)
    return (hours * 3600, "seen") if hours is not None else (assumed, "assumed")

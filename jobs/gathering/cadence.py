"""How often a job saves, and how often it should: by what its trainer measured and how often its nodes fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.models import CadenceOrder, Event
from jobs.presenting.header import Life
from jobs.reliability import mttf, saving
from jobs.reliability.held import whole
from jobs.submitting.cadence import first_to_obey
from vigil_core import untrusted

KIND = "checkpoint.cadence"
WRITES = 2.0
"""An interval is at least so many times as long as the write, as the trainer has it: one would always be under way."""
MOST_EVERY = 10**9


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """`present_s` and `best_s`: seconds from one save to the next. `gain`: the part of the time that the best saves."""

    cost_s: float
    present_s: float | None
    best_s: float
    is_automatic: bool
    aim_s: float | None
    """Where its trainer decides by itself: by the time between failures that it was told as it began."""
    mtbf_s: float
    source: str
    """Of the time between failures: config (a person's word), seen (here), assumed."""
    kept: float | None
    best_kept: float
    step_s: float | None
    gpus: int
    left_s: float | None
    order: CadenceOrder | None
    from_attempt: int
    """That does as the order says; without one, the first that would."""

    @property
    def gain(self) -> float:
        return max(0.0, self.best_kept - self.kept) if self.kept is not None else 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.gain >= saving.LEAST_GAIN and not self.is_automatic

    @property
    def best_every(self) -> int | None:
        """Steps from one save to the next; None where nobody knows how long a step takes."""
        return min(MOST_EVERY, max(1, round(self.best_s / self.step_s))) if self.step_s else None

    @property
    def gpu_hours_a_day(self) -> float:
        """That the difference costs."""
        return 24 * self.gain * self.gpus

    @property
    def gpu_hours_left(self) -> float | None:
        """The same for what it still has to do."""
        return None if self.left_s is None else self.left_s / 3600 * self.gain * self.gpus


def of(life: Life) -> Cadence | None:
    """None before its trainer has measured a save; other programs measure none."""
    if not life.job.of_kind.trains:
        return None
    told = Event.objects.filter(attempt__in=life.attempts, kind=KIND, rank=0)
    event = told.order_by("-attempt__number", "-incarnation", "-id").first()
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
    best = max(saving.best_period(cost, mtbf_s), WRITES * write)
    return Cadence(
        cost_s=cost,
        present_s=present,
        best_s=best,
        is_automatic=event.data.get("automatic") is True,
        aim_s=untrusted.duration(event.data.get("best_interval_seconds")) or None,
        mtbf_s=mtbf_s,
        source=source,
        kept=saving.effective(present, cost=cost, mtbf=mtbf_s) if present else None,
        best_kept=saving.effective(best, cost=cost, mtbf=mtbf_s),
        step_s=_step(life),
        gpus=count * whole(_resources(life).get("gpus_per_node")),
        left_s=life.progress.eta_seconds,
        order=order,
        from_attempt=first_to_obey(life.attempts, order.asked_at if order else None),
    )


def _resources(life: Life) -> dict[str, Any]:
    return life.job.spec.get("resources") or {}


def _nodes(life: Life) -> tuple[list[str], int]:
    """Those of the newest attempt that had any, and how many; before the first as many as it may get."""
    names: list[str] = next((one.nodes for one in reversed(life.attempts) if one.nodes), [])
    return names, len(names) or max(1, whole(str(_resources(life).get("nodes", 1)).split(":")[-1]))


def _step(life: Life) -> float | None:
    """Seconds that a step takes: by the pace of the newest attempt that made some. How many steps were between two
    saves nobody tells: the specification's may have been another's order."""
    paces = (one.pace_seconds / one.pace_steps for one in reversed(life.attempts) if one.pace_steps > 0)
    return next((pace for pace in paces if pace > 0), None)


def _between_failures(life: Life, event: Event, nodes: list[str], count: int) -> tuple[float | None, str]:
    """A person's word, else what is seen of its nodes, else what its trainer assumed."""
    told = untrusted.number(event.data.get("mtbf_seconds"))
    if event.data.get("source") == "config":
        return told, "config"
    seen = mttf.hours_between_failures(count, partition=_resources(life).get("partition") or "", names=nodes)
    return (seen * 3600, "seen") if seen is not None else (told, "assumed")

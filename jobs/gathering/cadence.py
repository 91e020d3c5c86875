"""How often a job saves, and how often it should: by what its trainer measured and how often its nodes fail."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.models import CadenceOrder, Event
from jobs.presenting.header import Life
from jobs.reliability import mttf, saving
from jobs.reliability.held import whole
from portal import untrusted

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
    mtbf_s: float
    source: str
    """Of the time between failures: config (a person's word), seen (here), assumed."""
    kept: float | None
    best_kept: float
    step_s: float | None
    gpus: int
    left_s: float | None
    order: CadenceOrder | None

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
    if life.job.kind != "distributed":
        return None
    told = Event.objects.filter(attempt__in=life.attempts, kind=KIND, rank=0)
    event = told.order_by("-attempt__number", "-incarnation", "-id").first()
    cost = untrusted.number(event.data.get("cost_seconds")) if event else None
    if event is None or not cost:
        return None
    mtbf_s, source = _between_failures(life, event)
    if not mtbf_s:
        return None
    write = untrusted.number(event.data.get("write_seconds")) or 0.0
    present = untrusted.number(event.data.get("interval_seconds")) or None
    best = max(saving.best_period(cost, mtbf_s), WRITES * write)
    attempt = life.latest
    resources = life.job.spec.get("resources") or {}
    order = CadenceOrder.objects.filter(job=life.job).select_related("asked_by").first()
    return Cadence(
        cost_s=cost,
        present_s=present,
        best_s=best,
        is_automatic=event.data.get("automatic") is True,
        mtbf_s=mtbf_s,
        source=source,
        kept=saving.effective(present, cost=cost, mtbf=mtbf_s) if present else None,
        best_kept=saving.effective(best, cost=cost, mtbf=mtbf_s),
        step_s=_step(life, present - cost if present else 0.0, order),
        gpus=whole(resources.get("gpus_per_node")) * max(1, len(attempt.nodes)),
        left_s=life.progress.eta_seconds,
        order=order,
    )


def _step(life: Life, between_s: float, order: CadenceOrder | None) -> float | None:
    """Seconds that a step takes: as its trainer measured between two saves, else by the pace of the last minutes."""
    every = (life.job.spec.get("run") or {}).get("checkpoint_every")
    if order is None and isinstance(every, int) and every > 0 and between_s > 0:
        return between_s / every
    attempt = life.latest
    return attempt.pace_seconds / attempt.pace_steps if attempt.pace_steps > 0 and attempt.pace_seconds > 0 else None


def _between_failures(life: Life, event: Event) -> tuple[float | None, str]:
    """A person's word, else what is seen of its nodes, else what its trainer assumed."""
    told = untrusted.number(event.data.get("mtbf_seconds"))
    if event.data.get("source") == "config":
        return told, "config"
    nodes = life.latest.nodes
    partition = (life.job.spec.get("resources") or {}).get("partition") or ""
    seen = mttf.hours_between_failures(max(1, len(nodes)), partition=partition, names=nodes)
    return (seen * 3600, "seen") if seen is not None else (told, "assumed")

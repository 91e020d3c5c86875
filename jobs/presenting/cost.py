"""What a bad end cost: steps, GPU-hours, money, and the time until it was noticed, trained again and had caught up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from portal import formatting


@dataclass(frozen=True, kw_only=True)
class Again:
    """The attempt that followed, as far as it has come."""

    number: int
    state: str
    queued_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    from_step: int = 0
    first_step_at: datetime | None = None  # of those that it did itself
    caught_up_at: datetime | None = None
    gpus: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The attempt that ended badly. `bad_at`: the first sign of it; `kept_at`: when what was gone on from was saved."""

    noticed_at: datetime
    bad_at: datetime | None = None
    started_at: datetime | None = None
    step: int | None = None
    kept_step: int = 0
    kept_at: datetime | None = None  # None: nothing of this attempt was kept
    gpus: int = 0
    again: Again | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Lost = work since the kept checkpoint + time held until training again. None: not known, or not yet."""

    steps: int | None
    lost_seconds: float
    gpu_hours: float | None
    money: float | None
    currency: str
    detect_seconds: float | None
    again_seconds: float | None
    catch_up_seconds: float | None

    @property
    def money_text(self) -> str:
        return "" if self.money is None else formatting.money(self.money, self.currency)


def cost(ended: Ended, *, price: float | None, currency: str) -> Cost:
    """`price`: of a GPU-hour, where the site names one."""
    began, again = ended.bad_at or ended.noticed_at, ended.again
    since = ended.kept_at or ended.started_at
    work = _seconds(since, ended.noticed_at) or 0.0
    held = _held(again) if again is not None else 0.0
    hours = (work * ended.gpus + held * (again.gpus if again else 0)) / 3600 if ended.gpus else None
    return Cost(
        steps=max(0, ended.step - ended.kept_step) if ended.step is not None else None,
        lost_seconds=work + held,
        gpu_hours=hours,
        money=hours * price if hours is not None and price is not None else None,
        currency=currency,
        detect_seconds=_seconds(ended.bad_at, ended.noticed_at),
        again_seconds=_seconds(began, again.first_step_at) if again else None,
        catch_up_seconds=_seconds(began, again.caught_up_at) if again else None,
    )


def _held(again: Again) -> float:
    """Seconds that the next attempt held its nodes before its first step; all of it where it made none."""
    return _seconds(again.started_at, again.first_step_at or again.ended_at) or 0.0


def _seconds(since: datetime | None, until: datetime | None) -> float | None:
    return None if since is None or until is None else max(0.0, (until - since).total_seconds())

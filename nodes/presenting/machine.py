"""Build the leading sentence of a node page: the worst problem, then what else there is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodes.health import temperature
from nodes.health.rules.rule import SEVERITIES, Severity
from nodes.health.xid_severity import xid_severity
from nodes.presenting.events import ECHO, meaning
from vigil_core import formatting
from vigil_core.formatting import NBSP

XID_WINDOW = timedelta(hours=6)  # older Xids are history
MAX_FURTHER = 2  # sentences after the first


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The current state of a GPU; values of another user's hidden job are None."""

    index: int
    percent: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    throttle: int = 0
    lost_at: datetime | None = None
    fault: str = ""  # gpus.health: its worst fault, as the end of a sentence
    is_hidden: bool = False

    @property
    def is_hot(self) -> bool:
        return temperature.is_hot(self.temperature_c, self.slowdown_c, throttle=self.throttle)


@dataclass(frozen=True)
class DriverError:
    """Equal errors that the driver reported: an Xid of a GPU, or an SXid of an NVSwitch."""

    code: int | None
    gpu: int | None
    at: datetime
    count: int = 1
    kind: str = "xid"  # or sxid
    is_fatal: bool = False  # as the SXid itself states

    @property
    def severity(self) -> Severity:
        if self.kind == "xid":
            return xid_severity(self.code)
        return "fatal" if self.is_fatal else "info"

    @property
    def name(self) -> str:
        return f"{'Xid' if self.kind == 'xid' else 'SXid'} {formatting.MISSING if self.code is None else self.code}"


@dataclass(frozen=True, kw_only=True)
class NodeHeadline:
    """The facts from which the sentence is composed."""

    now: datetime
    has_agent: bool = False  # by an agent
    last_report_at: datetime | None = None
    is_silent: bool = False
    driver_silent_at: datetime | None = None
    gpus: Sequence[GpuState] = ()
    xids: Sequence[DriverError] = ()  # of the last hours
    hanging: Sequence[tuple[str, datetime]] = ()  # slow mounts, and since when
    cpu_percent: float | None = None
    state: str = ""  # the scheduler's state; "" if it does not know the machine
    takes_jobs: bool = True
    reason: str = ""
    reason_by: str = ""
    reason_at: datetime | None = None
    free: str = ""  # "2 of 8 GPUs"


def lead_text(facts: NodeHeadline) -> tuple[str, str]:
    """Return the leading text, and further sentences, which are shown muted."""
    wrong = [*_wrong(facts)]
    sentences = wrong or [*_works(facts)]
    if facts.takes_jobs and facts.state and facts.free:
        sentences.append(_room(facts.free))
    return sentences[0] if sentences else "No data yet.", " ".join(sentences[1 : 1 + MAX_FURTHER])


def _room(free: str) -> str:
    """Return what the scheduler can place here. `free`: "2 of 8 GPUs"."""
    number, _, rest = free.partition(" of ")
    unit = "GPU" if "GPU" in rest else "CPU"
    return f"Schedulable, no {unit} free." if number == "0" else f"Schedulable: {free} free."


def _wrong(facts: NodeHeadline) -> Iterator[str]:
    """Yield every problem, worst first."""
    if facts.is_silent:
        yield _silent(facts)
    elif facts.driver_silent_at:
        since = formatting.clock(facts.driver_silent_at, facts.now)
        yield f"The NVIDIA driver has not responded since {since}: the state of its GPUs is unknown."
    yield from _lost(facts)
    yield from _faulty(facts)
    yield from _xids(facts)
    if not facts.is_silent:
        yield from _hanging(facts)
    if not facts.takes_jobs:
        yield _drained(facts)
    if not facts.is_silent:
        yield from _hot(facts)


def _silent(facts: NodeHeadline) -> str:
    if facts.last_report_at is None:
        return "Its agent has not reported yet."
    silence = formatting.rough((facts.now - facts.last_report_at).total_seconds())
    return f"No report for {silence}: the machine is down, its agent has stopped, or the network between is broken."


def _lost(facts: NodeHeadline) -> Iterator[str]:
    lost = [gpu for gpu in facts.gpus if gpu.lost_at]
    if not lost:
        return
    since = min(gpu.lost_at for gpu in lost if gpu.lost_at)
    names = formatting.listed([str(gpu.index) for gpu in lost])
    which = f"GPU {names} has" if len(lost) == 1 else f"GPUs {names} have"
    yield f"{which} been lost since {formatting.clock(since, facts.now)}."


def _faulty(facts: NodeHeadline) -> Iterator[str]:
    """Yield the GPUs that respond but are faulty; lost ones are named elsewhere."""
    faulty = [gpu for gpu in facts.gpus if gpu.fault and not gpu.lost_at]
    if not faulty:
        return
    more = f" {formatting.plural(len(faulty) - 1, 'more GPU is', 'more GPUs are')} broken." if len(faulty) > 1 else ""
    yield f"GPU {faulty[0].index} {faulty[0].fault}.{more}"


def _xids(facts: NodeHeadline) -> Iterator[str]:
    """Return the worst, or the newest of equally bad ones: a program's error must not hide a GPU off the bus."""
    meaning_text = [xid for xid in facts.xids if xid.kind != "xid" or xid.code != ECHO] or facts.xids
    if not meaning_text:
        return
    worst = max(meaning_text, key=lambda xid: (SEVERITIES.index(xid.severity), xid.at))
    where = "" if worst.gpu is None else f" on GPU {worst.gpu}"
    words = meaning(worst.code) if worst.kind == "xid" else "a fatal NVSwitch error" if worst.is_fatal else ""
    what = f": {words}" if words else ""
    others = sum(xid.count for xid in meaning_text) - 1
    hours = XID_WINDOW // timedelta(hours=1)
    more = f"; {formatting.plural(others, 'more', 'more')} in {hours}{NBSP}h" if others else ""
    yield f"{worst.name}{where}, {formatting.ago(worst.at, facts.now)}{what}{more}."


def _hanging(facts: NodeHeadline) -> Iterator[str]:
    if facts.hanging:
        names = formatting.listed([name for name, _ in facts.hanging[:3]])
        since = formatting.clock(min(at for _, at in facts.hanging), facts.now)
        yield f"{names} {'has' if len(facts.hanging) == 1 else 'have'} been slow or hanging since {since}."


def _drained(facts: NodeHeadline) -> str:
    state = f"Not schedulable: {formatting.word(facts.state)}"
    if not facts.reason:
        return f"{state}."
    by = f" by {facts.reason_by}" if facts.reason_by else ""
    when = f" {formatting.ago(facts.reason_at, facts.now)}" if facts.reason_at else ""
    return f"{state}{by}{when}: {facts.reason}."


def _hot(facts: NodeHeadline) -> Iterator[str]:
    hot = [gpu for gpu in facts.gpus if gpu.is_hot and not gpu.lost_at and not gpu.is_hidden]
    if not hot:
        return
    worst = max(hot, key=lambda gpu: gpu.temperature_c or 0)
    degrees = "" if worst.temperature_c is None else f" at {worst.temperature_c}{NBSP}°C"
    slower = "is hot and throttled" if temperature.is_throttled(worst.throttle) else "is hot"
    limit = (
        f"; it throttles at {worst.slowdown_c}"
        if worst.slowdown_c and not temperature.is_throttled(worst.throttle)
        else ""
    )
    more = f" So {'is' if len(hot) == 2 else 'are'} {len(hot) - 1} more." if len(hot) > 1 else ""
    yield f"GPU {worst.index} {slower}{degrees}{limit}.{more}"


def _works(facts: NodeHeadline) -> Iterator[str]:
    """Describe what the node does if nothing is wrong."""
    visible = [gpu for gpu in facts.gpus if gpu.percent is not None and not gpu.is_hidden]
    hidden = sum(gpu.is_hidden for gpu in facts.gpus)
    if visible:
        working = sum((gpu.percent or 0) >= 1 for gpu in visible)
        mean = formatting.share(sum(gpu.percent or 0 for gpu in visible) / len(visible) / 100)
        them = (
            "The GPU is busy"
            if len(visible) == working == 1
            else f"{working} of {formatting.plural(len(visible), 'GPU')} {'is' if working == 1 else 'are'} busy"
        )
        yield f"{them}, {mean} on average." if working else _rest(len(visible))
        hottest = max((gpu.temperature_c for gpu in visible if gpu.temperature_c is not None), default=None)
        if hottest is not None and len(visible) > 1:
            yield f"The hottest is at {hottest}{NBSP}°C."
    if hidden:
        yield f"{formatting.plural(hidden, 'GPU')} {'is' if hidden == 1 else 'are'} in use by others."
    if not facts.gpus and facts.has_agent and facts.cpu_percent is not None:
        yield f"Its CPUs are {formatting.share(facts.cpu_percent / 100)} busy; it has no GPU."


def _rest(gpus: int) -> str:
    return "The GPU is idle." if gpus == 1 else f"All {formatting.plural(gpus, 'GPU')} are idle."

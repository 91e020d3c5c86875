"""Store what a machine is: its facts, its GPUs by UUID, their slots over time, and their slow counters.

GPUs are read once per post, changed in memory and written by a few statements, however many a post names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from gpus import health
from nodes.models import Agent, Gpu, GpuPlace, NodeEvent
from nodes.telemetry import warn
from nodes.telemetry.daily_limit import DailyRowLimit
from portal import bulk
from vigil_core import untrusted

MAX_GPUS = 1_024  # that one machine ever reported
FACTS_GPUS = 64  # of one `facts`
MAX_PLACES_PER_DAY = 200  # slots that one machine's GPUs came to within a day
MAX_OLD_PLACES = 20 * MAX_PLACES_PER_DAY  # and on past days

_FIELDS = (
    "agent", "index", "minor", "bus", "model", "memory_mib", "power_cap_watts", "slowdown_c", "facts", "has_mig",
    "gone_at",
)  # fmt: skip
_VALUES, _CHARACTERS = 64, 4_000  # of an event's data; `facts` have what their bytes allow


def note_facts(agent: Agent, facts: dict[str, Any], at: datetime) -> None:
    """Store a machine's facts and its GPUs, outside of a post."""
    gpus = MachineGpus.read(agent, uuids_of(facts))
    gpus.note_facts(facts, at)
    gpus.write()


def note_counters(agent: Agent, counters: Mapping[str, tuple[dict[str, Any], datetime]]) -> None:
    """Store the current slow counters of GPUs, by UUID, and what is broken according to them."""
    if not counters:
        return
    rows = list(Gpu.objects.filter(agent=agent, uuid__in=list(counters)).only("uuid"))
    for gpu in rows:
        reported, gpu.counted_at = counters[gpu.uuid]
        gpu.counters, gpu.fault = cleaned(reported), next(iter(health.faults(reported)), "")
    bulk.update_rows(rows, ("counters", "counted_at", "fault"))


def forget_counters(agent: Agent) -> None:
    """Forget the slow counters of the machine's GPUs: after a boot or a reload they are reported anew."""
    Gpu.objects.filter(agent=agent).exclude(counters={}).update(counters={}, fault="")


def uuids_of(facts: Mapping[str, Any]) -> list[str]:
    """Return the UUIDs of the GPUs that facts name."""
    found = (untrusted.name(about.get("uuid"), 96) for about in untrusted.tables(facts.get("gpus"))[:FACTS_GPUS])
    return [uuid for uuid in found if uuid]


def present(agent: Agent, uuids: Iterable[str]) -> dict[str, int]:
    """Return the row ids of the given GPUs that the machine is known to have."""
    rows = Gpu.objects.filter(agent=agent, uuid__in=list(uuids), gone_at=None)
    return dict(rows.values_list("uuid", "pk"))


@dataclass
class MachineGpus:
    """The GPUs of one machine, and those that a post reports, while the machine's row is locked."""

    agent: Agent
    rows: dict[str, Gpu]
    places: dict[str, GpuPlace]
    """The open slot interval by UUID."""
    gpus_ever_reported: int
    """How many GPUs the machine has ever reported."""
    changed: dict[str, Gpu] = field(default_factory=dict)
    left: dict[str, datetime] = field(default_factory=dict)
    ended: list[GpuPlace] = field(default_factory=list)
    begun: list[GpuPlace] = field(default_factory=list)
    by_index: dict[int, dict[str, Gpu]] = field(default_factory=lambda: defaultdict(dict))
    """By slot the GPUs that may be in it, also those that have left it meanwhile."""

    def __post_init__(self) -> None:
        for gpu in self.rows.values():
            self.by_index[gpu.index][gpu.uuid] = gpu

    @classmethod
    def read(cls, agent: Agent, uuids: Iterable[str]) -> MachineGpus:
        rows_with_agent = Gpu.objects.select_related("agent").defer("agent__facts", "agent__newest", "agent__processes")
        rows = {gpu.uuid: gpu for gpu in rows_with_agent.filter(agent=agent, gone_at=None)}
        rows |= {gpu.uuid: gpu for gpu in rows_with_agent.filter(uuid__in=set(uuids) - rows.keys())}
        open_places = GpuPlace.objects.filter(gpu__in=list(rows.values()), until=None)
        by_id = {place.gpu_id: place for place in open_places}
        places = {gpu.uuid: by_id[gpu.pk] for gpu in rows.values() if gpu.pk in by_id}
        return cls(agent, rows, places, agent.gpus.count())

    def ids(self) -> dict[str, int]:
        """Return the row ids of the machine's own GPUs; after `write`."""
        return {uuid: gpu.pk for uuid, gpu in self.rows.items() if gpu.agent_id == self.agent.pk}

    def note_facts(self, facts: dict[str, Any], at: datetime) -> None:
        """Note the machine's facts: new GPUs, moved ones, and those that it no longer reports."""
        self.agent.facts = cleaned(facts)
        listed = set()
        for index, about in enumerate(untrusted.tables(facts.get("gpus"))[:FACTS_GPUS]):
            uuid = untrusted.name(about.get("uuid"), 96)
            if uuid and self._note_gpu(uuid, index, about, at):
                listed.add(uuid)
        for gpu in self._present():
            if gpu.uuid not in listed:
                self._leave(gpu, at)

    def note_sampled(self, uuids: Sequence[str], at: datetime) -> None:
        """Note the GPUs of a batch; one that no facts have listed gets a row."""
        for index, uuid in enumerate(uuids):
            gpu = self.rows.get(uuid)
            if gpu is None or not self._is_present(gpu):
                self._note_gpu(uuid, index, {}, at)

    def write(self) -> None:
        new = [gpu for gpu in self.changed.values() if gpu.pk is None]
        old = [gpu for gpu in self.changed.values() if gpu.pk is not None]
        Gpu.objects.bulk_create(new)
        bulk.update_rows(old, _FIELDS)
        bulk.update_rows(self.ended, ("until",))
        GpuPlace.objects.bulk_create(self.begun)
        self._end_events()

    def _note_gpu(self, uuid: str, index: int, about: dict[str, Any], at: datetime) -> bool:
        """Note one GPU; return whether it can be this machine's.

        A GPU that was moved has left the other machine, or that machine is off: while that one still reports it, it is
        not accepted from here. A machine that had it before gets it back: the other one claimed it during a silence.
        """
        gpu = self.rows.get(uuid)
        if gpu is None:
            if self.gpus_ever_reported >= MAX_GPUS:
                return False
            gpu = self.rows[uuid] = self.changed[uuid] = Gpu(uuid=uuid, first_seen_at=at, agent=self.agent, index=index)
            self.gpus_ever_reported += 1
            self._set(gpu, _described(about, index))
        elif self._is_elsewhere(gpu) and not self._had_it_first(gpu):
            warn.once(("gpu", self.agent.pk), "%s reports %s, which %s has", self.agent, uuid, gpu.agent)
            return False
        elif about:
            self._set(gpu, _described(about, index))
        elif gpu.agent_id != self.agent.pk:  # only its presence is known
            self._set(gpu, {"index": index})
        self._set(gpu, {"agent": self.agent, "gone_at": None})
        self.left.pop(uuid, None)
        self._place(gpu, at)
        return True

    def _is_elsewhere(self, gpu: Gpu) -> bool:
        """Return whether another machine reports the GPU."""
        return gpu.agent_id != self.agent.pk and gpu.gone_at is None and not gpu.agent.is_silent()

    def _had_it_first(self, gpu: Gpu) -> bool:
        """Return whether this machine was the first to report the GPU, by our order: its times are its own word."""
        first = GpuPlace.objects.filter(gpu=gpu).order_by("pk").values_list("agent_id", flat=True).first()
        return first == self.agent.pk

    def _set(self, gpu: Gpu, values: Mapping[str, Any]) -> None:
        """Set what differs: unchanged `facts` cause no write."""
        for name, value in values.items():
            if getattr(gpu, name) != value:
                setattr(gpu, name, value)
                self.changed[gpu.uuid] = gpu

    def _place(self, gpu: Gpu, at: datetime) -> None:
        """Open the slot interval; the GPU that was in that slot has left."""
        current = self.places.get(gpu.uuid)
        if current is not None and (current.agent_id, current.index) == (gpu.agent_id, gpu.index):
            return
        for other in self.by_index[gpu.index].values():
            if other.index == gpu.index and other is not gpu and self._is_present(other):
                self._leave(other, at)
        self.by_index[gpu.index][gpu.uuid] = gpu
        self._end(gpu.uuid, at)
        if not self._limit.take(at):
            text = "%s: the slots of its GPUs change more than %d times a day: later changes are left out"
            warn.once(("places", self.agent.pk), text, self.agent, MAX_PLACES_PER_DAY)
            return
        self.places[gpu.uuid] = GpuPlace(gpu=gpu, agent_id=gpu.agent_id, index=gpu.index, since=at)
        self.begun.append(self.places[gpu.uuid])

    @cached_property
    def _limit(self) -> DailyRowLimit:
        rows = GpuPlace.objects.filter(agent=self.agent)
        return DailyRowLimit(rows, "since", per_day=MAX_PLACES_PER_DAY, older=MAX_OLD_PLACES)

    def _leave(self, gpu: Gpu, at: datetime) -> None:
        self._set(gpu, {"gone_at": at})
        self._end(gpu.uuid, at)
        self.left[gpu.uuid] = at

    def _end(self, uuid: str, at: datetime) -> None:
        place = self.places.pop(uuid, None)
        if place is not None:
            place.until = max(at, place.since)
            if place.pk is not None:
                self.ended.append(place)

    def _end_events(self) -> None:
        """Close lasting events of GPUs that left: nobody will report that they are back."""
        if not self.left:
            return
        at = {gpu.pk: self.left[uuid] for uuid, gpu in self.rows.items() if uuid in self.left}
        rows = list(NodeEvent.objects.filter(gpu__in=list(at), is_open=True).only("gpu", "is_open", "last_at"))
        for row in rows:
            row.is_open, row.last_at = False, at[row.gpu_id or 0]
        bulk.update_rows(rows, ("is_open", "last_at"))

    def _present(self) -> list[Gpu]:
        return [gpu for gpu in self.rows.values() if self._is_present(gpu)]

    def _is_present(self, gpu: Gpu) -> bool:
        return gpu.agent_id == self.agent.pk and gpu.gone_at is None


def _described(about: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Return the columns of a GPU's row from its facts."""
    index = untrusted.count(about.get("index"), 1024)
    return {
        "index": position if index is None else index,
        "minor": untrusted.count(about.get("minor"), 1024),
        "bus": untrusted.name(about.get("bus"), 32),
        "model": untrusted.name(about.get("name"), 128),
        "memory_mib": untrusted.count(about.get("memory_mib")),
        "power_cap_watts": _rounded(about.get("power_cap_watts")),
        "slowdown_c": _rounded(about.get("slowdown_c")),
        "facts": cleaned(about),
        "has_mig": about.get("mig") is True,
    }


def bounded(value: dict[str, Any]) -> Any:
    """Return the bounded data of an event: a post has up to 2,000 events, so none may be large."""
    return cleaned(value, left=[_VALUES, _CHARACTERS])


def cleaned(value: Any, *, room: int = 6, left: list[int] | None = None) -> Any:
    """Return an agent's value as it can be stored and shown: bounded, and without what databases reject.

    `left` counts down values and letters; what comes after they are used up is null.
    """
    if left is not None:
        left[0] -= 1
        if min(left) <= 0:
            return None
    if isinstance(value, str):
        text = untrusted.line(value, 500)
        if left is not None:
            left[1] -= len(text)
        return text
    if isinstance(value, dict) and room:
        pairs = _first(value.items(), left)
        return {untrusted.line(key, 64): cleaned(inner, room=room - 1, left=left) for key, inner in pairs}
    if isinstance(value, list) and room:
        return [cleaned(inner, room=room - 1, left=left) for inner in _first(value, left)]
    return value if isinstance(value, bool | int | float) or value is None else None


def _first(values: Iterable[Any], left: list[int] | None) -> list[Any]:
    return list(values)[: 200 if left is None else max(0, min(200, left[0]))]


def _rounded(value: object) -> int | None:
    number = untrusted.number(value, 1e6)
    return None if number is None else round(number)

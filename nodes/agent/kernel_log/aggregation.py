"""Aggregate Xids: equal ones become one event, and NVML's report of an Xid confirms the kernel log's.

The kernel log is authoritative: NVML omits some Xids, and knows only the number of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpus.pci import normalised
from nodes.agent.kernel_log.xids import XidRecord

MAX_TEXTS = 20  # distinct texts per GPU and Xid in one window
MAX_EVENTS = 200  # per window
ANY_NUMBER = 999  # NVML's number for an Xid that it does not know
Event = dict[str, Any]


@dataclass
class _Aggregate:
    """Records that differ only in numbers in their text."""

    xid: XidRecord
    seq: int
    last_seq: int
    at: float
    last_at: float
    received_at: float
    count: int = 1
    is_confirmed: bool = False


@dataclass
class _NvmlOnly:
    """An Xid that NVML reported and the kernel log has not shown so far."""

    number: int
    bus: str
    at: float
    received_at: float
    count: int = 1


@dataclass
class XidAggregator:
    """Collects Xids until `take`. `clock` is monotonic.

    `uuid_at` returns the GPU at a bus address; "" if it is unknown.
    """

    boot_id: str
    uuid_at: Callable[[str], str]
    confirm_seconds: float
    _new: dict[tuple[object, ...], _Aggregate] = field(default_factory=dict)
    _texts: dict[tuple[object, ...], int] = field(default_factory=dict)
    _recent: dict[tuple[str, int], _Aggregate] = field(default_factory=dict)
    _confirmed_late: list[_Aggregate] = field(default_factory=list)
    _nvml_only: dict[tuple[str, int], _NvmlOnly] = field(default_factory=dict)
    _reported_keys: set[tuple[object, ...]] = field(default_factory=set)
    is_urgent: bool = False
    """Whether there is something that this window has not reported yet."""

    def add_kernel_record(self, xid: XidRecord, *, seq: int, at: float, now: float) -> None:
        """Add a record of the kernel log."""
        key = self._aggregation_key(xid)
        if (folded := self._new.get(key)) is not None:
            folded.count, folded.last_seq, folded.last_at = folded.count + 1, seq, at
            return
        folded = self._new[key] = _Aggregate(xid, seq, seq, at, at, now)
        self._texts[key[:3]] = self._texts.get(key[:3], 0) + 1
        folded.is_confirmed = self._confirm_nvml(xid, now)
        self.is_urgent = self.is_urgent or key not in self._reported_keys

    def add_nvml_event(self, bus: str, number: int, *, at: float, now: float) -> None:
        """Add NVML's report of an Xid; the kernel log's may come before or after it."""
        bus = normalised(bus)
        for folded in [*self._new.values(), *self._recent.values()]:
            if _matches(folded.xid, bus, number) and now - folded.received_at <= self.confirm_seconds:
                if not folded.is_confirmed and folded not in self._new.values():
                    self._confirmed_late.append(folded)
                folded.is_confirmed = True
                return
        unheard = self._nvml_only.setdefault((bus, number), _NvmlOnly(number, bus, at, now, 0))
        unheard.count += 1

    def take(self, now: float, *, is_kernel_log_read: bool = True) -> list[Event]:
        """Return the events to send now. Equal ones are not urgent again until `begin_window`."""
        # Ordered by last record, so that a reader who processes them in order knows which were counted before.
        aggregates = sorted([*self._confirmed_late, *self._new.values()], key=lambda folded: folded.last_seq)
        events = [self._event(folded) for folded in aggregates]
        self._reported_keys |= self._new.keys()
        self._recent = {
            key: aggregate
            for key, aggregate in self._recent.items()
            if now - aggregate.received_at <= self.confirm_seconds
        }
        self._recent |= {(aggregate.xid.bus, aggregate.xid.number): aggregate for aggregate in self._new.values()}
        self._new, self._texts, self._confirmed_late, self.is_urgent = {}, {}, [], False
        wait_s = self.confirm_seconds if is_kernel_log_read else 0.0
        for key, unheard in list(self._nvml_only.items()):
            if now - unheard.received_at >= wait_s:
                events.append(self._unconfirmed(self._nvml_only.pop(key)))
        return events

    def begin_window(self) -> None:
        self._reported_keys = set()

    def has_urgent(self, now: float, *, is_kernel_log_read: bool = True) -> bool:
        """Return whether there is something to send at once."""
        wait_s = self.confirm_seconds if is_kernel_log_read else 0.0
        return bool(
            self.is_urgent
            or self._confirmed_late
            or any(now - pending.received_at >= wait_s for pending in self._nvml_only.values())
        )

    def _aggregation_key(self, xid: XidRecord) -> tuple[object, ...]:
        """Return the key to aggregate by; beyond MAX_TEXTS, everything of the same GPU and number is one event."""
        key: tuple[object, ...] = xid.aggregation_key
        if key in self._new:
            return key
        if self._texts.get(key[:3], 0) < MAX_TEXTS and len(self._new) < MAX_EVENTS:
            return key
        return (*key[:3], None) if len(self._new) < 2 * MAX_EVENTS else (key[0], None, None, None)

    def _confirm_nvml(self, xid: XidRecord, now: float) -> bool:
        for key, unheard in self._nvml_only.items():
            if _matches(xid, unheard.bus, unheard.number) and now - unheard.received_at <= self.confirm_seconds:
                del self._nvml_only[key]
                return True
        return False

    def _event(self, folded: _Aggregate) -> Event:
        xid = folded.xid
        event: Event = {
            "kind": xid.kind,
            "at": round(folded.at, 3),
            **self._gpu(xid.bus),
            xid.kind: xid.number,
            "text": xid.text,
            "source": "kernel",
            "boot_id": self.boot_id,
            "seq": folded.seq,
            "count": folded.count,
        }
        if xid.kind == "xid":
            event["confirmed"] = folded.is_confirmed
        if folded.count > 1:
            event |= {"last_seq": folded.last_seq, "last_at": round(folded.last_at, 3)}
        more = {"pid": xid.pid, "name": xid.name or None, "switch": xid.switch, "fatal": xid.is_fatal}
        more["implied"] = xid.is_implied or None
        return event | {name: value for name, value in more.items() if value is not None}

    def _unconfirmed(self, unheard: _NvmlOnly) -> Event:
        """Return the event of an Xid that only NVML reported."""
        event = {"kind": "xid", "at": round(unheard.at, 3), **self._gpu(unheard.bus), "xid": unheard.number}
        return event | {"text": "", "source": "nvml", "confirmed": False, "count": unheard.count}

    def _gpu(self, bus: str) -> Event:
        uuid = self.uuid_at(bus)
        return {**({"gpu": uuid} if uuid else {}), **({"bus": bus} if bus else {})}


def _matches(xid: XidRecord, bus: str, number: int) -> bool:
    return xid.kind == "xid" and xid.bus == bus and number in {xid.number, ANY_NUMBER}

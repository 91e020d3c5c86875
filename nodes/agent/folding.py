"""Xids on their way to the portal: equal ones become one event, and NVML's word beside the kernel's confirms them.

The kernel log is the truth: NVML leaves some Xids out, and knows no more of the others than their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpus.pci import normalised
from nodes.agent.xids import Xid

MOST_TEXTS = 20  # of one GPU and number, told apart at once
MOST_EVENTS = 200  # at once
ANY_NUMBER = 999  # of an Xid that NVML does not know
Event = dict[str, Any]


@dataclass
class _Folded:
    """Records that differ in nothing but numbers."""

    xid: Xid
    seq: int
    last_seq: int
    at: float
    last_at: float
    heard: float
    count: int = 1
    is_confirmed: bool = False


@dataclass
class _Unheard:
    """What NVML told and the kernel log has not, so far."""

    number: int
    bus: str
    at: float
    heard: float
    count: int = 1


@dataclass
class Xids:
    """`clock` is monotonic. `uuid_at` answers which GPU is at a place of the bus; "" where nobody knows."""

    boot_id: str
    uuid_at: Callable[[str], str]
    confirm_seconds: float
    _new: dict[tuple[object, ...], _Folded] = field(default_factory=dict)
    _texts: dict[tuple[object, ...], int] = field(default_factory=dict)
    _told: dict[tuple[str, int], _Folded] = field(default_factory=dict)
    _late: list[_Folded] = field(default_factory=list)
    _unheard: dict[tuple[str, int], _Unheard] = field(default_factory=dict)
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    is_urgent: bool = False
    """Something is there that is no repetition of what this window has told."""

    def hear(self, xid: Xid, *, seq: int, at: float, now: float) -> None:
        """A record of the kernel log's."""
        sort = self._sort(xid)
        if (folded := self._new.get(sort)) is not None:
            folded.count, folded.last_seq, folded.last_at = folded.count + 1, seq, at
            return
        folded = self._new[sort] = _Folded(xid, seq, seq, at, at, now)
        self._texts[sort[:3]] = self._texts.get(sort[:3], 0) + 1
        folded.is_confirmed = self._was_unheard(xid, now)
        self.is_urgent = self.is_urgent or sort not in self._seen

    def hear_nvml(self, bus: str, number: int, *, at: float, now: float) -> None:
        """NVML's word for an Xid; the kernel log's may come before or after it."""
        bus = normalised(bus)
        for folded in [*self._new.values(), *self._told.values()]:
            if _is_same(folded.xid, bus, number) and now - folded.heard <= self.confirm_seconds:
                if not folded.is_confirmed and folded not in self._new.values():
                    self._late.append(folded)
                folded.is_confirmed = True
                return
        unheard = self._unheard.setdefault((bus, number), _Unheard(number, bus, at, now, 0))
        unheard.count += 1

    def take(self, now: float, *, is_kernel_log_read: bool = True) -> list[Event]:
        """The events to tell now. What is equal to one of them is no news until `begin_window`."""
        # By their last records: whoever takes them in order knows of each whether it counted before.
        told = sorted([*self._late, *self._new.values()], key=lambda folded: folded.last_seq)
        events = [self._event(folded) for folded in told]
        self._seen |= self._new.keys()
        self._told = {key: one for key, one in self._told.items() if now - one.heard <= self.confirm_seconds}
        self._told |= {(one.xid.bus, one.xid.number): one for one in self._new.values()}
        self._new, self._texts, self._late, self.is_urgent = {}, {}, [], False
        waited = self.confirm_seconds if is_kernel_log_read else 0.0
        for key, unheard in list(self._unheard.items()):
            if now - unheard.heard >= waited:
                events.append(self._unconfirmed(self._unheard.pop(key)))
        return events

    def begin_window(self) -> None:
        self._seen = set()

    def has_news(self, now: float, *, is_kernel_log_read: bool = True) -> bool:
        """Whether there is something that is to be told at once."""
        waited = self.confirm_seconds if is_kernel_log_read else 0.0
        return bool(self.is_urgent or self._late or any(now - one.heard >= waited for one in self._unheard.values()))

    def _sort(self, xid: Xid) -> tuple[object, ...]:
        """What it is folded with: beyond some texts at once, with whatever is of the same GPU and number."""
        sort: tuple[object, ...] = xid.sort
        if sort in self._new:
            return sort
        if self._texts.get(sort[:3], 0) < MOST_TEXTS and len(self._new) < MOST_EVENTS:
            return sort
        return (*sort[:3], None) if len(self._new) < 2 * MOST_EVENTS else (sort[0], None, None, None)

    def _was_unheard(self, xid: Xid, now: float) -> bool:
        for key, unheard in self._unheard.items():
            if _is_same(xid, unheard.bus, unheard.number) and now - unheard.heard <= self.confirm_seconds:
                del self._unheard[key]
                return True
        return False

    def _event(self, folded: _Folded) -> Event:
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
        return event | {name: value for name, value in more.items() if value is not None}

    def _unconfirmed(self, unheard: _Unheard) -> Event:
        """By NVML alone."""
        said = {"kind": "xid", "at": round(unheard.at, 3), **self._gpu(unheard.bus), "xid": unheard.number}
        return said | {"text": "", "source": "nvml", "confirmed": False, "count": unheard.count}

    def _gpu(self, bus: str) -> Event:
        uuid = self.uuid_at(bus)
        return {**({"gpu": uuid} if uuid else {}), **({"bus": bus} if bus else {})}


def _is_same(xid: Xid, bus: str, number: int) -> bool:
    return xid.kind == "xid" and xid.bus == bus and number in {xid.number, ANY_NUMBER}

"""Parse what NVIDIA's driver writes to the kernel log: Xids, SXids, GPUs that fell off the bus. Pure.

These lines contain process names, so only the beginning of a line identifies it as the driver's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpus.pci import normalised
from nodes.agent.cleaning import clean

OFF_THE_BUS = 79
SAME_FALL_S = 5.0  # a "fallen off the bus" line and its Xid within this time are one event
MAX_RECORDS_PER_SENTENCE = 5  # the driver splits long sentences over several records
MAX_TEXT = 500
MAX_NAME = 64
MAX_GPUS = 64
_ADDRESS = r"(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?"
_REPORT = rf"\((?:PCI:)?(?P<bus>{_ADDRESS})[^)]{{0,64}}\): (?P<number>\d{{1,6}})(?!\d),? ?(?P<rest>.*)"
_XID = re.compile(rf"NVRM: Xid {_REPORT}", re.S)
_SXID = re.compile(rf"nvidia-nvswitch(?P<switch>\d{{1,3}}): SXid {_REPORT}", re.S)
_PID = re.compile(r"pid=(?:'?<unknown>'?|'?(?P<pid>\d{1,10})'?)(?:, |$)")
_NAME = re.compile(r"name=(?:<unknown>|(?P<name>.{0,64}?))(?:, |$)", re.S)
_PLACE = re.compile(rf"\b(?P<bus>[0-9a-fA-F]{{4,8}}:{_ADDRESS})(?![0-9a-fA-F:])")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F_]*|\d[0-9a-fA-F_]*")


@dataclass(frozen=True)
class XidRecord:
    """An Xid in the kernel log."""

    kind: str
    """xid or sxid."""
    number: int
    bus: str
    """domain:bus:device; "" if the line has none."""
    text: str
    pid: int | None = None
    name: str = ""
    switch: int | None = None
    is_fatal: bool | None = None
    """For an SXid: as the line says."""

    @property
    def aggregation_key(self) -> tuple[str, str, int, str]:
        """Return a key that is equal for Xids which differ only in numbers in their text."""
        return self.kind, self.bus, self.number, _NUMBER.sub("#", self.text)


def may_contain_xid(record: bytes) -> bool:
    """Return whether a raw record may contain an Xid; nearly all records do not."""
    return b"NVRM" in record or b"SXid" in record


class DriverLogParser:
    """Parses the driver's records in order: some of its sentences span three records."""

    def __init__(self) -> None:
        self._pending_bus, self._records_since = "", 0
        self._fell: dict[str, tuple[float, bool]] = {}

    def read(self, text: str, at: float) -> XidRecord | None:
        """Return the Xid in a kernel record, if any; `at` is its time, in any seconds."""
        if text.startswith("NVRM: Xid ("):
            xid = _xid(text)
            return self._deduplicated(xid, at, has_number=True) if xid and xid.number == OFF_THE_BUS else xid
        if text.startswith("nvidia-nvswitch"):
            return _sxid(text)
        if text.startswith("NVRM: ") and (fall := self._fall(text)):
            return self._deduplicated(fall, at, has_number=False)
        return None

    def _fall(self, text: str) -> XidRecord | None:
        """Return an Xid 79 for a "fallen off the bus" sentence, whose bus may be in an earlier record."""
        named = _PLACE.search(text)
        self._records_since += 1
        if "fallen off the bus" in text:
            bus = (
                normalised(named["bus"])
                if named
                else self._pending_bus
                if self._records_since <= MAX_RECORDS_PER_SENTENCE
                else ""
            )
            self._pending_bus = ""
            return XidRecord("xid", OFF_THE_BUS, bus, clean(text.replace("NVRM: ", ""), MAX_TEXT))
        if named and text.startswith("NVRM: The NVIDIA GPU "):
            self._pending_bus, self._records_since = normalised(named["bus"]), 0
        return None

    def _deduplicated(self, fall: XidRecord, at: float, *, has_number: bool) -> XidRecord | None:
        """Drop duplicates: sentences and an Xid, in any order, report the same fall once; further Xids count."""
        previous = self._fell.get(fall.bus)
        if len(self._fell) > MAX_GPUS:
            self._fell.clear()
        if previous is None or abs(at - previous[0]) > SAME_FALL_S:
            self._fell[fall.bus] = (at, has_number)
            return fall
        had_number = previous[1]
        self._fell[fall.bus] = (previous[0], had_number or has_number)
        return fall if has_number and had_number else None


def _xid(text: str) -> XidRecord | None:
    match = _XID.fullmatch(text)
    if match is None:
        return None
    rest, pid = match["rest"], None
    if found := _PID.match(rest):
        pid, rest = int(found["pid"]) if found["pid"] else None, rest[found.end() :]
    name = _NAME.match(rest)
    return XidRecord(
        "xid",
        int(match["number"]),
        normalised(match["bus"]),
        clean(rest[name.end() :] if name else rest, MAX_TEXT),
        pid=pid,
        name=clean((name["name"] or "") if name else "", MAX_NAME),
    )


def _sxid(text: str) -> XidRecord | None:
    """Parse an SXid of a switch; lines with details of the same SXid are skipped."""
    match = _SXID.fullmatch(text)
    if match is None or match["rest"].startswith(("Severity ", "Data ")):
        return None
    word = match["rest"].partition(",")[0].strip().lower()
    is_fatal = True if word == "fatal" else False if word in {"non-fatal", "nonfatal"} else None
    text_of_record = clean(match["rest"], MAX_TEXT)
    return XidRecord(
        "sxid",
        int(match["number"]),
        normalised(match["bus"]),
        text_of_record,
        switch=int(match["switch"]),
        is_fatal=is_fatal,
    )

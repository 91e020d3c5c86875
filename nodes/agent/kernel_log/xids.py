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
PROBED = "The NVIDIA probe routine failed for "
_ADDRESS = r"(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?"
_REPORT = rf"\((?:PCI:)?(?P<bus>{_ADDRESS})[^)]{{0,64}}\): (?P<number>\d{{1,6}})(?!\d),? ?(?P<rest>.*)"
_XID = re.compile(rf"NVRM: Xid {_REPORT}", re.S)
_SXID = re.compile(rf"nvidia-nvswitch(?P<switch>\d{{1,3}}): SXid {_REPORT}", re.S)
_PID = re.compile(r"pid=(?:'?<unknown>'?|'?(?P<pid>\d{1,10})'?)(?:, |$)")
_NAME = re.compile(r"name=(?:<unknown>|(?P<name>.{0,64}?))(?:, |$)", re.S)
_PLACE = re.compile(rf"\b(?P<bus>[0-9a-fA-F]{{4,8}}:{_ADDRESS})(?![0-9a-fA-F:])")
_PROBE_FAILED = re.compile(
    rf"nvidia(?:: probe of (?P<bus>{_ADDRESS})| (?P<newer_bus>{_ADDRESS}): probe with driver nvidia)"
    r" failed with error .{0,20}"
)
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
    is_implied: bool = False
    """The driver reports the loss of a GPU without an Xid; it counts as Xid 79."""

    @property
    def aggregation_key(self) -> tuple[str, str, int, str]:
        """Return a key that is equal for Xids which differ only in numbers in their text."""
        return self.kind, self.bus, self.number, _NUMBER.sub("#", self.text)


def may_contain_xid(record: bytes) -> bool:
    """Return whether a raw record may contain an Xid; nearly all records do not."""
    return b"NVRM" in record or b"SXid" in record or (b"nvidia" in record and b"probe" in record)


class DriverLogParser:
    """Parses the driver's records in order: some of its sentences span three records."""

    def __init__(self) -> None:
        self._pending_bus, self._records_since = "", 0
        self._fell: dict[str, tuple[float, bool]] = {}
        self._fell_at = self._unsupported_at = -2 * SAME_FALL_S

    def read(self, text: str, at: float) -> XidRecord | None:
        """Return the Xid in a kernel record, if any; `at` is its time, in any seconds."""
        if text.startswith("NVRM: Xid ("):
            xid = _xid(text)
            return self._deduplicated(xid, at, has_number=True) if xid and xid.number == OFF_THE_BUS else xid
        if text.startswith("nvidia-nvswitch"):
            return _sxid(text)
        if text.startswith("NVRM: ") and (fall := self._fall(text)):
            return self._deduplicated(fall, at, has_number=False)
        if (failed := self._probe_failure(text, at)) is not None:
            return self._deduplicated(failed, at, has_number=False)
        return None

    def _probe_failure(self, text: str, at: float) -> XidRecord | None:
        """Return an Xid 79 for a GPU that the driver could not start, unless the records before it say why.

        The kernel names the GPU ("nvidia: probe of 0000:05:00.0 failed with error -1"); the driver's own summary after
        it ("The NVIDIA probe routine failed for 1 device(s).") does not, and counts only if nothing preceded it.
        """
        if text.startswith("NVRM: ") and "not supported by" in text:
            self._unsupported_at = at
        if at - self._unsupported_at <= SAME_FALL_S:
            return None
        if found := _PROBE_FAILED.fullmatch(text):
            if "" in self._fell and at - self._fell[""][0] <= SAME_FALL_S:
                return None  # a sentence whose beginning is missing has reported it, without its bus
            return _implied(normalised(found["bus"] or found["newer_bus"]), text)
        is_summary = text.startswith(f"NVRM: {PROBED}") and at - self._fell_at > SAME_FALL_S
        return _implied("", text) if is_summary else None

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
            return _implied(bus, text)
        if named and text.startswith("NVRM: The NVIDIA GPU "):
            self._pending_bus, self._records_since = normalised(named["bus"]), 0
        return None

    def _deduplicated(self, fall: XidRecord, at: float, *, has_number: bool) -> XidRecord | None:
        """Drop duplicates: sentences and an Xid, in any order, report the same fall once; further Xids count."""
        self._fell_at = at
        previous = self._fell.get(fall.bus)
        if len(self._fell) > MAX_GPUS:
            self._fell.clear()
        if previous is None or abs(at - previous[0]) > SAME_FALL_S:
            self._fell[fall.bus] = (at, has_number)
            return fall
        had_number = previous[1]
        self._fell[fall.bus] = (previous[0], had_number or has_number)
        return fall if has_number and had_number else None


def _implied(bus: str, text: str) -> XidRecord:
    return XidRecord("xid", OFF_THE_BUS, bus, clean(text.replace("NVRM: ", ""), MAX_TEXT), is_implied=True)


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

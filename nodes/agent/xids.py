"""What NVIDIA's driver says in the kernel log: Xids, SXids, GPUs that fell off the bus. Text in, facts out.

Names of processes stand within these lines, so a line speaks for the driver by how it begins, by nothing after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpus.pci import normalised
from nodes.agent.cleaning import clean

OFF_THE_BUS = 79
SAME_FALL_S = 5.0  # within which a fall and its Xid are one
PIECES = 5  # of the driver's records, within which a sentence that it began is ended
MOST_TEXT = 500
MOST_NAME = 64
MOST_GPUS = 64
_ADDRESS = r"(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?"
_SAID = rf"\((?:PCI:)?(?P<bus>{_ADDRESS})[^)]{{0,64}}\): (?P<number>\d{{1,6}})(?!\d),? ?(?P<rest>.*)"
_XID = re.compile(rf"NVRM: Xid {_SAID}", re.S)
_SXID = re.compile(rf"nvidia-nvswitch(?P<switch>\d{{1,3}}): SXid {_SAID}", re.S)
_PID = re.compile(r"pid=(?:'?<unknown>'?|'?(?P<pid>\d{1,10})'?)(?:, |$)")
_NAME = re.compile(r"name=(?:<unknown>|(?P<name>.{0,64}?))(?:, |$)", re.S)
_PLACE = re.compile(rf"\b(?P<bus>[0-9a-fA-F]{{4,8}}:{_ADDRESS})(?![0-9a-fA-F:])")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F_]*|\d[0-9a-fA-F_]*")


@dataclass(frozen=True)
class Xid:
    """One that the kernel log tells."""

    kind: str
    """xid or sxid."""
    number: int
    bus: str
    """domain:bus:device; "" where the line does not say."""
    text: str
    pid: int | None = None
    name: str = ""
    switch: int | None = None
    is_fatal: bool | None = None
    """Of an SXid, by its own word."""

    @property
    def sort(self) -> tuple[str, str, int, str]:
        """The same for those that differ in nothing but numbers of their text."""
        return self.kind, self.bus, self.number, _NUMBER.sub("#", self.text)


def may_say(record: bytes) -> bool:
    """Whether a raw record is worth reading: nearly all that a kernel says is not."""
    return b"NVRM" in record or b"SXid" in record


class Driver:
    """The driver's records, one after another: some sentences of it are three."""

    def __init__(self) -> None:
        self._begun, self._since = "", 0
        self._fell: dict[str, tuple[float, bool]] = {}

    def read(self, text: str, at: float) -> Xid | None:
        """What a record of the kernel's tells; `at` is its time, in any seconds."""
        if text.startswith("NVRM: Xid ("):
            xid = _xid(text)
            return self._once(xid, at, has_number=True) if xid and xid.number == OFF_THE_BUS else xid
        if text.startswith("nvidia-nvswitch"):
            return _sxid(text)
        if text.startswith("NVRM: ") and (fall := self._fall(text)):
            return self._once(fall, at, has_number=False)
        return None

    def _fall(self, text: str) -> Xid | None:
        """A GPU that is gone, by the sentence alone: whole, or in pieces of which an earlier one names the GPU."""
        named = _PLACE.search(text)
        self._since += 1
        if "fallen off the bus" in text:
            bus = normalised(named["bus"]) if named else self._begun if self._since <= PIECES else ""
            self._begun = ""
            return Xid("xid", OFF_THE_BUS, bus, clean(text.replace("NVRM: ", ""), MOST_TEXT))
        if named and text.startswith("NVRM: The NVIDIA GPU "):
            self._begun, self._since = normalised(named["bus"]), 0
        return None

    def _once(self, fall: Xid, at: float, *, has_number: bool) -> Xid | None:
        """One fall is told by sentences and by an Xid, in any order: only the first is a fall, and further Xids."""
        before = self._fell.get(fall.bus)
        if len(self._fell) > MOST_GPUS:
            self._fell.clear()
        if before is None or abs(at - before[0]) > SAME_FALL_S:
            self._fell[fall.bus] = (at, has_number)
            return fall
        had_number = before[1]
        self._fell[fall.bus] = (before[0], had_number or has_number)
        return fall if has_number and had_number else None


def _xid(text: str) -> Xid | None:
    match = _XID.fullmatch(text)
    if match is None:
        return None
    rest, pid = match["rest"], None
    if found := _PID.match(rest):
        pid, rest = int(found["pid"]) if found["pid"] else None, rest[found.end() :]
    name = _NAME.match(rest)
    return Xid(
        "xid",
        int(match["number"]),
        normalised(match["bus"]),
        clean(rest[name.end() :] if name else rest, MOST_TEXT),
        pid=pid,
        name=clean((name["name"] or "") if name else "", MOST_NAME),
    )


def _sxid(text: str) -> Xid | None:
    """Of a switch; lines with details of the same SXid tell of no other."""
    match = _SXID.fullmatch(text)
    if match is None or match["rest"].startswith(("Severity ", "Data ")):
        return None
    word = match["rest"].partition(",")[0].strip().lower()
    is_fatal = True if word == "fatal" else False if word in {"non-fatal", "nonfatal"} else None
    said = clean(match["rest"], MOST_TEXT)
    return Xid(
        "sxid", int(match["number"]), normalised(match["bus"]), said, switch=int(match["switch"]), is_fatal=is_fatal
    )

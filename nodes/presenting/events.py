"""Describe events of a machine. Pure: an agent's untrusted text in, text out; the caller escapes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vigil_core import formatting, untrusted

# What NVIDIA's numbers stand for, of those that one meets.
XIDS = {
    13: "a program’s error in a kernel",
    31: "a program reached for memory that is not its own",
    43: "a program on it was stopped",
    45: "what a program had on it was cleaned up",
    48: "a double-bit memory error",
    61: "its microcontroller has stopped",
    62: "its microcontroller has stopped",
    63: "a broken memory row is to be replaced",
    64: "a broken memory row cannot be replaced",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many single-bit memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    109: "a program hangs on it",
    119: "its system processor does not answer",
    120: "its system processor has failed",
    121: "an error of its link to the processor",
    140: "a memory error that cannot be mended",
    154: "the driver asks for another way to recover",
}
ECHO = 45  # beside another Xid it only cleans up after it

_TITLES = {
    "gpu.lost": "GPU lost",
    "gpu.silent": "NVIDIA’s driver does not answer",
    "driver.reloaded": "NVIDIA’s driver was loaded anew",
    "kmsg.overrun": "Lines of the kernel log are lost",
    "agent.gap": "Samples are missing",
    "boot": "Booted",
}
_TONES = {"xid": "failed", "sxid": "failed", "gpu.lost": "failed", "boot": "notice", "driver.reloaded": "notice"}


@dataclass(frozen=True)
class Words:
    """An event as a page tells it. `tone`: failed, warn or notice, the glyph that it has."""

    title: str
    detail: str
    tone: str


def words(kind: str, code: int | None, text: str, data: Mapping[str, Any]) -> Words:
    """The event's words; what is not known goes by its kind."""
    return Words(_title(kind, code, data), text or _detail(kind, data), _TONES.get(kind, "warn"))


def meaning(code: int | None) -> str:
    """Return what an Xid means; "" for those that mean nothing to most readers."""
    return XIDS.get(code or 0, "")


def mount_of(data: Mapping[str, Any]) -> str:
    """The mount that an event is of."""
    return untrusted.line(data.get("mount"), 100)


def _title(kind: str, code: int | None, data: Mapping[str, Any]) -> str:
    if kind in ("xid", "sxid"):
        name = f"{'Xid' if kind == 'xid' else 'SXid'} {formatting.MISSING if code is None else code}"
        return f"{name}: {meaning(code)}" if kind == "xid" and meaning(code) else name
    if kind == "mount.slow":
        return f"{mount_of(data) or 'A shared mount'} was slow"
    return _TITLES.get(kind, kind)


def _detail(kind: str, data: Mapping[str, Any]) -> str:
    if kind == "agent.gap" and (batches := untrusted.count(data.get("batches"))):
        return f"Its agent had no room for {formatting.plural(batches, 'batch', 'batches')} while nobody took them."
    if kind == "kmsg.overrun":
        return "The kernel wrote more than its ring holds."
    return ""

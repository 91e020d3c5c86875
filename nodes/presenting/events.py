"""Describe events of a machine. Pure: an agent's untrusted text in, text out; the caller escapes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vigil_core import formatting, untrusted

# The meaning of NVIDIA's Xid numbers that occur in practice.
XIDS = {
    13: "kernel error in a program",
    31: "invalid memory access by a program",
    43: "a program on the GPU was stopped",
    45: "cleanup after a stopped program",
    48: "double-bit memory error",
    61: "internal microcontroller halted",
    62: "internal microcontroller halted",
    63: "a faulty memory row will be remapped",
    64: "a faulty memory row could not be remapped",
    74: "NVLink error",
    79: "GPU fell off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "a program on the GPU hangs",
    119: "GPU system processor (GSP) does not respond",
    120: "GPU system processor (GSP) failed",
    121: "error of the link to the CPU (C2C)",
    140: "unrecovered memory error",
    154: "the required recovery action changed",
}
ECHO = 45  # next to another Xid it only reports the clean-up after it

_TITLES = {
    "gpu.lost": "GPU lost",
    "gpu.silent": "NVIDIA driver does not respond",
    "driver.reloaded": "NVIDIA driver was reloaded",
    "kmsg.overrun": "Kernel log lines were lost",
    "agent.gap": "Samples are missing",
    "boot": "Booted",
    "link.down": "InfiniBand link went down",
    "fault.planted": "A game day injected a fault",
    "fault.refused": "A fault of a game day was not injected",
}
_PLANTINGS = ("fault.planted", "fault.refused")
_TONES = {
    "xid": "failed", "sxid": "failed", "gpu.lost": "failed", "boot": "notice", "driver.reloaded": "notice",
    **dict.fromkeys(_PLANTINGS, "notice"),
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """An event's text on a page. `tone` chooses the glyph: failed, warn or notice."""

    title: str
    detail: str
    tone: str


def words(kind: str, code: int | None, text: str, data: Mapping[str, Any]) -> Words:
    """Return the event's text; an unknown kind is shown as it is."""
    is_planted = kind not in _PLANTINGS and untrusted.number(data.get("planted_until")) is not None
    title = f"{_title(kind, code, data)} (injected by a game day)" if is_planted else _title(kind, code, data)
    return Words(title, text or _detail(kind, data), _TONES.get(kind, "warn"))


def meaning(code: int | None) -> str:
    """Return what an Xid means; "" for those that mean nothing to most readers."""
    return XIDS.get(code or 0, "")


def mount_of(data: Mapping[str, Any]) -> str:
    """Return the mount that an event is about."""
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
        discarded = formatting.plural(batches, "batch", "batches")
        return f"The agent discarded {discarded}: the portal could not be reached and its buffer was full."
    if kind == "link.down":
        return untrusted.line(data.get("port"), 64)
    if kind == "kmsg.overrun":
        return "The kernel's ring buffer was full."
    return ""

"""Recognize what kind of file this is: a log, a scheduler's record, a flight recorder's dump or a kernel log."""

from __future__ import annotations

import re

from diagnosis.signs import stacks

TOP_LINES = 4  # that show what a file is

_SACCT = re.compile(rb"(?m)^ *Job(?:ID|IDRaw)[ |].*\bState\b")
_SCONTROL = re.compile(rb"(?m)^\s*JobId=\d+ ")
_KERNEL = re.compile(
    rb"(?m)^(?:<\d+>)?\[ *\d+\.\d{6}\] |^\[[A-Z][a-z]{2} [A-Z][a-z]{2} .{14,16}\] |^[\w:.+ -]{15,40} [\w.-]+ kernel: "
)
_SMI = re.compile(rb"=+NVSMI LOG=+|\| NVIDIA-SMI ")
_DF = re.compile(rb"(?m)^Filesystem +.*Mounted on")
_PYSPY = re.compile(rb"(?m)^Process \d+: .*\nPython v\d")


def kind_of(head: bytes) -> str:
    """Return sacct, scontrol, flight, kernel, nvidia-smi, df, stacks or log, from the first bytes of a file."""
    start = head[:65_536]
    top = b"\n".join(line for line in start[:4096].split(b"\n") if line.strip(b"+#$= \r")[:1])
    top = b"\n".join(top.split(b"\n")[:TOP_LINES])
    if start.lstrip()[:1] == b"{" and b'"collective_seq_id"' in head[:262_144]:
        return "flight"
    for kind, pattern in (("sacct", _SACCT), ("scontrol", _SCONTROL)):  # a log may have either further down
        if pattern.search(top):
            return kind
    if stacks.is_dump(head):
        return "stacks"
    for kind, pattern in (("nvidia-smi", _SMI), ("df", _DF), ("stacks", _PYSPY)):
        if pattern.search(top):
            return kind
    lines = start.count(b"\n") or 1
    return "kernel" if len(_KERNEL.findall(start)) * 2 > lines else "log"

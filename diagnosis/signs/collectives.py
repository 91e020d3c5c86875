"""Which collective operation each rank hung in, by the watchdogs' lines: who is behind, or called something else."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from diagnosis.logs.prefixes import Prefix
from diagnosis.scanned_log import Scanned
from diagnosis.signs.sign import Sign

_WORK = re.compile(
    r"Work(?:NCCL|Gloo|XCCL|HCCL)\((?:SeqNum|Seq)=(?P<seq>\d+), (?:OpType=(?P<op>\w+))"
    r"(?:, NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+))?"
)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<group>\d+)")


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's, when its watchdog gave up."""

    rank: int
    seq: int
    what: str
    line: int
    text: str
    prefix: Prefix


def signs_of(scanned: Scanned) -> list[Sign]:
    """Of the first process group that several ranks tell of: a mismatch is a root, who is behind a confirmation."""
    works: dict[str, dict[int, Work]] = {}
    for told in scanned.told.values():
        for hit in told.hits:
            if (found := _WORK.search(hit.text)) is None or hit.prefix.rank is None:
                continue
            group = _GROUP.search(hit.text)
            what = f"{found['op']} of {found['numel_in'] or '?'} to {found['numel_out'] or '?'} numbers"
            work = Work(hit.prefix.rank, int(found["seq"]), what, hit.line, hit.text, hit.prefix)
            works.setdefault(group["group"] if group else "", {}).setdefault(work.rank, work)
    for by_rank in works.values():
        if len(by_rank) > 1 and (sign := _of_group(scanned.name, list(by_rank.values()))) is not None:
            return [sign]
    return []


def _of_group(name: str, works: list[Work]) -> Sign | None:
    lowest = min(work.seq for work in works)
    if all(work.seq == lowest for work in works):
        usual, count = Counter(work.what for work in works).most_common(1)[0]
        odd = [work for work in works if work.what != usual]
        if not odd or count < len(odd):
            return None
        one = odd[0]
        text = f"at sequence number {lowest} rank {one.rank} is in {one.what}, the others in {usual}"
        return Sign(name, one.line, text, "collective.mismatch", "root", one.prefix, of="collectives")
    behind = [work for work in works if work.seq == lowest]
    if len(behind) * 2 > len(works):
        return None
    one = behind[0]
    text = f"rank {one.rank} is behind: at sequence number {lowest}, the others up to {max(work.seq for work in works)}"
    return Sign(name, one.line, text, "collective.timeout", "confirmation", one.prefix, of="collectives")

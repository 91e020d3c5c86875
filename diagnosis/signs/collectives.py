"""Find which rank is behind, or called another collective, from the watchdog lines of several ranks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from diagnosis.logs.prefixes import Prefix
from diagnosis.scanned_log import ScannedLog
from diagnosis.signs.sign import Sign

_WORK = re.compile(
    r"Work(?:NCCL|Gloo|XCCL|HCCL)\((?:SeqNum|Seq)=(?P<seq>\d+), (?:OpType=(?P<op>\w+))"
    r"(?:, NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+))?"
)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<group>\d+)")


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """The collective operation that one rank was in when its watchdog gave up."""

    rank: int
    seq: int
    what: str
    line: int
    text: str
    prefix: Prefix


def signs_of_collectives(scanned: ScannedLog) -> list[Sign]:
    """Return at most one sign, of the first process group that several ranks report.

    A mismatch is a root; a rank that is behind is a confirmation of a timeout.
    """
    works: dict[str, dict[int, PendingCollective]] = {}
    for entry_hits in scanned.entry_hits.values():
        for hit in entry_hits.hits:
            if (work_match := _WORK.search(hit.text)) is None or hit.prefix.rank is None:
                continue
            group = _GROUP.search(hit.text)
            what = f"{work_match['op']} of {work_match['numel_in'] or '?'} to {work_match['numel_out'] or '?'} numbers"
            work = PendingCollective(hit.prefix.rank, int(work_match["seq"]), what, hit.line, hit.text, hit.prefix)
            works.setdefault(group["group"] if group else "", {}).setdefault(work.rank, work)
    for by_rank in works.values():
        if len(by_rank) > 1 and (sign := _sign_of_group(scanned.name, list(by_rank.values()))) is not None:
            return [sign]
    return []


def _sign_of_group(name: str, works: list[PendingCollective]) -> Sign | None:
    lowest = min(work.seq for work in works)
    if all(work.seq == lowest for work in works):
        usual, count = Counter(work.what for work in works).most_common(1)[0]
        odd = [work for work in works if work.what != usual]
        if not odd or count < len(odd):
            return None
        outlier = odd[0]
        text = f"at sequence number {lowest} rank {outlier.rank} is in {outlier.what}, the others in {usual}"
        return Sign(
            name,
            outlier.line,
            text,
            cause="collective.mismatch",
            role="root",
            prefix=outlier.prefix,
            source_kind="collectives",
        )
    behind = [work for work in works if work.seq == lowest]
    if len(behind) * 2 > len(works):
        return None
    outlier = behind[0]
    highest = max(work.seq for work in works)
    text = f"rank {outlier.rank} is behind: at sequence number {lowest}, the others up to {highest}"
    return Sign(
        name,
        outlier.line,
        text,
        cause="collective.timeout",
        role="confirmation",
        prefix=outlier.prefix,
        source_kind="collectives",
    )

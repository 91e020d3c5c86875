"""Choose the evidence of a verdict: the lines and records that support it, and those that it explains."""

from __future__ import annotations

from diagnosis.case import Case, chronological
from diagnosis.causes import UNKNOWN
from diagnosis.signs.rank_exits import LAUNCHER
from diagnosis.signs.sign import Sign
from diagnosis.verdict import EvidenceLine
from vigil_core.masking import masked

MAX_EVIDENCE = 24
MAX_TEXT = 1000


def evidence_of(root: Sign | None, case: Case) -> list[EvidenceLine]:
    """Return the root, what confirms it, echoes and what was survived; each line once, at most `MAX_EVIDENCE`."""
    lines: list[EvidenceLine] = []
    groups = [("root", [root] if root else [])]
    if root is not None:
        same = [sign for sign in case.roots if sign is not root and sign.cause == root.cause]
        groups.append(("confirmation", same + [sign for sign in case.confirmations if sign.cause == root.cause]))
    exits = sorted(case.exits, key=lambda sign: not is_first_by_launcher(sign))
    groups.append(("confirmation", exits[:4]))
    others = [sign for sign in case.roots if root is None or sign.cause != root.cause]
    groups += [("echo", case.echoes + others), ("survived", case.survived)]
    if root is None or root.cause == UNKNOWN:  # what would have confirmed something is all that there is
        groups.append(("context", [sign for sign in case.confirmations if sign.source_kind]))
    groups.append(("context", case.context))
    places: set[tuple[str, int, str]] = set()
    for role, signs in groups:
        for sign in sorted(signs, key=chronological)[: MAX_EVIDENCE // 3]:
            place = (sign.file, sign.line, "" if sign.line else sign.text)  # records have no lines
            if place in places or len(lines) >= MAX_EVIDENCE:
                continue
            places.add(place)
            lines.append(
                EvidenceLine(
                    sign.file,
                    sign.line,
                    masked(sign.text.strip())[:MAX_TEXT],
                    role=role,
                    cause=sign.cause,
                    rank=sign.rank,
                    node=sign.node,
                    at=sign.at,
                    count=sign.count,
                    entry=sign.entry.name if sign.entry else "",
                )  # fmt: skip
            )
    return lines


def is_first_by_launcher(sign: Sign) -> bool:
    """Return whether this is the launcher's record of the rank that ended first, with its time and memory."""
    return sign.file == LAUNCHER and "first" in sign.groups


def describe_place(sign: Sign) -> str:
    return f"line {sign.line:,} of {sign.file}" if sign.line else f"the report of the {sign.file}"

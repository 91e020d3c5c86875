"""Write a verdict as one sentence: the cause, the place, and what is quoted of the root."""

from __future__ import annotations

import re

from diagnosis.causes import CAUSES
from diagnosis.verdict import Verdict

MAX_DETAIL = 160  # letters of an exception in the sentence
_XID = re.compile(r"\b(?P<kind>S?Xid)\b[^:]*(?:\([^)]*\))?: (?P<code>\d{1,4})\b")
_FAILED_WITH = re.compile(" (?:failed with|so):")
# What the sentence quotes of a root.
_DETAILS = {
    "federated.quorum": re.compile(r"round \d+ was lost \d+ times: [^.\n]+"),
    "federated.coverage": re.compile(r"[\d,]+ of [\d,]+ clients never counted, [^.]+"),
    # Releases before 0.2 wrote "client 3 so:".
    "federated.clients": re.compile(r"client \d+ (?:failed with|so): [^\n]+"),
}
CLAIMED = {"program": "According to its own log", "launcher": "According to its launcher"}
"""The beginning of a verdict that only the job's own log or folder supports, by source."""


def sentence(verdict: Verdict, *, is_claim: bool) -> str:
    """Return what happened in one sentence. `is_claim`: only the job's own log or folder reports it."""
    title = (verdict.heading or CAUSES[verdict.cause].heading).removesuffix(".")
    if is_claim:
        title = f"{CLAIMED[verdict.source]}: {title}"
    root = next((line.text for line in verdict.evidence if line.role == "root"), "")
    return f"{title}{_where(verdict, root)}{_detail(verdict, root).rstrip(' .')}."


def _where(verdict: Verdict, root: str) -> str:
    """Return the rank, the node and an Xid's number as far as they are known: " on rank 21 (dgx-03, Xid 79)"."""
    places = [f"rank {verdict.rank}" if verdict.rank is not None else "", verdict.node]
    if verdict.cause.startswith("gpu.") and (xid := _XID.search(root)):
        places.append(f"{xid['kind']} {xid['code']}")
    first, *more = [place for place in places if place] or [""]
    if not first or first.startswith(("Xid", "SXid")):
        return f" ({first})" if first else ""
    return f" on {first}" + (f" ({', '.join(more)})" if more else "")


def _detail(verdict: Verdict, root: str) -> str:
    """Return what the sentence quotes of the root: the exception, or a federation's counts."""
    if verdict.cause == "program.exception" and verdict.exception:
        return f": {(root or verdict.exception).splitlines()[0][:MAX_DETAIL]}"
    if verdict.cause in _DETAILS and (detail := _DETAILS[verdict.cause].search(root)):
        return f": {_FAILED_WITH.sub(':', detail[0], count=1)[:MAX_DETAIL].strip()}"
    return ""

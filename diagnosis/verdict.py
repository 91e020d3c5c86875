"""Define the verdict on a failure: a cause with confidence and evidence, what was ruled out, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from diagnosis.causes import CAUSES
from diagnosis.signs.sign import Witness


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """A line of evidence and its role.

    Roles: root, echo, confirmation, survived, or context (worth knowing, never a cause).
    """

    file: str
    line: int
    text: str
    _: KW_ONLY
    role: str
    cause: str
    rank: int | None = None
    node: str = ""
    at: float | None = None
    count: int = 1
    entry: str = ""

    def as_json(self) -> dict[str, Any]:
        found = {"file": self.file, "line": self.line, "text": self.text, "role": self.role, "cause": self.cause}
        more = {"rank": self.rank, "node": self.node, "at": self.at, "count": self.count, "entry": self.entry}
        return found | {key: value for key, value in more.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class AlternativeCause:
    """A cause that was considered and ruled out, and why."""

    cause: str
    why: str

    def as_json(self) -> dict[str, str]:
        return {"cause": self.cause, "why": self.why}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one cause of a failure. `confidence` is between 0 and 1; `summary` is one sentence.

    `source` is the best witness of the cause; "program" means that neither the machine nor the scheduler supports what
    the job's own log says.
    """

    cause: str
    confidence: float
    summary: str
    advice: str
    evidence: list[EvidenceLine] = field(default_factory=list)
    runner_up: AlternativeCause | None = None
    ruled_out: list[AlternativeCause] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    rank: int | None = None
    node: str = ""
    exception: str = ""
    frame: str = ""  # the innermost of the person's own code, as path:function
    operation: str = ""
    entry: str = ""
    heading: str = ""  # more specific than the cause's title
    source: Witness = "program"
    """Source of the evidence; program: neither machine nor scheduler supports what its log says."""
    doubts: list[str] = field(default_factory=list)

    @property
    def confirmed_cause(self) -> str:
        """Return the cause if a sysadmin must act and more than the program's own log supports it; else ""."""
        return confirmed_cause_of({"cause": self.cause, "owner": self.owner, "source": self.source})

    @property
    def owner(self) -> str:
        return CAUSES[self.cause].owner

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as it is stored, with names that earlier releases read."""
        return {
            "cause": self.cause,
            "title": CAUSES[self.cause].title,
            "confidence": round(self.confidence, 2),
            "owner": self.owner,
            "says": self.summary,
            "advice": self.advice,
            "evidence": [item.as_json() for item in self.evidence],
            "runner_up": self.runner_up.as_json() if self.runner_up else None,
            "ruled_out": [item.as_json() for item in self.ruled_out],
            "not_seen": self.unavailable,
            "rank": self.rank,
            "node": self.node,
            "exception": self.exception,
            "frame": self.frame,
            "doing": self.operation,
            "entry": self.entry,
            "source": self.source,
            "doubts": self.doubts,
        }

    def as_report(self) -> dict[str, Any]:
        """Return the verdict as `vigil diagnose --json` prints it. `says`, `not_seen` and `doing` are deprecated."""
        report = {"summary": self.summary, "unavailable": self.unavailable, "operation": self.operation}
        return self.as_json() | report


def confirmed_cause_of(verdict: Mapping[str, Any]) -> str:
    """Return the cause of a stored verdict if a sysadmin must act and more than the log supports it; else ""."""
    is_confirmed = verdict.get("owner") == "sysadmin" and verdict.get("source") in {"machine", "scheduler"}
    return str(verdict["cause"]) if is_confirmed else ""


_SOURCES: dict[object, str] = {
    "machine": "the node (kernel or agent)",
    "scheduler": "the scheduler",
    "launcher": "the job's launcher only",
    "program": "the program only",
}


def reported_by(verdict: Mapping[str, Any]) -> str:
    """Return who reported a verdict's cause, and what contradicts it. `verdict` is as `Verdict.as_json` returns it.

    Returns "" where a researcher must act, as programs know best what went wrong in them, and for verdicts of releases
    that did not store a source.
    """
    source = _SOURCES.get(verdict.get("source"), "")
    if verdict.get("owner") != "sysadmin" or not source:
        return ""
    return "; ".join([source, *map(str, verdict.get("doubts", ()))])

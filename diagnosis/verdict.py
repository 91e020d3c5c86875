"""What was found out: one cause, how sure, by which evidence, what was ruled out and what could not be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diagnosis.causes import CAUSES
from diagnosis.signs.sign import Witness


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line and the part that it plays: root, echo, confirmation, survived; context is only worth knowing."""

    file: str
    line: int
    text: str
    role: str
    cause: str
    rank: int | None = None
    node: str = ""
    at: float | None = None
    count: int = 1
    entry: str = ""

    def told(self) -> dict[str, Any]:
        found = {"file": self.file, "line": self.line, "text": self.text, "role": self.role, "cause": self.cause}
        more = {"rank": self.rank, "node": self.node, "at": self.at, "count": self.count, "entry": self.entry}
        return found | {key: value for key, value in more.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Other:
    """A cause that was considered and set aside, and why."""

    cause: str
    why: str

    def told(self) -> dict[str, str]:
        return {"cause": self.cause, "why": self.why}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause for all that was read."""

    cause: str
    confidence: float
    says: str
    advice: str
    evidence: list[Evidence] = field(default_factory=list)
    runner_up: Other | None = None
    ruled_out: list[Other] = field(default_factory=list)
    not_seen: list[str] = field(default_factory=list)
    rank: int | None = None
    node: str = ""
    exception: str = ""
    frame: str = ""  # the innermost of the person's own code, as path:function
    doing: str = ""
    entry: str = ""
    heading: str = ""  # what happened, where the entry says more than the cause's title
    source: Witness = "program"
    """Whose word the cause is; program: nothing of the machine or the scheduler supports what its log says."""
    doubts: list[str] = field(default_factory=list)

    @property
    def confirmed_cause(self) -> str:
        """Return the cause where a sysadmin must act and more than a program's word supports it; else ""."""
        return confirmed_by({"cause": self.cause, "owner": self.owner, "source": self.source})

    @property
    def owner(self) -> str:
        return CAUSES[self.cause].owner

    def told(self) -> dict[str, Any]:
        """As `vigil diagnose --json` prints it."""
        return {
            "cause": self.cause,
            "title": CAUSES[self.cause].title,
            "confidence": round(self.confidence, 2),
            "owner": self.owner,
            "says": self.says,
            "advice": self.advice,
            "evidence": [one.told() for one in self.evidence],
            "runner_up": self.runner_up.told() if self.runner_up else None,
            "ruled_out": [one.told() for one in self.ruled_out],
            "not_seen": self.not_seen,
            "rank": self.rank,
            "node": self.node,
            "exception": self.exception,
            "frame": self.frame,
            "doing": self.doing,
            "entry": self.entry,
            "source": self.source,
            "doubts": self.doubts,
        }


def confirmed_by(told: Mapping[str, Any]) -> str:
    """Return what a stored verdict says that sysadmins must act on, by more than a program's word; else ""."""
    is_confirmed = told.get("owner") == "sysadmin" and told.get("source") in {"machine", "scheduler"}
    return str(told["cause"]) if is_confirmed else ""


_SOURCES: dict[object, str] = {
    "machine": "its machine (kernel or agent)",
    "scheduler": "the scheduler",
    "launcher": "its launcher alone, in the job's own folder",
    "program": "the program alone",
}


def reported_by(told: Mapping[str, Any]) -> str:
    """Return whose word a verdict's cause is, and what speaks against it. `told`: as `Verdict.told` gives it.

    "" where a researcher must act, as programs know best what went wrong in them, and where an older release told.
    """
    source = _SOURCES.get(told.get("source"), "")
    if told.get("owner") != "sysadmin" or not source:
        return ""
    return "; ".join([source, *map(str, told.get("doubts", ()))])

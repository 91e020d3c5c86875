"""Sort all signs of a failure by the part that they play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diagnosis.scanned_log import ScannedLog
from diagnosis.signs.sign import Sign, exit_code_of


@dataclass(slots=True)
class Case:
    """All signs of one failure from all logs and records, sorted by role.

    `available_sources` names the kinds of sources that were read, as "kernel", and facts about the attempt
    (`diagnosis.corroboration`).
    """

    signs: list[Sign]
    scanned: Sequence[ScannedLog]
    available_sources: frozenset[str] = frozenset()
    roots: list[Sign] = field(default_factory=list)
    echoes: list[Sign] = field(default_factory=list)
    survived: list[Sign] = field(default_factory=list)
    confirmations: list[Sign] = field(default_factory=list)
    exits: list[Sign] = field(default_factory=list)
    completed: list[Sign] = field(default_factory=list)
    context: list[Sign] = field(default_factory=list)  # worth knowing, and no reason for anything by itself

    def __post_init__(self) -> None:
        for sign in self.signs:
            if sign.role in {"root", "echo"} and sign.survived:
                self.survived.append(sign)
            elif sign.role == "root":
                self.roots.append(sign)
            elif sign.role == "echo":
                self.echoes.append(sign)
            elif sign.role == "confirmation":
                self.confirmations.append(sign)
            elif sign.role == "exit" and not sign.survived:
                self.exits.append(sign)
            elif sign.role == "completed" and not sign.survived:
                self.completed.append(sign)
            elif sign.role == "context":
                self.context.append(sign)

    @property
    def has_failed_exit(self) -> bool:
        return any(exit_code_of(sign) != 0 for sign in self.exits)

    @property
    def has_progress(self) -> bool:
        return any(scanned.marks for scanned in self.scanned)


def chronological(sign: Sign) -> tuple[float, str, int]:
    """Return a sort key: time (Unix seconds, 0 where unknown), then file and line."""
    return (sign.at if sign.at is not None else 0.0, sign.file, sign.line)

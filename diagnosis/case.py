"""All signs of a failure, sorted by the part that they play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diagnosis.scanned_log import Scanned
from diagnosis.signs.sign import Sign, code_of


@dataclass(slots=True)
class Case:
    """All signs of all logs, sorted out."""

    signs: list[Sign]
    scanned: Sequence[Scanned]
    seen: frozenset[str] = frozenset()
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
        return any(code_of(sign) != 0 for sign in self.exits)

    @property
    def has_progress(self) -> bool:
        return any(scanned.marks for scanned in self.scanned)


def in_order(sign: Sign) -> tuple[float, str, int]:
    return (sign.at if sign.at is not None else 0.0, sign.file, sign.line)

"""One start of all ranks, and the end of an attempt: what its launchers have agreed on, as they keep it in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Member:
    """One launcher. `id` is of its process: one that is started again on the same node is another, and a later one."""

    node: int  # the scheduler's number for it, which stays
    name: str
    id: str


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks, as its leader formed it. Nodes are numbered by place among the members, ranks by node."""

    number: int
    generation: int
    resume: str
    host: str  # of rank 0's node, as the other nodes reach it
    port: int  # free on that node a moment ago: for scripts, which want MASTER_PORT
    members: tuple[Member, ...]  # the leader first
    spent: Mapping[str, Any] = field(default_factory=dict)  # of the budget (outcome.Budget), for whoever leads next
    blamed: tuple[int, ...] = ()  # nodes on which an incarnation's end began, the latest last

    @property
    def leader(self) -> Member:
        return self.members[0]

    def place(self, member: Member) -> int:
        """The number of a member's node in this incarnation, from 0; -1: it stands by."""
        return next((index for index, one in enumerate(self.members) if one.id == member.id), -1)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def told(self) -> dict[str, Any]:
        told = asdict(self)
        if not self.blamed:
            del told["blamed"]  # a launcher of the version before knows no such field, and no spare nodes
        return told

    @classmethod
    def read(cls, found: dict[str, Any]) -> Self:
        members = tuple(Member(**member) for member in found.pop("members"))
        return cls(members=members, blamed=tuple(found.pop("blamed", ())), **found)


@dataclass(frozen=True)
class Ending:
    """No further incarnation: the attempt's last word, as in result.json."""

    result: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.result["exit_code"])


Turn = Incarnation | Ending
"""What follows an incarnation, or begins an attempt. Each turn has a number and is decided exactly once."""

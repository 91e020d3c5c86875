"""Define what the launchers of an attempt agree on, and as JSON: an incarnation (one start of all ranks) or the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Member:
    """One launcher. `id` identifies its process: a launcher restarted on the same node has another, later id."""

    node: int  # the scheduler's number of the node, which never changes
    name: str
    id: str


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks, as its leader formed it. Nodes are numbered by index among the members, ranks by node."""

    number: int
    generation: int
    resume: str
    host: str  # rank 0's node, as the other nodes reach it
    port: int  # free on that node a moment ago: scripts expect MASTER_PORT
    members: tuple[Member, ...]  # the leader first
    spent: Mapping[str, Any] = field(default_factory=dict)  # outcome.RestartBudget.spent, for the next leader
    blamed: tuple[int, ...] = ()  # nodes that made an incarnation end, the latest last

    @property
    def leader(self) -> Member:
        return self.members[0]

    def node_index(self, member: Member) -> int:
        """Return the index of a member's node in this incarnation, or -1 if it stands by."""
        return next((index for index, candidate in enumerate(self.members) if candidate.id == member.id), -1)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        if not self.blamed:
            del content["blamed"]  # launchers of earlier versions know neither this field nor spare nodes
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        members = tuple(Member(**member) for member in content.pop("members"))
        return cls(members=members, blamed=tuple(content.pop("blamed", ())), **content)


@dataclass(frozen=True)
class Ending:
    """The end of the attempt: no further incarnation. `result` is the content of result.json."""

    result: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.result["exit_code"])


Decision = Incarnation | Ending
"""What begins an attempt or follows an incarnation. Decisions are numbered, and each is made exactly once."""

"""How the launchers of an attempt agree, by small files in its members folder: no server, no lock, no shared clock.

Each refreshes `node-<n>.<id>`. What happens in turn is decided exactly once, by whoever makes the file first:
`incarnation-<i>.json` is either an incarnation, with the launchers that take part and the leader first, or the
attempt's end. The leader, the first of the members that lives, decides the next turn; when it dies the next one leads;
and one that was only paused finds the turn decided without it. Whoever sees a failure first says so,
`broken-<i>.json`; then every launcher ends its ranks and leaves `ended-<i>.<id>.json` with how they ended.
Files appear whole and only once (link), so the first one wins.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.attempt.files import read_json, write_json
from training.launch.failures import Failure
from training.launch.incarnation import Ending, Incarnation, Member, Turn
from training.launch.lifelines import Lifelines
from training.launch.plan import Plan
from vigil_report import boot_id

REFRESH_SECONDS = 1.0
LOOK_SECONDS = 0.2  # between two looks at the same file of another's
LIST_SECONDS = 1.0  # between two listings of the folder, once there is an incarnation: every launcher lists it
# A launcher that refreshes nothing for so long is gone, unless a lifeline told sooner; attributes on shared file
# systems lag seconds.
DEAD_SECONDS = 20.0
HELD_SECONDS = 2.0  # between two rounds of ours: longer, and this launcher was held
FILE = re.compile(r"node-(\d{1,9})\.([0-9a-f]{1,40})")


@dataclass
class _Seen:
    """Another launcher's file: what it says, when *we* saw it change, and when we looked last."""

    about: dict[str, Any]
    changed: float
    looked: float
    beats: int = 1  # different ones that we have seen


class Members:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self.me = Member(plan.node_rank, plan.node, _later_id(folder, plan.node_rank))
        self._lifelines = None if plan.is_alone else Lifelines(self.me.id)
        self._refreshed = self._listed = -1e9
        self._awake = time.monotonic()
        self._beat = 0
        self._has_begun = False
        self._newest: dict[int, str] = {}  # node → the id of its latest launcher
        self._seen: dict[str, _Seen] = {}

    # Who lives.

    def refresh(self) -> None:
        """Say that this launcher lives."""
        self._leave_out_held()
        now = time.monotonic()
        if now - self._refreshed < REFRESH_SECONDS or (self._plan.is_alone and self._beat):
            return
        self._refreshed, self._beat = now, self._beat + 1
        about = {
            "name": self._plan.node,
            "host": socket.gethostname(),
            **_here(),
            "pid": os.getpid(),
            "port": self._lifelines.port if self._lifelines else 0,
            "beat": self._beat,
        }
        path = self._folder / f"node-{self.me.node}.{self.me.id}"
        try:
            write_json(path, about)
        except OSError:  # a full disk: what is there already needs no more room
            with suppress(OSError), open(path, "r+b") as file:
                file.write(json.dumps(about).encode())

    @property
    def is_replaced(self) -> bool:
        """Whether a later launcher of this node is there: then this one was thought dead."""
        return self._latest().get(self.me.node, "") > self.me.id

    def is_live(self, member: Member) -> bool:
        if member.id == self.me.id:
            return not self.is_replaced
        if self._latest().get(member.node, "") > member.id:
            return False
        seen = self._look(member.node, member.id)
        if seen is None or self.is_known_dead(member):
            return False
        self._leave_out_held()
        return not self._plan.is_alone and time.monotonic() - seen.changed <= DEAD_SECONDS

    def _leave_out_held(self) -> None:
        """Time in which this launcher was held, by a file system that hung or as its job was suspended, is no silence
        of others: they were held as well, and say so a moment later."""
        now = time.monotonic()
        if (held := now - self._awake - HELD_SECONDS) > 0:
            for seen in self._seen.values():
                seen.changed += held
        self._awake = now

    def is_proven_live(self, member: Member) -> bool:
        """Not only that its file is there: it has beaten since we know it, or holds our lifeline."""
        seen = self._seen.get(member.id)
        held = self._lifelines is not None and self._lifelines.proven_live(member.id)
        return self.is_live(member) and (member.id == self.me.id or held or (seen is not None and seen.beats > 1))

    def forget(self, member: Member) -> None:
        """One that was lost, so that nobody counts on it. Should it live after all, it says so again."""
        with suppress(OSError):
            (self._folder / f"node-{member.node}.{member.id}").unlink()

    def is_known_dead(self, member: Member) -> bool:
        """Whether a lifeline has told so: asking costs nothing."""
        return self._lifelines is not None and self._lifelines.proven_dead(member.id)

    def live(self) -> list[Member]:
        """Every live launcher, lowest node first; those that stand by, too. Reads a file of each: for who leads."""
        found = [Member(node, self._name(node, id_), id_) for node, id_ in sorted(self._latest().items())]
        return [member for member in found if self.is_live(member)]

    def leads(self, last: Incarnation | None) -> bool:
        """Whether it is for this launcher to say what follows `last` (None: to begin).

        The first live member; where none is left the lowest live launcher.
        """
        if last is not None and (first := next((one for one in last.members if self.is_live(one)), None)):
            return first.id == self.me.id
        lower = [Member(node, "", id_) for node, id_ in self._latest().items() if node < self.me.node]
        return not self.is_replaced and not any(self.is_live(member) for member in lower)

    def _latest(self) -> dict[int, str]:
        """Which launcher of each node is the latest, by the names of files alone."""
        now = time.monotonic()
        if now - self._listed >= (LIST_SECONDS if self._has_begun else LOOK_SECONDS):
            self._listed = now
            self._newest = {self.me.node: self.me.id}
            with suppress(OSError):
                for name in os.listdir(self._folder):
                    if match := FILE.fullmatch(name):
                        node = int(match[1])
                        self._newest[node] = max(self._newest.get(node, ""), match[2])
        return self._newest

    def _look(self, node: int, id_: str) -> _Seen | None:
        now, seen = time.monotonic(), self._seen.get(id_)
        if seen is not None and now - seen.looked < LOOK_SECONDS:
            return seen
        path = self._folder / f"node-{node}.{id_}"
        about: Any = read_json(path)
        if about is None:
            if seen is not None and _is_gone(path):
                seen.changed = -1e9
            return seen
        if seen is None or seen.about.get("beat") != about.get("beat"):
            seen = self._seen[id_] = _Seen(about, now, now, seen.beats + 1 if seen else 1)
            if self._lifelines is not None:
                is_here = _here().items() <= about.items()
                self._lifelines.hold(id_, str(about.get("host", "")), int(about.get("port") or 0), is_here=is_here)
        seen.looked = now
        return seen

    def _name(self, node: int, id_: str) -> str:
        if id_ == self.me.id:
            return self.me.name
        seen = self._look(node, id_)
        return str(seen.about.get("name", "")) if seen else ""

    def host(self, members: list[Member]) -> str:
        """Where the first one's node is reached by all: loopback when every one of them runs on this machine."""
        others = {one.id: self._look(one.node, one.id) for one in members if one.id != self.me.id}
        if all(seen is not None and _here().items() <= seen.about.items() for seen in others.values()):
            return "127.0.0.1"
        first = others.get(members[0].id)
        return str(first.about.get("host", "")) if first is not None else socket.gethostname()

    # What was decided.

    def turn(self, number: int) -> Turn | None:
        """What comes at this number, if that is decided."""
        found: Any = read_json(self._folder / f"incarnation-{number}.json")
        if found is None:
            return None
        self._has_begun = True
        return Ending(found["result"]) if "result" in found else Incarnation.read(found)

    def decide(self, number: int, turn: Turn) -> bool:
        """Whether this is what comes at this number: False where somebody was quicker."""
        told: dict[str, Any] = {"result": dict(turn.result)} if isinstance(turn, Ending) else turn.told()
        # Over NFS an answer may be lost, and the link is asked for again: then ours is what stands in the way.
        return self._once(f"incarnation-{number}.json", told) or self.turn(number) == turn

    def store_file(self, number: int) -> Path:
        return self._folder / f"store-{number}.json"

    def break_off(self, number: int, *, reason: str, ranks: list[int] | None = None, **more: object) -> None:
        """All ranks of this incarnation are to be ended. The first to say so is heard."""
        self._once(f"broken-{number}.json", {"reason": reason, "ranks": ranks or [], **more})

    def broken(self, number: int) -> dict[str, Any] | None:
        return read_json(self._folder / f"broken-{number}.json")

    def tell_ended(self, number: int, failures: list[Failure]) -> None:
        rows = [asdict(failure) for failure in failures]
        # Apart, as a leader that was started before an upgrade knows no other fields of a failure.
        lines = [row.pop("last_lines") for row in rows]
        self._once(f"ended-{number}.{self.me.id}.json", {"failures": rows, "last_lines": lines})

    def ended(self, number: int, member: Member) -> list[Failure] | None:
        """How this member's ranks ended: the failures among them; None while it has not told."""
        found: Any = read_json(self._folder / f"ended-{number}.{member.id}.json")
        if not found:
            return None
        rows = found["failures"]
        lines = found.get("last_lines") or [[] for _ in rows]  # a launcher of before an upgrade tells none
        return [Failure(**row, last_lines=some) for row, some in zip(rows, lines, strict=True)]

    def _once(self, name: str, thing: dict[str, object]) -> bool:
        """Make a file appear whole, unless it is there already."""
        staging = self._folder / f".{name}.{self.me.id}"
        try:
            staging.write_text(json.dumps(thing))
            os.link(staging, self._folder / name)
        except FileExistsError:
            return False
        finally:
            staging.unlink(missing_ok=True)
        return True


def _later_id(folder: Path, node: int) -> str:
    """An id above those of all launchers before it on this node, though the clock was set back between them."""
    earlier = [match[2] for path in folder.glob(f"node-{node}.*") if (match := FILE.fullmatch(path.name))]
    began = max(time.time_ns(), *(int(id_[:16], 16) + 1 for id_ in earlier), 0)
    return f"{began:016x}{os.urandom(2).hex()}"


@functools.cache
def _here() -> dict[str, object]:
    """This machine, and this network of it: containers have their own."""
    with suppress(OSError):
        return {"boot_id": boot_id(), "network": os.stat("/proc/self/ns/net").st_ino}
    return {"boot_id": boot_id(), "network": 0}


def _is_gone(path: Path) -> bool:
    """Opened, not looked up: over NFS only that asks the server."""
    try:
        with open(path, "rb"):
            return False
    except FileNotFoundError:
        return True
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on right now."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

"""Let the launchers of an attempt agree by small files in its members folder: no server, lock or shared clock.

Each launcher refreshes `node-<n>.<id>`. Every decision is made exactly once, by whoever creates its file first:
`incarnation-<i>.json` is either an incarnation, listing the launchers that take part with the leader first, or the
attempt's end. The leader, the first live member, makes the next decision; when it dies the next member leads, and a
launcher that was only paused finds the decision made without it. Whoever notices a failure first writes
`broken-<i>.json`; every launcher then ends its ranks and leaves `ended-<i>.<id>.json` with how they ended.
Files appear complete and only once (link), so the first one wins.
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
from training.launch.failures import RankFailure
from training.launch.incarnation import Decision, Ending, Incarnation, Member
from training.launch.lifelines import Lifelines
from training.launch.plan import LaunchPlan
from vigil_report import boot_id

REFRESH_SECONDS = 1.0
REREAD_SECONDS = 0.2  # between two readings of the same file of another launcher
LIST_SECONDS = 1.0  # between two listings of the folder once there is an incarnation, because every launcher lists it
# A launcher that has not refreshed its file for so long is dead, unless a lifeline proved it sooner; attributes on
# shared file systems lag by seconds.
DEAD_SECONDS = 20.0
STALL_SECONDS = 2.0  # a longer gap between two refreshes means that this launcher itself was suspended
FILE = re.compile(r"node-(\d{1,9})\.([0-9a-f]{1,40})")


@dataclass
class _PeerFile:
    """Another launcher's file: its content, when *we* noticed it change, and when we last read it."""

    content: dict[str, Any]
    changed_at: float
    read_at: float
    beats: int = 1  # different beats that we have read


class Members:
    def __init__(self, folder: Path, plan: LaunchPlan) -> None:
        self._folder, self._plan = folder, plan
        self.me = Member(plan.node_rank, plan.node, _later_id(folder, plan.node_rank))
        self._lifelines = None if plan.is_single_node else Lifelines(self.me.id)
        self._refreshed_at = self._listed_at = -1e9
        self._awake_at = time.monotonic()
        self._beat = 0
        self._has_decision = False
        self._newest: dict[int, str] = {}  # node → the id of its latest launcher
        self._peer_files: dict[str, _PeerFile] = {}

    # Which launchers live.

    def refresh(self) -> None:
        """Write this launcher's heartbeat."""
        self._discount_stall()
        now = time.monotonic()
        if now - self._refreshed_at < REFRESH_SECONDS or (self._plan.is_single_node and self._beat):
            return
        self._refreshed_at, self._beat = now, self._beat + 1
        content = {
            "name": self._plan.node,
            "host": socket.gethostname(),
            **_this_machine(),
            "pid": os.getpid(),
            "port": self._lifelines.port if self._lifelines else 0,
            "beat": self._beat,
        }
        path = self._folder / f"node-{self.me.node}.{self.me.id}"
        try:
            write_json(path, content)
        except OSError:  # a full disk: overwriting the existing file needs no more space
            with suppress(OSError), open(path, "r+b") as file:
                file.write(json.dumps(content).encode())

    @property
    def is_replaced(self) -> bool:
        """Whether a later launcher of this node exists, because this one was thought dead."""
        return self._latest().get(self.me.node, "") > self.me.id

    def is_live(self, member: Member) -> bool:
        if member.id == self.me.id:
            return not self.is_replaced
        if self._latest().get(member.node, "") > member.id:
            return False
        peer = self._read_peer(member.node, member.id)
        if peer is None or self.is_proven_dead(member):
            return False
        self._discount_stall()
        return not self._plan.is_single_node and time.monotonic() - peer.changed_at <= DEAD_SECONDS

    def _discount_stall(self) -> None:
        """Do not count time in which this launcher was suspended as the others' silence.

        A hung file system or a suspended job suspends them as well, and they will beat again in a moment.
        """
        now = time.monotonic()
        if (stalled := now - self._awake_at - STALL_SECONDS) > 0:
            for peer in self._peer_files.values():
                peer.changed_at += stalled
        self._awake_at = now

    def is_proven_live(self, member: Member) -> bool:
        """Return whether the launcher is certainly alive; its file alone does not prove it.

        It has beaten since we first read its file, or its lifeline is connected.
        """
        peer = self._peer_files.get(member.id)
        is_connected = self._lifelines is not None and self._lifelines.is_proven_live(member.id)
        return self.is_live(member) and (
            member.id == self.me.id or is_connected or (peer is not None and peer.beats > 1)
        )

    def forget(self, member: Member) -> None:
        """Remove a lost launcher's file, so that nobody counts on it.

        If it lives after all, it writes the file again.
        """
        with suppress(OSError):
            (self._folder / f"node-{member.node}.{member.id}").unlink()

    def is_proven_dead(self, member: Member) -> bool:
        """Return whether its lifeline has proven it dead. Costs no file access."""
        return self._lifelines is not None and self._lifelines.is_proven_dead(member.id)

    def live(self) -> list[Member]:
        """Return every live launcher, including standbys, lowest node first.

        Reads one file each: for the leader only.
        """
        found = [Member(node, self._name(node, id_), id_) for node, id_ in sorted(self._latest().items())]
        return [member for member in found if self.is_live(member)]

    def leads(self, last: Incarnation | None) -> bool:
        """Return whether this launcher decides what follows `last` (None: the first incarnation).

        That is the first live member; where none is left, the live launcher with the lowest node number.
        """
        if last is not None and (first := next((member for member in last.members if self.is_live(member)), None)):
            return first.id == self.me.id
        lower = [Member(node, "", id_) for node, id_ in self._latest().items() if node < self.me.node]
        return not self.is_replaced and not any(self.is_live(member) for member in lower)

    def _latest(self) -> dict[int, str]:
        """Return the id of each node's latest launcher, by file names alone."""
        now = time.monotonic()
        if now - self._listed_at >= (LIST_SECONDS if self._has_decision else REREAD_SECONDS):
            self._listed_at = now
            self._newest = {self.me.node: self.me.id}
            with suppress(OSError):
                for name in os.listdir(self._folder):
                    if match := FILE.fullmatch(name):
                        node = int(match[1])
                        self._newest[node] = max(self._newest.get(node, ""), match[2])
        return self._newest

    def _read_peer(self, node: int, id_: str) -> _PeerFile | None:
        now, peer = time.monotonic(), self._peer_files.get(id_)
        if peer is not None and now - peer.read_at < REREAD_SECONDS:
            return peer
        path = self._folder / f"node-{node}.{id_}"
        content: Any = read_json(path)
        if content is None:
            if peer is not None and _is_missing(path):
                peer.changed_at = -1e9
            return peer
        if peer is None or peer.content.get("beat") != content.get("beat"):
            peer = self._peer_files[id_] = _PeerFile(content, now, now, peer.beats + 1 if peer else 1)
            if self._lifelines is not None:
                is_here = _this_machine().items() <= content.items()
                self._lifelines.watch(id_, str(content.get("host", "")), int(content.get("port") or 0), is_here=is_here)
        peer.read_at = now
        return peer

    def _name(self, node: int, id_: str) -> str:
        if id_ == self.me.id:
            return self.me.name
        peer = self._read_peer(node, id_)
        return str(peer.content.get("name", "")) if peer else ""

    def host(self, members: list[Member]) -> str:
        """Return the address at which all members reach the first one: loopback if all run on this machine."""
        others = {member.id: self._read_peer(member.node, member.id) for member in members if member.id != self.me.id}
        if all(peer is not None and _this_machine().items() <= peer.content.items() for peer in others.values()):
            return "127.0.0.1"
        first = others.get(members[0].id)
        return str(first.content.get("host", "")) if first is not None else socket.gethostname()

    # Decisions.

    def decision(self, number: int) -> Decision | None:
        """Return the decision with this number, or None if it has not been made."""
        found: Any = read_json(self._folder / f"incarnation-{number}.json")
        if found is None:
            return None
        self._has_decision = True
        return Ending(found["result"]) if "result" in found else Incarnation.from_dict(found)

    def decide(self, number: int, decision: Decision) -> bool:
        """Record a decision; return False if another launcher was quicker."""
        content: dict[str, Any] = (
            {"result": dict(decision.result)} if isinstance(decision, Ending) else decision.to_dict()
        )
        # Over NFS a reply may get lost and the link be retried: then our own file is the one that exists already.
        return self._create_once(f"incarnation-{number}.json", content) or self.decision(number) == decision

    def store_file(self, number: int) -> Path:
        return self._folder / f"store-{number}.json"

    def abort(self, number: int, *, reason: str, ranks: list[int] | None = None, **more: object) -> None:
        """Request the end of all ranks of this incarnation. Only the first request counts."""
        self._create_once(f"broken-{number}.json", {"reason": reason, "ranks": ranks or [], **more})

    def abort_request(self, number: int) -> dict[str, Any] | None:
        """Return why this incarnation is to be aborted, or None if nobody requested it."""
        return read_json(self._folder / f"broken-{number}.json")

    def report_ended(self, number: int, failures: list[RankFailure]) -> None:
        rows = [asdict(failure) for failure in failures]
        # Separate from the failures, as a leader started before an upgrade knows no other fields of a failure.
        lines = [row.pop("last_lines") for row in rows]
        self._create_once(f"ended-{number}.{self.me.id}.json", {"failures": rows, "last_lines": lines})

    def reported_failures(self, number: int, member: Member) -> list[RankFailure] | None:
        """Return the failures among this member's ranks; None until it has reported."""
        found: Any = read_json(self._folder / f"ended-{number}.{member.id}.json")
        if not found:
            return None
        rows = found["failures"]
        lines = found.get("last_lines") or [[] for _ in rows]  # launchers of earlier versions write none
        return [RankFailure(**row, last_lines=last_lines) for row, last_lines in zip(rows, lines, strict=True)]

    def _create_once(self, name: str, content: dict[str, object]) -> bool:
        """Create a complete file; return False if it exists already."""
        staging = self._folder / f".{name}.{self.me.id}"
        try:
            staging.write_text(json.dumps(content))
            os.link(staging, self._folder / name)
        except FileExistsError:
            return False
        finally:
            staging.unlink(missing_ok=True)
        return True


def _later_id(folder: Path, node: int) -> str:
    """Return an id greater than those of earlier launchers on this node, even if the clock was set back meanwhile."""
    earlier = [match[2] for path in folder.glob(f"node-{node}.*") if (match := FILE.fullmatch(path.name))]
    began = max(time.time_ns(), *(int(id_[:16], 16) + 1 for id_ in earlier), 0)
    return f"{began:016x}{os.urandom(2).hex()}"


@functools.cache
def _this_machine() -> dict[str, object]:
    """Identify this machine and its network namespace: containers have their own."""
    with suppress(OSError):
        return {"boot_id": boot_id(), "network": os.stat("/proc/self/ns/net").st_ino}
    return {"boot_id": boot_id(), "network": 0}


def _is_missing(path: Path) -> bool:
    """Return whether the file is gone. It is opened, not looked up: over NFS only an open asks the server."""
    try:
        with open(path, "rb"):
            return False
    except FileNotFoundError:
        return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on right now."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

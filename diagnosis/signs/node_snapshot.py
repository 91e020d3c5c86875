"""Read the snapshot of a node that its launcher took right after the failure: what was full, what the kernel said.

It is a file in the job's own folder: every field is checked, kernel lines go through the catalogue like any log, and
lines about another job's processes or GPUs on the same machine are dropped. The job can replace the file, so it
confirms no hardware failure (docs/decisions/0030).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from diagnosis.logs.files import Log
from diagnosis.logs.prefixes import Prefix
from diagnosis.signs.rank_exits import RankExit, failures
from diagnosis.signs.sign import Sign
from gpus.pci import normalised
from vigil_core import untrusted

MAX_BYTES = 512 * 1024  # of the file
KERNEL_LINES = 2_000
SIGKILL = 9
NEARLY_FULL = 0.99  # of a control group's memory limit
FULL = 0.95  # of /dev/shm, which is sampled only now and then
MIN_FREE_MIB = 1
_XID = re.compile(r"\bS?Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f:.]+)\)")
_KILLED_FOR_MEMORY = re.compile(
    r"oom-kill:|Killed process \d|[Mm]emory cgroup out of memory|invoked oom-killer|oom_reaper|out_of_memory|"
    r"^(?:memory|memory\+swap|swap|kmem): usage \d"
)
_KILL = re.compile(r"^oom-kill:.*\btask_memcg=(?P<group>[^,]{1,400}),.*\bpid=(?P<pid>\d{1,10})\b")
_PIDS = re.compile(r"\b(?:pid=|Killed process |reaped process )(\d{1,10})\b")
_NODE = re.compile(r"[A-Za-z][\w-]*(?:\.[\w-]+)*")


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The state of one node after a failure.

    A field is None or empty where it could not be read: `unavailable` says why.
    """

    node: str
    at: float
    group: str = ""
    """The launcher's control group, as the kernel names it."""
    oom_kills: int | None = None
    """Processes of the launcher's control group that were killed for memory since the ranks started."""
    peak_mib: int | None = None
    limit_mib: int | None = None
    has_others: bool = False
    """Whether the group also had other processes than the launcher's."""
    shm_total_mib: int | None = None
    shm_peak_mib: int | None = None
    free_mib: int | None = None
    inodes: int | None = None
    inodes_free: int | None = None
    problem: str = ""
    """The error of writing a small test file, such as ENOSPC."""
    kernel: list[tuple[float, str]] = field(default_factory=list)
    nvidia_smi: str = ""
    buses: frozenset[str] = frozenset()
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def has_kernel_log(self) -> bool:
        return "kernel" not in self.unavailable


def parse_snapshot(document: dict[str, Any], *, node: str) -> NodeSnapshot | None:
    """Return one node's snapshot, or None if the document is not one."""
    at = untrusted.number(document.get("at"), untrusted.MAX_UNIX_TIME)
    if document.get("version") != 1 or at is None:
        return None
    memory, shm, disk = (_table(document.get(name)) for name in ("memory", "shm", "disk"))
    missing = {
        untrusted.line(name, 40): untrusted.line(why, 200) for name, why in _table(document.get("not_seen")).items()
    }
    gpus = document.get("gpus")
    return NodeSnapshot(
        node=node,
        at=at,
        group=untrusted.line(memory.get("path"), 400),
        oom_kills=untrusted.count(memory.get("oom_kills")),
        peak_mib=untrusted.count(memory.get("peak_mib"), 1 << 40),
        limit_mib=untrusted.count(memory.get("limit_mib"), 1 << 40),
        has_others=memory.get("has_others") is True,
        shm_total_mib=untrusted.count(shm.get("total_mib"), 1 << 40),
        shm_peak_mib=untrusted.count(shm.get("most_mib"), 1 << 40),
        free_mib=untrusted.count(disk.get("free_mib"), 1 << 50),
        inodes=untrusted.count(disk.get("inodes"), 1 << 62),
        inodes_free=untrusted.count(disk.get("inodes_free"), 1 << 62),
        problem=untrusted.line(disk.get("problem"), 100),
        kernel=list(_kernel_lines(document.get("kernel"))),
        nvidia_smi=untrusted.plain(text) if isinstance(text := document.get("nvidia_smi"), str) else "",
        buses=frozenset(map(_bus_address, gpus[:64])) - {""} if isinstance(gpus, list) else frozenset(),
        unavailable=dict(list(missing.items())[:10]),
    )


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _kernel_lines(value: object) -> Iterator[tuple[float, str]]:
    for item in value[:KERNEL_LINES] if isinstance(value, list) else ():
        if isinstance(item, list) and len(item) == 2 and isinstance(item[1], str):
            at = untrusted.number(item[0], untrusted.MAX_UNIX_TIME)
            if at is not None:
                yield at, untrusted.line(item[1], 1024)


def _bus_address(value: object) -> str:
    return normalised(untrusted.name(value, 40))


# Signs and logs.


def signs_of_snapshot(snapshot: NodeSnapshot, exits: Sequence[RankExit]) -> list[Sign]:
    """Return signs of processes killed for memory and of what was full. `exits`: of the ranks on this node."""
    return [*_memory_signs(snapshot, exits), *_shm_signs(snapshot), *_disk_signs(snapshot)]


def _memory_signs(snapshot: NodeSnapshot, exits: Sequence[RankExit]) -> Iterator[Sign]:
    """Yield a root for kills that the kernel counted.

    If others share the control group, only if a rank was also killed.
    """
    killed = [end for end in failures(exits) if end.signal == SIGKILL]
    if snapshot.oom_kills:
        what = "a process was" if snapshot.oom_kills == 1 else f"{snapshot.oom_kills:,} processes were"
        role = "root" if killed or not snapshot.has_others else "confirmation"
        yield _sign(
            snapshot,
            f"{what} killed for memory{_describe_peak(snapshot)}",
            "memory.host_oom",
            role,
            killed,
            of="kernel",
        )
    elif (
        snapshot.oom_kills is None
        and snapshot.limit_mib
        and (snapshot.peak_mib or 0) >= NEARLY_FULL * snapshot.limit_mib
    ):
        yield _sign(snapshot, f"memory was full{_describe_peak(snapshot)}", "memory.host_oom", "confirmation", killed)


def _describe_peak(snapshot: NodeSnapshot) -> str:
    if snapshot.peak_mib is None or snapshot.limit_mib is None:
        return ""
    return f": {snapshot.peak_mib / 1024:,.1f} of {snapshot.limit_mib / 1024:,.1f} GiB were used at the most"


def _shm_signs(snapshot: NodeSnapshot) -> Iterator[Sign]:
    total, most = snapshot.shm_total_mib, snapshot.shm_peak_mib
    if total and most is not None and most >= FULL * total:
        yield _sign(snapshot, f"/dev/shm was full: {most:,} of {total:,} MiB", "memory.shm", "confirmation")


def _disk_signs(snapshot: NodeSnapshot) -> Iterator[Sign]:
    if snapshot.problem == "EDQUOT":
        text = "the quota of the run directory's file system was used up"
    elif snapshot.inodes and snapshot.inodes_free == 0:
        text = f"the run directory's file system had none of its {snapshot.inodes:,} inodes left"
    elif snapshot.problem == "ENOSPC" or (snapshot.free_mib is not None and snapshot.free_mib < MIN_FREE_MIB):
        text = "the run directory's file system was full"
    else:
        if snapshot.problem:
            problem = f"nothing could be written to the run directory: {snapshot.problem}"
            yield _sign(snapshot, problem, "storage.io", "confirmation")
        return
    yield _sign(snapshot, text, "storage.full", "confirmation")


def _sign(
    snapshot: NodeSnapshot, text: str, cause: str, role: str, exits: Sequence[RankExit] = (), *, of: str = "snapshot"
) -> Sign:
    first = exits[0] if exits else None
    at = first.at if first and first.at is not None else snapshot.at
    prefix = Prefix(rank=first.rank if first else None, node=snapshot.node, stamp=at, is_dated=True)
    return Sign(
        _source_name(snapshot), 0, text, cause=cause, role=role, prefix=prefix, source_kind=of, is_from_job_folder=True
    )


def _source_name(snapshot: NodeSnapshot) -> str:
    return f"snapshot of {snapshot.node}" if snapshot.node else "node snapshot"


def logs_of_snapshot(snapshot: NodeSnapshot, exits: Sequence[RankExit]) -> Iterator[Log]:
    """Yield the parts that are read like any log: kernel lines, and the output of `nvidia-smi -q`."""
    node = snapshot.node if _NODE.fullmatch(snapshot.node) else "node"
    is_unrelated = _other_jobs_filter(snapshot, exits)
    lines = [
        f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%f}+0000 {node} kernel: {text}\n"
        for at, text in snapshot.kernel
        if not is_unrelated(at, text)
    ]
    for name, text in (("kernel", "".join(lines)), ("nvidia-smi", _smi_report_of_job(snapshot))):
        if text:
            data = text.encode(errors="replace")
            yield Log(f"{_source_name(snapshot)}: {name}", io.BytesIO(data), len(data))


def _smi_report_of_job(snapshot: NodeSnapshot) -> str:
    """Return the part of `nvidia-smi -q` about the job's own GPUs, as far as these are known."""
    if not snapshot.buses:
        return snapshot.nvidia_smi
    head, *sections = re.split(r"(?m)^(?=GPU [0-9A-Fa-f]{4,8}:)", snapshot.nvidia_smi)
    job_sections = [section for section in sections if _bus_address(section.split(None, 2)[1]) in snapshot.buses]
    return "".join((head, *job_sections))


def _other_jobs_filter(snapshot: NodeSnapshot, exits: Sequence[RankExit]) -> Callable[[float, str], bool]:
    """Return a predicate for kernel lines that are about another job.

    These name another job's GPU, or a process that was killed for memory before the ranks started or in a control group
    that the ranks are not in.
    """
    pids = {str(end.pid) for end in exits if end.pid}
    began = min((end.at - end.seconds for end in exits if end.at and end.seconds is not None), default=0.0)
    job_pids = {
        kill["pid"]
        for at, text in snapshot.kernel
        if at >= began and (kill := _KILL.search(text)) and (kill["pid"] in pids or _is_within(kill["group"], snapshot))
    }
    killed_pids = {kill["pid"] for _, text in snapshot.kernel if (kill := _KILL.search(text))}

    def is_unrelated(at: float, text: str) -> bool:
        if (xid := _XID.search(text)) and snapshot.buses:
            return _bus_address(xid["bus"]) not in snapshot.buses
        if not _KILLED_FOR_MEMORY.search(text):
            return False
        if at < began:
            return True
        if named := set(_PIDS.findall(text)):
            return not named & (pids | job_pids) and (snapshot.oom_kills == 0 or named <= killed_pids)
        return bool(killed_pids) and not job_pids

    return is_unrelated


def _is_within(group: str, snapshot: NodeSnapshot) -> bool:
    """Return whether a control group is the launcher's or below it.

    All groups are below the root, so there only that counts.
    """
    return group == snapshot.group or (snapshot.group not in {"", "/"} and group.startswith(f"{snapshot.group}/"))

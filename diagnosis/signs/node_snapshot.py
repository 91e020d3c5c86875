"""A last look at a node, as its launcher took it right after the failure: what was full, and what the kernel said.

A file of the job's own folder: every field is checked, lines of the kernel go through the catalogue like any log, and
what speaks of another job's processes or GPUs on the same machine is left out. The job can replace the file, so it
confirms no failure of hardware (docs/decisions/0030).
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
from diagnosis.signs.rank_exits import End, failures
from diagnosis.signs.sign import Sign
from gpus.pci import normalised
from vigil_core import untrusted

MOST_BYTES = 512 * 1024  # of the file
KERNEL_LINES = 2_000
SIGKILL = 9
NEARLY_FULL = 0.99  # of the memory that a control group may have
FULL = 0.95  # of /dev/shm, as it is seen only now and then
LEAST_FREE_MIB = 1
_XID = re.compile(r"\bS?Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f:.]+)\)")
_KILLED_FOR_MEMORY = re.compile(
    r"oom-kill:|Killed process \d|[Mm]emory cgroup out of memory|invoked oom-killer|oom_reaper|out_of_memory|"
    r"^(?:memory|memory\+swap|swap|kmem): usage \d"
)
_KILL = re.compile(r"^oom-kill:.*\btask_memcg=(?P<group>[^,]{1,400}),.*\bpid=(?P<pid>\d{1,10})\b")
_PIDS = re.compile(r"\b(?:pid=|Killed process |reaped process )(\d{1,10})\b")
_NODE = re.compile(r"[A-Za-z][\w-]*(?:\.[\w-]+)*")


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of one node. None, or nothing, is what could not be seen: `not_seen` says why."""

    node: str
    at: float
    group: str = ""
    """The launcher's control group, as the kernel names it."""
    oom_kills: int | None = None
    """Processes of the launcher's control group that were killed for memory since the ranks were started."""
    peak_mib: int | None = None
    limit_mib: int | None = None
    has_others: bool = False
    """Whether the group held processes of others, too."""
    shm_total_mib: int | None = None
    shm_most_mib: int | None = None
    free_mib: int | None = None
    inodes: int | None = None
    inodes_free: int | None = None
    problem: str = ""
    """What writing a small file met with, as ENOSPC."""
    kernel: list[tuple[float, str]] = field(default_factory=list)
    nvidia_smi: str = ""
    buses: frozenset[str] = frozenset()
    not_seen: dict[str, str] = field(default_factory=dict)

    @property
    def saw_kernel(self) -> bool:
        return "kernel" not in self.not_seen


def parse(told: dict[str, Any], *, node: str) -> Look | None:
    """One node's look, or None where it is none."""
    at = untrusted.number(told.get("at"), untrusted.END_OF_TIME)
    if told.get("version") != 1 or at is None:
        return None
    memory, shm, disk = (_table(told.get(name)) for name in ("memory", "shm", "disk"))
    missing = {untrusted.line(name, 40): untrusted.line(why, 200) for name, why in _table(told.get("not_seen")).items()}
    gpus = told.get("gpus")
    return Look(
        node=node,
        at=at,
        group=untrusted.line(memory.get("path"), 400),
        oom_kills=untrusted.count(memory.get("oom_kills")),
        peak_mib=untrusted.count(memory.get("peak_mib"), 1 << 40),
        limit_mib=untrusted.count(memory.get("limit_mib"), 1 << 40),
        has_others=memory.get("has_others") is True,
        shm_total_mib=untrusted.count(shm.get("total_mib"), 1 << 40),
        shm_most_mib=untrusted.count(shm.get("most_mib"), 1 << 40),
        free_mib=untrusted.count(disk.get("free_mib"), 1 << 50),
        inodes=untrusted.count(disk.get("inodes"), 1 << 62),
        inodes_free=untrusted.count(disk.get("inodes_free"), 1 << 62),
        problem=untrusted.line(disk.get("problem"), 100),
        kernel=list(_lines(told.get("kernel"))),
        nvidia_smi=untrusted.plain(said) if isinstance(said := told.get("nvidia_smi"), str) else "",
        buses=frozenset(map(_bus, gpus[:64])) - {""} if isinstance(gpus, list) else frozenset(),
        not_seen=dict(list(missing.items())[:10]),
    )


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _lines(value: object) -> Iterator[tuple[float, str]]:
    for one in value[:KERNEL_LINES] if isinstance(value, list) else ():
        if isinstance(one, list) and len(one) == 2 and isinstance(one[1], str):
            at = untrusted.number(one[0], untrusted.END_OF_TIME)
            if at is not None:
                yield at, untrusted.line(one[1], 1024)


def _bus(told: object) -> str:
    return normalised(untrusted.name(told, 40))


# What it shows.


def signs_of(look: Look, ends: Sequence[End]) -> list[Sign]:
    """Memory that processes were killed for, and what was full. `ends`: of the ranks on this node."""
    return [*_of_memory(look, ends), *_of_shm(look), *_of_disk(look)]


def _of_memory(look: Look, ends: Sequence[End]) -> Iterator[Sign]:
    """The kernel's count is a root: of a group that others are in only where a rank was killed as well."""
    killed = [end for end in failures(ends) if end.signal == SIGKILL]
    if look.oom_kills:
        what = "a process was" if look.oom_kills == 1 else f"{look.oom_kills:,} processes were"
        role = "root" if killed or not look.has_others else "confirmation"
        yield _sign(look, f"{what} killed for memory{_peak(look)}", "memory.host_oom", role, killed, of="kernel")
    elif look.oom_kills is None and look.limit_mib and (look.peak_mib or 0) >= NEARLY_FULL * look.limit_mib:
        yield _sign(look, f"memory was full{_peak(look)}", "memory.host_oom", "confirmation", killed)


def _peak(look: Look) -> str:
    if look.peak_mib is None or look.limit_mib is None:
        return ""
    return f": {look.peak_mib / 1024:,.1f} of {look.limit_mib / 1024:,.1f} GiB were used at the most"


def _of_shm(look: Look) -> Iterator[Sign]:
    total, most = look.shm_total_mib, look.shm_most_mib
    if total and most is not None and most >= FULL * total:
        yield _sign(look, f"/dev/shm was full: {most:,} of {total:,} MiB", "memory.shm", "confirmation")


def _of_disk(look: Look) -> Iterator[Sign]:
    if look.problem == "EDQUOT":
        text = "the quota of the run directory's file system was used up"
    elif look.inodes and look.inodes_free == 0:
        text = f"the run directory's file system had none of its {look.inodes:,} inodes left"
    elif look.problem == "ENOSPC" or (look.free_mib is not None and look.free_mib < LEAST_FREE_MIB):
        text = "the run directory's file system was full"
    else:
        if look.problem:
            said = f"nothing could be written to the run directory: {look.problem}"
            yield _sign(look, said, "storage.io", "confirmation")
        return
    yield _sign(look, text, "storage.full", "confirmation")


def _sign(look: Look, text: str, cause: str, role: str, ends: Sequence[End] = (), *, of: str = "look") -> Sign:
    first = ends[0] if ends else None
    at = first.at if first and first.at is not None else look.at
    prefix = Prefix(rank=first.rank if first else None, node=look.node, stamp=at, is_dated=True)
    return Sign(_name(look), 0, text, cause, role, prefix, of=of, is_of_folder=True)


def _name(look: Look) -> str:
    return f"last look at {look.node}" if look.node else "last look"


def logs_of(look: Look, ends: Sequence[End]) -> Iterator[Log]:
    """What is read like any log: the kernel's, and what `nvidia-smi -q` said."""
    node = look.node if _NODE.fullmatch(look.node) else "node"
    elsewhere = _is_elsewhere(look, ends)
    lines = [
        f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S.%f}+0000 {node} kernel: {text}\n"
        for at, text in look.kernel
        if not elsewhere(at, text)
    ]
    for name, text in (("kernel", "".join(lines)), ("nvidia-smi", _own_gpus(look))):
        if text:
            data = text.encode(errors="replace")
            yield Log(f"{_name(look)}: {name}", io.BytesIO(data), len(data))


def _own_gpus(look: Look) -> str:
    """What `nvidia-smi -q` said of the job's own GPUs, as far as it is known which those are."""
    if not look.buses:
        return look.nvidia_smi
    head, *sections = re.split(r"(?m)^(?=GPU [0-9A-Fa-f]{4,8}:)", look.nvidia_smi)
    own = [section for section in sections if _bus(section.split(None, 2)[1]) in look.buses]
    return "".join((head, *own))


def _is_elsewhere(look: Look, ends: Sequence[End]) -> Callable[[float, str], bool]:
    """Whether a line of the kernel is not of this job: of another's GPU, or of a process that was killed for memory
    before the ranks started or in a control group that they are not in.
    """
    pids = {str(end.pid) for end in ends if end.pid}
    began = min((end.at - end.seconds for end in ends if end.at and end.seconds is not None), default=0.0)
    own = {
        kill["pid"]
        for at, text in look.kernel
        if at >= began and (kill := _KILL.search(text)) and (kill["pid"] in pids or _is_within(kill["group"], look))
    }
    told = {kill["pid"] for _, text in look.kernel if (kill := _KILL.search(text))}

    def is_elsewhere(at: float, text: str) -> bool:
        if (found := _XID.search(text)) and look.buses:
            return _bus(found["bus"]) not in look.buses
        if not _KILLED_FOR_MEMORY.search(text):
            return False
        if at < began:
            return True
        if named := set(_PIDS.findall(text)):
            return not named & (pids | own) and (look.oom_kills == 0 or named <= told)
        return bool(told) and not own

    return is_elsewhere


def _is_within(group: str, look: Look) -> bool:
    """Whether a control group is the launcher's own or below it; below the root are all, so there it is that alone."""
    return group == look.group or (look.group not in {"", "/"} and group.startswith(f"{look.group}/"))

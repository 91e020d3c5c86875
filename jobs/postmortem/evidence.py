"""What is known of an attempt's end, from every side: each source gives its signs, or says what it could not see.

All of it is hostile but the scheduler's word and ours: logs are opened by the one opener of run directories, bounded,
and may mislead no more than the verdict on their own job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from jobs import allocations
from jobs.disk import folders, logs, rundir
from jobs.models import Attempt, Incident
from jobs.postmortem import offline, reading, sources
from jobs.postmortem.offline import Read
from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.reading import Log, Unreadable
from jobs.postmortem.sign import Sign
from jobs.postmortem.signatures import Catalogue
from nodes.models import Agent, Holding, NodeEvent

MOST_LOGS = 2_048
MOST_FLIGHTS = 1_024
AROUND = timedelta(minutes=10)  # the end, for what machines tell
MOST_EVENTS = 200
SCHEDULER, LAUNCHER = "scheduler", "launcher"

# The scheduler's states that name a cause by themselves.
_STATES = {
    "timeout": "scheduler.time_limit",
    "deadline": "scheduler.time_limit",
    "node_fail": "scheduler.node_fail",
    "boot_fail": "scheduler.node_fail",
    "preempted": "scheduler.preempted",
    "out_of_memory": "memory.host_oom",
}


@dataclass(slots=True)
class Evidence:
    """Everything that was gathered of one incident."""

    read: Read = field(default_factory=Read)
    signs: list[Sign] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    not_seen: list[str] = field(default_factory=list)


Source = Callable[[Incident, Catalogue, Evidence], None]


def gather(incident: Incident, catalogue: Catalogue) -> Evidence:
    """Ask every source; one that fails only says that it could not be seen."""
    found = Evidence()
    for source in SOURCES:
        try:
            source(incident, catalogue, found)
        except OSError as error:
            found.not_seen.append(f"{source.__name__.replace('_', ' ')}: {error.strerror or error}")
    return found


# What ranks, launchers and the batch script wrote.


def logs_of_ranks(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """All logs of the incarnation that failed, of the launchers, and of the batch script."""
    attempt = incident.attempt
    if attempt.job.is_attached:
        found.not_seen.append("its logs: sbatch started it, and its output is where that put it")
        return
    if folders.is_away(attempt):
        found.not_seen.append("its logs: the run directory is not there")
        return
    opened = list(_opened(incident, found))
    if not opened:
        found.not_seen.append("its logs: there are none, or they have been removed")
    found.read = offline.read(opened, catalogue)
    found.seen |= found.read.kinds


def open_logs(incident: Incident) -> Iterator[Log]:
    """The logs alone, one after another; whoever asks closes them."""
    if not incident.attempt.job.is_attached and not folders.is_away(incident.attempt):
        yield from _opened(incident, Evidence())


def _opened(incident: Incident, found: Evidence) -> Iterator[Log]:
    attempt = incident.attempt
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    if root is None:
        return
    there = logs.available(attempt)
    ranks = [log for log in there if log.rank is not None and log.rank >= 0]
    last = incident.incarnation
    if last is None:
        last = max((log.incarnation for log in ranks), default=0)
    names = [f"job/{folder}/logs/{log.incarnation}.{log.rank}.log" for log in ranks if log.incarnation == last]
    names += [
        f"job/{folder}/logs/launcher.{-1 - log.rank}.log" for log in there if log.rank is not None and log.rank < 0
    ]
    if incident.incarnation is None:
        names += [f"job/batch.{attempt.number}.log"]
        flights = [name for name in rundir.names_under(root, f"job/{folder}/flight") if name.startswith(f"{last}.")]
        names += [f"job/{folder}/flight/{name}" for name in flights[:MOST_FLIGHTS]]
    if len(names) > MOST_LOGS + MOST_FLIGHTS:
        found.not_seen.append(f"the logs of {len(names) - MOST_LOGS:,} ranks: only {MOST_LOGS:,} are read")
        names = names[:MOST_LOGS]
    for name in names:
        with suppress(FileNotFoundError):
            try:
                yield reading.of_descriptor(rundir.open_under(root, name), name.rpartition("/")[2])
            except (rundir.Unsafe, Unreadable) as error:
                found.not_seen.append(f"{name.rpartition('/')[2]}: {error}")


# What the scheduler and the launcher said.


def word_of_scheduler(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Its state, exit code and signal, and who asked for the cancel; of steps, whom memory took."""
    attempt = incident.attempt
    if incident.incarnation is not None:
        return
    found.seen.add("scheduler")
    at = attempt.ended_at.timestamp() if attempt.ended_at else None
    prefix = Prefix(stamp=at, is_dated=True, node=attempt.nodes[0] if len(attempt.nodes) == 1 else "")
    text = f"{attempt.state} {attempt.reason}".strip()
    if cause := _STATES.get(attempt.state):
        found.signs.append(Sign(SCHEDULER, 0, text, cause, "root", prefix, at=at, of="slurm"))
    elif attempt.cancel_asked_at is not None or attempt.state == "cancelled":
        found.signs.append(Sign(SCHEDULER, 0, text, "scheduler.cancelled", "root", prefix, at=at, of="slurm"))
    elif attempt.cause == "launch":
        found.signs.append(Sign(SCHEDULER, 0, text, "scheduler.launch", "root", prefix, at=at, of="slurm"))
    elif attempt.cause == "permission":
        found.signs.append(Sign(SCHEDULER, 0, text, "storage.permission", "root", prefix, at=at, of="slurm"))
    elif attempt.exit_code or attempt.signal:
        groups = {"signal": str(attempt.signal)} if attempt.signal else {"code": str(attempt.exit_code)}
        found.signs.append(Sign(SCHEDULER, 0, text, "unknown", "exit", prefix, groups=groups, at=at, of="slurm"))
    for step in attempt.slurm_steps:
        if isinstance(step, dict) and step.get("state") == "out_of_memory" and step.get("name") != "extern":
            said = f"step {step.get('number')} out_of_memory"
            found.signs.append(Sign(SCHEDULER, 0, said, "memory.host_oom", "root", prefix, at=at, of="slurm"))


def word_of_launcher(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Which rank failed first: its exit, and the hang that the watchdog saw."""
    attempt = incident.attempt
    failure = attempt.failure
    if not failure or (incident.incarnation is not None and failure.get("incarnation") != incident.incarnation):
        return
    found.seen.add("launcher")
    rank = failure.get("rank")
    prefix = Prefix(rank=rank if isinstance(rank, int) else None)
    text = f"{failure.get('kind', '')}: {failure.get('error', '')}".strip(": ")
    if failure.get("kind") == "hang":
        found.signs.append(Sign(LAUNCHER, 0, text, "collective.timeout", "echo", prefix, of="trainer"))
    elif failure.get("kind") == "node":
        found.signs.append(Sign(LAUNCHER, 0, text, "scheduler.node_fail", "root", prefix, of="trainer"))
    groups = {"first": "yes"}
    for key, name in (("exit_code", "code"), ("signal", "signal")):
        if isinstance(failure.get(key), int):
            groups[name] = str(failure[key])
    found.signs.append(Sign(LAUNCHER, 0, text, "unknown", "exit", prefix, groups=groups, of="trainer"))


# What its machines told.


def events_of_machines(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Xids, lost GPUs and slow mounts of its nodes, from ten minutes before the end on."""
    attempt = incident.attempt
    since, until = incident.at - AROUND, incident.at + AROUND
    if not attempt.nodes:
        return
    heard = set(Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=since).values_list("node", flat=True))
    if silent := [node for node in attempt.nodes if node not in heard]:
        found.not_seen.append(f"what the machine did on {', '.join(silent[:8])}: no agent told of it")
    else:
        found.seen.add("machines")
    rows = NodeEvent.objects.filter(agent__node__in=attempt.nodes, at__lte=until, last_at__gte=since)
    events = list(rows.select_related("agent", "gpu").order_by("at")[:MOST_EVENTS])
    others = _of_others(attempt, events)
    for event in events:
        if event.pk not in others:
            found.signs += _of_event(event, catalogue)


def _of_others(attempt: Attempt, events: Sequence[NodeEvent]) -> set[int]:
    """The events of GPUs that another job held on the same machine."""
    with_gpu = [event for event in events if event.gpu_id is not None]
    if not with_gpu:
        return set()
    first, last = min(event.at for event in with_gpu), max(event.last_at for event in with_gpu)
    held = Holding.objects.between(first, last + timedelta(seconds=1)).filter(gpu__in={one.gpu_id for one in with_gpu})
    whose: dict[int, list[Holding]] = {}
    for holding in held:
        whose.setdefault(holding.gpu_id, []).append(holding)
    mine = {one.gpu_id for one in allocations.held_by([attempt]).get(attempt.pk, [])}
    found = set()
    for event in with_gpu:
        theirs = [one for one in whose.get(event.gpu_id or 0, ()) if one.scheduler_id != attempt.scheduler_id]
        if event.gpu_id not in mine and (theirs or mine):
            found.add(event.pk)
    return found


def _of_event(event: NodeEvent, catalogue: Catalogue) -> list[Sign]:
    prefix = Prefix(node=event.agent.node, stamp=event.at.timestamp(), is_dated=True)
    name, at = f"kernel of {event.agent.node}", event.at.timestamp()
    if event.kind == "gpu.lost":
        text = f"GPU {event.gpu.index if event.gpu else '?'} was lost"
        return [Sign(name, 0, text, "gpu.off_bus", "root", prefix, at=at, of="kernel")]
    if event.kind == "mount.slow":
        return [
            Sign(
                name, 0, f"{event.text or 'a mount'} was slow", "storage.io", "confirmation", prefix, at=at, of="kernel"
            )
        ]
    if event.kind not in {"xid", "sxid"}:
        return []
    bus = event.gpu.bus if event.gpu else "0000:00:00"
    what = "Xid" if event.kind == "xid" else "SXid"
    line = f"NVRM: {what} (PCI:{bus}): {event.code}, {event.text}"
    return [
        Sign(name, 0, line, entry.cause, entry.role, prefix, entry, count=event.count, at=at, of="kernel")
        for entry in catalogue.on(line.encode())
        if entry.scope == "kernel"
    ]


SOURCES: tuple[Source, ...] = (logs_of_ranks, word_of_scheduler, word_of_launcher, events_of_machines)


def records_of(found: Evidence) -> list[Sign]:
    """The signs that are no lines of a log."""
    return [*found.signs, *found.read.records, *sources.signs_of_flights(found.read.flights)]

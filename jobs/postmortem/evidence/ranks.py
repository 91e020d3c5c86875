"""What ranks left in the attempt's folder: logs, flight recorders, stacks, how far each was, what the guards wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from jobs.disk import folders, logs, rundir
from jobs.models import Event, Incident
from jobs.postmortem import offline, reading, stacks
from jobs.postmortem.evidence.found import Evidence, context, some, written
from jobs.postmortem.prefixes import Prefix
from jobs.postmortem.reading import Log, Unreadable
from jobs.postmortem.sign import Sign
from jobs.postmortem.signatures import Catalogue
from portal import untrusted

MOST_LOGS = 2_048
MOST_FLIGHTS = 1_024
MOST_STACKS = 256
MOST_BEATS = 1_024
STACK_BYTES = 1 << 20
EVENTS = "events"
_NUMERICS = re.compile(r"step-\d{1,15}\.json\Z")
_BEAT_BYTES = 512
# The guards' last word before they end a run.
_GUARDS = {
    "guard.nonfinite": "numerics.nan",
    "guard.divergence": "numerics.divergence",
    "guard.corruption": "numerics.corruption",
}


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
    found.logs = logs.available(attempt)
    last = max((log.incarnation for log in found.logs if log.rank is not None and log.rank >= 0), default=0)
    found.incarnation = last = last if incident.incarnation is None else incident.incarnation
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    if root is None:
        return
    ranks = [log for log in found.logs if log.rank is not None and log.rank >= 0 and log.incarnation == last]
    names = [f"job/{folder}/logs/{log.incarnation}.{log.rank}.log" for log in ranks]
    launchers = [-1 - log.rank for log in found.logs if log.rank is not None and log.rank < 0]
    names += [f"job/{folder}/logs/launcher.{node}.log" for node in launchers]
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


def stacks_of_ranks(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Where ranks were when their launcher gave up on them."""
    folder = written(incident)
    if folder is None:
        return
    names = [name for name in folder.names("stacks") if name.startswith(f"{found.incarnation}.")]
    for name in names[:MOST_STACKS]:
        with suppress(OSError):
            data = rundir.read_under(folder.root, f"job/{folder.name}/stacks/{name}", limit=STACK_BYTES)
            found.read.stacks += stacks.read(f"stacks/{name}", data.decode(errors="replace"))


def steps_of_ranks(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """How far each rank was by its last heartbeat: who is behind the others is who they waited for."""
    folder = written(incident)
    if folder is None:
        return
    beats: dict[int, tuple[int, str]] = {}
    for name in folder.names("heartbeat"):
        incarnation, _, rank = name.partition(".")
        if incarnation != str(found.incarnation) or not rank.isdecimal() or len(beats) >= MOST_BEATS:
            continue
        told = folder.table(f"heartbeat/{name}", limit=_BEAT_BYTES)
        if told and (step := untrusted.count(told.get("step"))) is not None:
            beats[int(rank[:7])] = (step, untrusted.name(told.get("phase"), 32))
    if len(beats) < 2:
        return
    least, most = min(step for step, _ in beats.values()), max(step for step, _ in beats.values())
    if least == most:
        found.signs.append(context("heartbeats", f"all {len(beats):,} ranks were at step {most:,}"))
        return
    behind = sorted(rank for rank, (step, _) in beats.items() if step == least)
    if len(behind) * 2 > len(beats):
        return
    phase = beats[behind[0]][1]
    who = f"rank {behind[0]} was" if len(behind) == 1 else f"ranks {some(map(str, behind))} were"
    text = f"{who} at step {least:,}{f' ({phase})' if phase else ''}, others up to {most:,}"
    prefix = Prefix(rank=behind[0], node=found.node_of(behind[0]))
    found.signs.append(Sign("heartbeats", 0, text, "collective.timeout", "confirmation", prefix, of="trainer"))


def guards_of_trainer(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """What the trainer's guards found before they ended the run, and what they wrote of the step."""
    events = Event.objects.filter(attempt=incident.attempt, kind__in=_GUARDS, incarnation=found.incarnation)
    for event in events.order_by("-id")[:4]:
        found.signs.append(_of_guard(event, found))
    if (folder := written(incident)) is None:
        return
    names = sorted(
        (name for name in folder.names("numerics") if _NUMERICS.match(name)), key=lambda one: (len(one), one)
    )
    for name in names[-1:]:
        if (told := folder.table(f"numerics/{name}")) is not None:
            found.signs.append(_of_numerics(f"numerics/{name}", told))


def _of_guard(event: Event, found: Evidence) -> Sign:
    data = event.data
    step, what = untrusted.count(data.get("step")), untrusted.line(data.get("what"), 300)
    where, check = untrusted.line(data.get("where"), 200), untrusted.name(data.get("check"), 32)
    ranks = data.get("ranks") if isinstance(data.get("ranks"), list) else []
    blamed = data.get("rank") if event.kind == "guard.nonfinite" else ranks[0] if len(ranks) == 1 else None
    rank = untrusted.count(blamed, 1_000_000)
    text = f"{event.kind}{f' at step {step:,}' if step is not None else ''}: {what}"
    text += f", first in {where}" if where else f", by the check {check}" if check else ""
    prefix = Prefix(rank=rank, node=found.node_of(rank), stamp=event.time.timestamp(), is_dated=True)
    return Sign(EVENTS, 0, text, _GUARDS[event.kind], "root", prefix, of="trainer")


def _of_numerics(name: str, told: dict[str, Any]) -> Sign:
    """The first module that was not finite, and on how many ranks the loss was not."""
    ranks = (
        [one for one in told.get("ranks", ()) if isinstance(one, dict)] if isinstance(told.get("ranks"), list) else []
    )
    first = next((one for one in ranks if one.get("output") or one.get("gradient")), {})
    where = untrusted.line(first.get("output"), 200)
    where = f"the output of {where}" if where else untrusted.line(first.get("gradient"), 200)
    losses = told.get("losses")
    losses = losses if isinstance(losses, dict) else {}
    odd = sum(isinstance(loss, str) for loss in losses.values())
    step = untrusted.count(told.get("step"))
    text = f"step {step:,}" if step is not None else "a step"
    text += f" done again: {odd:,} of {len(losses):,} ranks had a loss that is not finite"
    text += f", first in {where}" if where else ""
    rank = untrusted.count(first.get("rank"), 1_000_000)
    return Sign(name, 0, text, "numerics.nan", "confirmation", Prefix(rank=rank), of="trainer")

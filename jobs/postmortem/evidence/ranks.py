"""Collect what ranks left in the attempt's folder: logs, flight recorders, stacks, heartbeats, reports of guards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from diagnosis import offline
from diagnosis.logs import files
from diagnosis.logs.files import Log
from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs import stacks
from diagnosis.signs.sign import Sign
from jobs.disk import folders, logs, rundir
from jobs.models import Event, Incident
from jobs.postmortem.evidence.collected import IncidentEvidence, context, first_few, job_folder
from vigil_core import untrusted

MAX_LOGS = 2_048
MAX_FLIGHTS = 1_024
MAX_STACKS = 256
MAX_BEATS = 1_024
STACK_BYTES = 1 << 18
EVENTS = "events"
_NUMERICS = re.compile(r"step-\d{1,15}\.json\Z")
_BEAT_BYTES = 512
# The guards' last word before they end a run.
_GUARDS = {
    "guard.nonfinite": "numerics.nan",
    "guard.divergence": "numerics.divergence",
    "guard.corruption": "numerics.corruption",
}


def collect_rank_logs(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Read all logs of the incarnation that failed, of the launchers, and of the batch script."""
    attempt = incident.attempt
    if attempt.job.is_attached:
        found.unavailable.append("its logs: it was started by sbatch, which decides where its output is")
        return
    if folders.is_unreachable(attempt):
        found.unavailable.append("its logs: the run directory is unavailable")
        return
    named = _log_sizes(incident, found)
    if not named:
        found.unavailable.append("its logs: there are none, or they were removed")
    found.read = offline.read_logs(_open_each(incident, named, found), catalogue, size=sum(named.values()), of_job=True)
    found.available |= found.read.kinds
    found.unavailable += found.read.unavailable


def open_logs(incident: Incident) -> Iterator[Log]:
    """Yield the logs one after another; the caller closes each."""
    if not incident.attempt.job.is_attached and not folders.is_unreachable(incident.attempt):
        found = IncidentEvidence()
        yield from _open_each(incident, _log_sizes(incident, found), found)


def _log_sizes(incident: Incident, found: IncidentEvidence) -> dict[str, int]:
    """Return the paths to read below the run directory, with their sizes in bytes as far as known."""
    attempt = incident.attempt
    found.logs = logs.available(attempt)
    last = max((log.incarnation for log in found.logs if log.rank is not None and log.rank >= 0), default=0)
    found.incarnation = last = last if incident.incarnation is None else incident.incarnation
    root, folder = folders.root_of(attempt), folders.find_folder(attempt)
    if root is None:
        return {}
    ranks = [log for log in found.logs if log.rank is not None and log.rank >= 0 and log.incarnation == last]
    if len(ranks) > MAX_LOGS:
        found.unavailable.append(f"the logs of {len(ranks) - MAX_LOGS:,} ranks: only {MAX_LOGS:,} are read")
    named = {f"job/{folder}/logs/{log.incarnation}.{log.rank}.log": log.bytes for log in ranks[:MAX_LOGS]}
    launchers = [log for log in found.logs if log.rank is not None and -max(1, len(attempt.nodes)) <= log.rank < 0]
    named |= {f"job/{folder}/logs/launcher.{-1 - (log.rank or 0)}.log": log.bytes for log in launchers}
    if incident.incarnation is None:
        named |= {logs.batch_log(attempt): log.bytes for log in found.logs if log.rank is None}
        flights = [name for name in rundir.names_under(root, f"job/{folder}/flight") if name.startswith(f"{last}.")]
        named |= {f"job/{folder}/flight/{name}": 0 for name in flights[:MAX_FLIGHTS]}
    return named


def _open_each(incident: Incident, named: Iterable[str], found: IncidentEvidence) -> Iterator[Log]:
    """Open each log only when it is requested: there may be more logs than a process may have open."""
    root = folders.root_of(incident.attempt)
    if root is None:
        return
    for path in named:
        name = path.rpartition("/")[2]
        try:
            yield files.log_from_descriptor(rundir.open_under(root, path), name)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.unavailable.append(f"{name}: {error.strerror or error}")


def collect_rank_stacks(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add the stacks of ranks that their launcher gave up on."""
    folder = job_folder(incident)
    if folder is None:
        return
    names = [name for name in folder.names("stacks") if name.startswith(f"{found.incarnation}.")]
    for name in names[:MAX_STACKS]:
        with suppress(OSError):
            data = rundir.read_under(folder.root, f"job/{folder.name}/stacks/{name}", limit=STACK_BYTES)
            if (stack := stacks.parse_faulthandler(f"stacks/{name}", data.decode(errors="replace"))) is not None:
                found.read.stacks.append(stack)


def collect_rank_steps(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add how far each rank was by its last heartbeat: the ranks behind are those that the others waited for."""
    folder = job_folder(incident)
    if folder is None:
        return
    beats: dict[int, tuple[int, str]] = {}
    for name in folder.names("heartbeat"):
        incarnation, _, rank = name.partition(".")
        if incarnation != str(found.incarnation) or not rank.isdecimal() or len(beats) >= MAX_BEATS:
            continue
        heartbeat = folder.table(f"heartbeat/{name}", limit=_BEAT_BYTES)
        if heartbeat and (step := untrusted.count(heartbeat.get("step"))) is not None:
            beats[int(rank[:7])] = (step, untrusted.name(heartbeat.get("phase"), 32))
    if len(beats) < 2:
        return
    unit = incident.attempt.job.job_kind.unit
    least, most = min(step for step, _ in beats.values()), max(step for step, _ in beats.values())
    if least == most:
        found.signs.append(context("heartbeats", f"all {len(beats):,} ranks were at {unit} {most:,}"))
        return
    behind = sorted(rank for rank, (step, _) in beats.items() if step == least)
    if len(behind) * 2 > len(beats):
        return
    phase = beats[behind[0]][1]
    who = f"rank {behind[0]} was" if len(behind) == 1 else f"ranks {first_few(map(str, behind))} were"
    text = f"{who} at {unit} {least:,}{f' ({phase})' if phase else ''}, others up to {most:,}"
    prefix = Prefix(rank=behind[0], node=found.node_of(behind[0]))
    found.signs.append(
        Sign(
            "heartbeats", 0, text, cause="collective.timeout", role="confirmation", prefix=prefix, source_kind="trainer"
        )
    )


def collect_guard_events(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add what the trainer's guards found before they ended the run, and what they recorded about the step."""
    events = Event.objects.filter(attempt=incident.attempt, kind__in=_GUARDS, incarnation=found.incarnation)
    for event in events.order_by("-id")[:4]:
        found.signs.append(_sign_of_guard(event, found))
    if (folder := job_folder(incident)) is None:
        return
    names = sorted(
        (name for name in folder.names("numerics") if _NUMERICS.match(name)), key=lambda name: (len(name), name)
    )
    for name in names[-1:]:
        if (report := folder.table(f"numerics/{name}")) is not None:
            found.signs.append(_sign_of_numerics(f"numerics/{name}", report))


def _sign_of_guard(event: Event, found: IncidentEvidence) -> Sign:
    data = event.data
    step, what = untrusted.count(data.get("step")), untrusted.line(data.get("what"), 300)
    where, check = untrusted.line(data.get("where"), 200), untrusted.name(data.get("check"), 32)
    ranks = data.get("ranks") if isinstance(data.get("ranks"), list) else []
    blamed = data.get("rank") if event.kind == "guard.nonfinite" else ranks[0] if len(ranks) == 1 else None
    rank = untrusted.count(blamed, 1_000_000)
    text = f"{event.kind}{f' at step {step:,}' if step is not None else ''}: {what}"
    text += f", first in {where}" if where else f", by the check {check}" if check else ""
    prefix = Prefix(rank=rank, node=found.node_of(rank), stamp=event.time.timestamp(), is_dated=True)
    return Sign(EVENTS, 0, text, cause=_GUARDS[event.kind], role="root", prefix=prefix, source_kind="trainer")


def _sign_of_numerics(name: str, report: dict[str, Any]) -> Sign:
    """Return the first module that was not finite, and on how many ranks the loss was not finite."""
    ranks = (
        [rank for rank in report.get("ranks", ()) if isinstance(rank, dict)]
        if isinstance(report.get("ranks"), list)
        else []
    )
    first = next((rank for rank in ranks if rank.get("output") or rank.get("gradient")), {})
    where = untrusted.line(first.get("output"), 200)
    where = f"the output of {where}" if where else untrusted.line(first.get("gradient"), 200)
    losses = report.get("losses")
    losses = losses if isinstance(losses, dict) else {}
    odd = sum(isinstance(loss, str) for loss in losses.values())
    step = untrusted.count(report.get("step"))
    text = f"step {step:,}" if step is not None else "a step"
    text += f", when repeated: {odd:,} of {len(losses):,} ranks had a loss that is not finite"
    text += f", first in {where}" if where else ""
    rank = untrusted.count(first.get("rank"), 1_000_000)
    return Sign(
        name, 0, text, cause="numerics.nan", role="confirmation", prefix=Prefix(rank=rank), source_kind="trainer"
    )

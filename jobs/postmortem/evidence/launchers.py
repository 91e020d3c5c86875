"""Collect what launchers recorded: how every rank ended, which failed first, and a last snapshot of their nodes."""

from __future__ import annotations

import itertools
from typing import Any

from diagnosis import offline
from diagnosis.diagnose import NO_KILLS
from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs import node_snapshot, rank_exits
from diagnosis.signs.node_snapshot import NodeSnapshot
from diagnosis.signs.rank_exits import LAUNCHER
from diagnosis.signs.sign import Sign
from jobs import restart_incidents
from jobs.models import Event, Incident
from jobs.postmortem.evidence.collected import IncidentEvidence, context, first_few, job_folder
from vigil_core import untrusted

EXITS, SNAPSHOTS = "ends", "looks"
EXITS_BYTES = 4 << 20
MAX_SNAPSHOTS = 256
MAX_KERNEL_BYTES = 16 << 20  # of all nodes


def collect_rank_exits(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add exit code, signal and time of every rank, recorded by the launcher of its node."""
    folder = job_folder(incident)
    if folder is None:
        return
    for node, document in folder.of_nodes(EXITS, found, limit=EXITS_BYTES):
        found.exits += rank_exits.parse_exits(document, node=node)[: rank_exits.MAX_RANKS - len(found.exits)]
    if found.exits:
        found.available.add("ends")
        found.signs += rank_exits.signs_of_exits(found.exits, named=_blamed_rank(incident, found))


def collect_launcher_report(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add the rank that failed first: a hang, a lost node, or its exit if no file has it."""
    failure = failure_of(incident)
    if not failure:
        return
    found.available.add("launcher")
    rank = failure.get("rank")
    prefix = Prefix(rank=rank, node=found.node_of(rank))
    text = f"{failure.get('kind', '')}: {failure.get('error', '')}".strip(": ")
    if failure.get("kind") == "hang":
        found.signs.append(
            Sign(LAUNCHER, 0, text, cause="collective.timeout", role="echo", prefix=prefix, source_kind="trainer")
        )
    elif failure.get("kind") == "node":
        found.signs.append(
            Sign(LAUNCHER, 0, text, cause="scheduler.node_fail", role="root", prefix=prefix, source_kind="trainer")
        )
    if lines := failure.get("last_lines"):
        last_lines = f"the log of rank {rank} names no error and ends with: {' / '.join(lines)}"
        found.signs.append(context(LAUNCHER, last_lines, node=prefix.node))
    if failure.get("kind") == "hang" or any(end.is_failure for end in found.exits):
        return  # a hung rank was killed by its launcher
    groups = {"first": "yes"}
    for key, name in (("exit_code", "code"), ("signal", "signal")):
        if failure.get(key) is not None:
            groups[name] = str(failure[key])
    found.signs.append(
        Sign(LAUNCHER, 0, text, cause="unknown", role="exit", prefix=prefix, groups=groups, source_kind="trainer")
    )


def failure_of(incident: Incident) -> dict[str, Any]:
    """Return the first failure as the launcher reported it at the end of the attempt or the incarnation."""
    attempt = incident.attempt
    if incident.incarnation is None:
        return dict(attempt.failure)
    events = Event.objects.filter(attempt=attempt, kind=restart_incidents.ENDED, data__incarnation=incident.incarnation)
    data = events.values_list("data", flat=True).first()
    if not data:
        return {}
    return {
        "kind": untrusted.name(data.get("failure"), 32),
        "rank": untrusted.count(data.get("rank"), 1_000_000),
        "exit_code": untrusted.count(data.get("exit_code"), 256),
        "signal": untrusted.count(data.get("signal"), 65),
        "error": untrusted.plain(str(data.get("error", ""))[:2_000]),
    }


def _blamed_rank(incident: Incident, found: IncidentEvidence) -> int | None:
    """Return the rank that the launcher blames, unless that rank only lost its peers."""
    failure = failure_of(incident)
    return failure.get("rank") if failure.get("kind") != "lost_peer" else None


def collect_node_snapshots(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add what was full or killed for memory on each node, and what its kernel and its driver logged."""
    folder, attempt = job_folder(incident), incident.attempt
    if folder is None:
        return
    documents = itertools.islice(folder.of_nodes(SNAPSHOTS, found, limit=node_snapshot.MAX_BYTES), MAX_SNAPSHOTS)
    parsed = (node_snapshot.parse_snapshot(document, node=node) for node, document in documents)
    snapshots = [snapshot for snapshot in parsed if snapshot is not None]
    nodes_with_snapshot = {snapshot.node for snapshot in snapshots}
    if missing := [node for node in attempt.nodes if node not in nodes_with_snapshot and (snapshots or found.exits)]:
        found.unavailable.append(f"memory and disk of {first_few(missing)}: no snapshot was taken")
    if not snapshots:
        return
    found.available.add("snapshots")
    for snapshot in snapshots:
        found.signs += node_snapshot.signs_of_snapshot(snapshot, _exits_on(snapshot, found))
    _read_logs(snapshots, catalogue, found)
    unreadable: dict[str, list[str]] = {}
    for snapshot in snapshots:
        for what, why in snapshot.unavailable.items():
            unreadable.setdefault(f"{what} ({why})", []).append(snapshot.node or "a node")
    found.unavailable += [f"{what} on {first_few(nodes)}" for what, nodes in unreadable.items()]
    if len(snapshots) >= len(attempt.nodes) and all(snapshot.has_kernel_log for snapshot in snapshots):
        found.available.add("kernel")
    if len(snapshots) >= len(attempt.nodes) and all(snapshot.oom_kills == 0 for snapshot in snapshots):
        found.available.add(NO_KILLS)


def _exits_on(snapshot: NodeSnapshot, found: IncidentEvidence) -> list[rank_exits.RankExit]:
    return [end for end in found.exits if end.node == snapshot.node]


def _read_logs(snapshots: list[NodeSnapshot], catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Read the lines of the kernel and of nvidia-smi with the catalogue."""
    logs, size = [], 0
    for snapshot in snapshots:
        for log in node_snapshot.logs_of_snapshot(snapshot, _exits_on(snapshot, found)):
            size += log.size or 0
            if size <= MAX_KERNEL_BYTES:
                logs.append(log)
    for scanned in offline.read_logs(logs, catalogue).scanned:
        scanned.is_from_job_folder = True
        found.read.scanned.append(scanned)

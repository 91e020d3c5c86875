"""What launchers say: how every rank ended, which was first, and their last look at their nodes."""

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
from jobs import restarts
from jobs.models import Event, Incident
from jobs.postmortem.evidence.collected import Evidence, context, some, written
from vigil_core import untrusted

ENDS, LOOKS = "ends", "looks"
ENDS_BYTES = 4 << 20
MOST_LOOKS = 256
MOST_KERNEL_BYTES = 16 << 20  # of all nodes


def ends_of_ranks(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Exit code, signal and time of every rank, by the launcher of its node."""
    folder = written(incident)
    if folder is None:
        return
    for node, told in folder.of_nodes(ENDS, found, limit=ENDS_BYTES):
        found.ends += rank_exits.parse_exits(told, node=node)[: rank_exits.MOST_RANKS - len(found.ends)]
    if found.ends:
        found.seen.add("ends")
        found.signs += rank_exits.signs_of_exits(found.ends, named=_named(incident, found))


def word_of_launcher(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Which rank failed first: the hang that the watchdog saw, the node that was lost; its exit, if no file has it."""
    failure = failure_of(incident)
    if not failure:
        return
    found.seen.add("launcher")
    rank = failure.get("rank")
    prefix = Prefix(rank=rank, node=found.node_of(rank))
    text = f"{failure.get('kind', '')}: {failure.get('error', '')}".strip(": ")
    if failure.get("kind") == "hang":
        found.signs.append(Sign(LAUNCHER, 0, text, "collective.timeout", "echo", prefix, source_kind="trainer"))
    elif failure.get("kind") == "node":
        found.signs.append(Sign(LAUNCHER, 0, text, "scheduler.node_fail", "root", prefix, source_kind="trainer"))
    if lines := failure.get("last_lines"):
        said = f"the log of rank {rank} names no error and ends with: {' / '.join(lines)}"
        found.signs.append(context(LAUNCHER, said, node=prefix.node))
    if failure.get("kind") == "hang" or any(end.is_failure for end in found.ends):
        return  # who hung was killed by its launcher
    groups = {"first": "yes"}
    for key, name in (("exit_code", "code"), ("signal", "signal")):
        if failure.get(key) is not None:
            groups[name] = str(failure[key])
    found.signs.append(Sign(LAUNCHER, 0, text, "unknown", "exit", prefix, groups=groups, source_kind="trainer"))


def failure_of(incident: Incident) -> dict[str, Any]:
    """The first failure, as the launcher told of it at the end of the attempt, or of the incarnation."""
    attempt = incident.attempt
    if incident.incarnation is None:
        return dict(attempt.failure)
    told = Event.objects.filter(attempt=attempt, kind=restarts.ENDED, data__incarnation=incident.incarnation)
    data = told.values_list("data", flat=True).first()
    if not data:
        return {}
    return {
        "kind": untrusted.name(data.get("failure"), 32),
        "rank": untrusted.count(data.get("rank"), 1_000_000),
        "exit_code": untrusted.count(data.get("exit_code"), 256),
        "signal": untrusted.count(data.get("signal"), 65),
        "error": untrusted.plain(str(data.get("error", ""))[:2_000]),
    }


def _named(incident: Incident, found: Evidence) -> int | None:
    """The rank that the launcher blames, unless that is one that only lost its peers."""
    failure = failure_of(incident)
    return failure.get("rank") if failure.get("kind") != "lost_peer" else None


def looks_at_nodes(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """What was full or killed for memory on each node, and what its kernel and its driver said."""
    folder, attempt = written(incident), incident.attempt
    if folder is None:
        return
    told = itertools.islice(folder.of_nodes(LOOKS, found, limit=node_snapshot.MOST_BYTES), MOST_LOOKS)
    parsed = (node_snapshot.parse_snapshot(one, node=node) for node, one in told)
    looks = [look for look in parsed if look is not None]
    looked_at = {look.node for look in looks}
    if missing := [node for node in attempt.nodes if node not in looked_at and (looks or found.ends)]:
        found.not_seen.append(f"what was full on {some(missing)}: there was no last look")
    if not looks:
        return
    found.seen.add("looks")
    for look in looks:
        found.signs += node_snapshot.signs_of_snapshot(look, _on(look, found))
    _read_logs(looks, catalogue, found)
    unseen: dict[str, list[str]] = {}
    for look in looks:
        for what, why in look.unavailable.items():
            unseen.setdefault(f"{what} ({why})", []).append(look.node or "a node")
    found.not_seen += [f"of {some(nodes)}: {what}" for what, nodes in unseen.items()]
    if len(looks) >= len(attempt.nodes) and all(look.saw_kernel for look in looks):
        found.seen.add("kernel")
    if len(looks) >= len(attempt.nodes) and all(look.oom_kills == 0 for look in looks):
        found.seen.add(NO_KILLS)


def _on(look: NodeSnapshot, found: Evidence) -> list[rank_exits.RankExit]:
    return [end for end in found.ends if end.node == look.node]


def _read_logs(looks: list[NodeSnapshot], catalogue: Catalogue, found: Evidence) -> None:
    """The kernel's lines and nvidia-smi's, through the catalogue."""
    logs, size = [], 0
    for look in looks:
        for log in node_snapshot.logs_of_snapshot(look, _on(look, found)):
            size += log.size or 0
            if size <= MOST_KERNEL_BYTES:
                logs.append(log)
    for scanned in offline.read_logs(logs, catalogue).scanned:
        scanned.is_from_job_folder = True
        found.read.scanned.append(scanned)

"""Take in agents' posts exactly once, however often they are sent (docs/reference/protocols.md §11)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import numpy as np
from django.db import connection, transaction
from django.utils import timezone

from nodes.models import Agent, AgentStream, Frame
from nodes.telemetry import demo_data, events, frames, live, machines, planting, warn, wire
from nodes.telemetry.fields import NEWEST, PLACE, WINDOW_S
from nodes.telemetry.use import BUSY_PERCENT
from nodes.telemetry.wire import MISSING, MachineEvent, SampleBatch, TelemetryPost
from portal import bulk, process_counters
from portal.http.posts import Malformed, inflate
from portal.http.problems import Problem
from portal.models import digest
from portal.wakes import HEALTH
from vigil_core import untrusted

MAX_STREAMS = 1_000  # that are stored of a machine: each lost buffer begins another
CLOCK_S = 60.0  # beyond this offset the times of an agent's samples, facts and counters are corrected
EVENT_CLOCK_S = 1.0  # the same for events, which count only after a person cleared the finding, by the portal's clock
EARLIEST = 10**9  # in Unix seconds
AHEAD_S = 3_600.0
COMPARED_WITH_SAMPLES = frozenset({"facts", "gpu.counters"})
JUDGED_AT_ONCE = frozenset({"xid", "sxid", "link.down"})
"""Kinds of events that health rules count: one of them may be enough to drain the node."""
# Limits of a part of a post, which one transaction stores while all other writers wait.
PART_EVENTS, PART_VALUES = 200, 130_000

_ADVANCE = (
    "UPDATE nodes_agentstream SET next_seq = %s, given_up = given_up + %s"
    " WHERE id = %s AND next_seq >= %s AND next_seq <= %s"
)


def receive(node: str, authorization: str, encoding: str, chunks: Iterable[bytes]) -> dict[str, Any]:
    """Handle POST /nodes/<name>/telemetry; return the answer: where to continue, and a fault to plant if there is one.

    Raises Problem.
    """
    agent = admit(node, authorization)
    demo_data.end(agent.pk, timezone.now())
    try:
        following = take(agent.pk, wire.parse(inflate(chunks, encoding)))
    except Malformed as error:
        raise error.problem("malformed-telemetry") from None
    wanted = planting.wanted_of(agent)
    return {"next": following} | ({"plant": wanted} if wanted else {})


def admit(node: str, authorization: str) -> Agent:
    """Return the agent if the token belongs to this machine; raise Problem otherwise."""
    scheme, _, secret = authorization.partition(" ")
    agent = Agent.objects.filter(node=node).exclude(token_digest="").only("pk", "token_digest", "plant").first()
    if agent is None or scheme.lower() != "bearer" or agent.token_digest != digest(secret):
        raise _not_its_token(node)
    return agent


def take(agent_id: int, post: TelemetryPost, *, now: float | None = None, seconds: float = bulk.POST_S) -> int:
    """Store what is new in a post, once, in a few short transactions: cursor, frames, events and the machine's state.

    A post that does not continue at the stream's cursor changes nothing. Return the cursor, also if `seconds` were not
    enough for the whole post: the agent continues from there.
    """
    until = time.monotonic() + seconds
    cursor, began = 0, None
    for part in _parts(post):
        if began is not None:
            bulk.give_way(began)
        began = time.monotonic()
        cursor = _take_part(agent_id, part, time.time() if now is None else now)
        if cursor != part.first + len(part.batches) or time.monotonic() > until:
            break
    return cursor


def _parts(post: TelemetryPost) -> Iterator[TelemetryPost]:
    """Yield the post in parts that are stored in one transaction each; other writers get their turn in between."""
    _keep_last_facts(post)
    first, events, values = 0, 0, 0
    for place, batch in enumerate(post.batches):
        events, values = events + len(batch.events), values + batch.values.size
        if place > first and (events > PART_EVENTS or values > PART_VALUES):
            yield _part(post, first, place)
            first, events, values = place, len(batch.events), batch.values.size
    yield _part(post, first, len(post.batches))


def _part(post: TelemetryPost, first: int, stop: int) -> TelemetryPost:
    given_up = 0 if first else post.given_up
    return msgspec.structs.replace(post, first=post.first + first, given_up=given_up, batches=post.batches[first:stop])


def _keep_last_facts(post: TelemetryPost) -> None:
    """Keep only the last `facts` of a post: each describes the whole machine."""
    facts_events = [(batch, event) for batch in post.batches for event in batch.events if event.kind == "facts"]
    for batch, event in facts_events[:-1]:
        batch.events = [other for other in batch.events if other is not event]


def _take_part(agent_id: int, post: TelemetryPost, now: float) -> int:
    with transaction.atomic():
        agent = Agent.objects.select_for_update(no_key=True).defer("facts", "processes").get(pk=agent_id)
        stream = _stream(agent, post)
        cursor, end = stream.next_seq, post.first + len(post.batches)
        intake = _PostIntake(agent, post, now)
        if post.first - post.given_up <= cursor <= post.first and end > cursor:
            with connection.cursor() as database:
                lost = post.first - cursor
                database.execute(_ADVANCE, [end, lost, stream.pk, post.first - post.given_up, post.first])
                if database.rowcount != 1:
                    raise RuntimeError(f"{agent}: a cursor moved under the lock")
            intake.store()
            cursor = end
            values = sum(int(np.count_nonzero(batch.values != MISSING)) for batch in post.batches)
            transaction.on_commit(partial(process_counters.count_batches, "telemetry", len(post.batches), values))
        intake.note_received()
        return cursor


def _stream(agent: Agent, post: TelemetryPost) -> AgentStream:
    found = AgentStream.objects.filter(agent=agent, uid=post.stream).first()
    if found is not None:
        return found
    # A node whose state folder does not survive a boot begins a stream at each: its oldest ones never continue.
    newest_first = AgentStream.objects.filter(agent=agent).order_by("-began_at", "-pk").values_list("pk", flat=True)
    if oldest := list(newest_first[MAX_STREAMS - 1 :]):
        AgentStream.objects.filter(pk__in=oldest).delete()
    # An unknown stream may not begin at 0: batches may have been discarded before the first post.
    return AgentStream.objects.create(agent=agent, uid=post.stream)


@dataclass
class _PostIntake:
    """A post that is being stored; the machine's row is locked."""

    agent: Agent
    post: TelemetryPost
    now: float
    changed: set[str] = field(default_factory=set)

    @property
    def offset(self) -> float:
        """Return the agent's clock minus ours; the post's transit time is neglected."""
        return self.post.sent_at - self.now

    @property
    def shift(self) -> int:
        """Return the seconds to subtract from the agent's times, which are whole for samples."""
        return round(self.offset) if abs(self.offset) > CLOCK_S else 0

    @property
    def event_shift(self) -> float:
        """Return the seconds to subtract from the times of events."""
        return self.offset if abs(self.offset) > EVENT_CLOCK_S else 0.0

    def store(self) -> None:
        self._note_boot()
        sampled = []
        for batch in self.post.batches:
            batch.at -= self.shift
            for event in batch.events:
                self._correct(event)
            if (batch.n or batch.host) and self._has_plausible_time(batch):
                sampled.append(batch)
        ids = self._note_gpus(sampled)
        self._store_events()
        if sampled:
            Frame.objects.bulk_create([self._frame(batch, ids) for batch in sampled])
            self._note_unmerged(min(batch.at for batch in sampled))
            self._note_newest(max(sampled, key=lambda batch: batch.at))
            live.after_commit(self.agent, sampled, self.now)
        if kinds := sorted({event.kind for batch in self.post.batches for event in batch.events}):
            live.publish_events(self.agent, kinds)

    def note_received(self) -> None:
        agent = self.agent
        agent.heard_at, agent.version, agent.stream = timezone.now(), self.post.agent, self.post.stream
        agent.clock_offset_s = round(self.offset, 1)
        agent.save(update_fields=["heard_at", "version", "stream", "clock_offset_s", *sorted(self.changed)])

    def _has_plausible_time(self, batch: SampleBatch) -> bool:
        """Return whether the batch's time is plausible; samples of another age would never be found."""
        is_plausible = EARLIEST <= batch.at <= self.now + AHEAD_S
        if not is_plausible:
            text = "%s: samples of second %d are left out: implausible time (logged once an hour)"
            warn.once(("samples", self.agent.pk), text, self.agent, batch.at)
        return is_plausible

    def _note_boot(self) -> None:
        if self.post.boot_id and self.post.boot_id != self.agent.boot_id:
            self.agent.boot_id, self.agent.kernel_seq = self.post.boot_id, -1
            self.changed |= {"boot_id", "kernel_seq"}
            machines.forget_counters(self.agent)

    def _correct(self, event: MachineEvent) -> None:
        """Convert an event's times to the portal's clock."""
        # Facts and counters are compared with samples, whose times stay as they are if the clock is only a little off.
        shift = self.shift if event.kind in COMPARED_WITH_SAMPLES else self.event_shift
        event.at = self._to_portal_time(event.at, shift)
        for name in ("since", "last_at", "planted_until"):
            if (time_value := untrusted.number(event.more.get(name), untrusted.MAX_UNIX_TIME)) is not None:
                event.more[name] = self._to_portal_time(time_value, shift)

    def _note_gpus(self, sampled: Sequence[SampleBatch]) -> dict[str, int]:
        """Bring the machine's GPUs in step with facts and samples; return the row ids of those that are its own."""
        uuids = {uuid for batch in sampled for uuid in batch.gpus}
        facts = next((event for batch in self.post.batches for event in batch.events if event.kind == "facts"), None)
        if facts is None and len(found := machines.present(self.agent, uuids)) == len(uuids):
            return found
        gpus = machines.MachineGpus.read(self.agent, [*uuids, *(machines.uuids_of(facts.more) if facts else ())])
        for batch in self.post.batches:
            if facts is not None and any(event is facts for event in batch.events):
                gpus.note_facts(facts.more, self._moment(facts.at))
                self.changed.add("facts")
            if any(batch is other for other in sampled):
                gpus.note_sampled(batch.gpus, self._moment(batch.at))
        gpus.write()
        return gpus.ids()

    def _store_events(self) -> None:
        others, counters = [], {}
        for batch in self.post.batches:
            for event in batch.events:
                if event.kind == "gpu.counters":
                    counters[event.gpu or ""] = event.more, self._moment(event.at)
                elif event.kind != "facts":
                    others.append(event)
                if event.kind == "driver.reloaded":
                    counters.clear()
                    machines.forget_counters(self.agent)
        machines.note_counters(self.agent, counters)
        if events.store(self.agent, others, self.post.boot_id):
            self.changed.add("kernel_seq")
        if any(event.kind in JUDGED_AT_ONCE for event in others):
            transaction.on_commit(HEALTH.request)

    def _to_portal_time(self, at: float, shift: float) -> float:
        """Return an event's time by the portal's clock, at most AHEAD_S ahead: else it would stay the newest."""
        return min(at - shift, self.now + AHEAD_S)

    def _frame(self, batch: SampleBatch, ids: Mapping[str, int]) -> Frame:
        row_indices = [row for row, uuid in enumerate(batch.gpus) if uuid in ids]
        values = batch.values if len(row_indices) == len(batch.gpus) else batch.values[:, row_indices]
        data = frames.encode(batch.at, batch.period, [ids[batch.gpus[row]] for row in row_indices], batch.host, values)
        return Frame(agent=self.agent, at=batch.at, until=batch.at + batch.period * max(1, batch.n), data=data)

    def _note_unmerged(self, first: int) -> None:
        """Move the merge position back for late samples, or set it for the first ones."""
        window = first // WINDOW_S * WINDOW_S
        if window < self.agent.merged_to or not self.agent.merged_to:
            self.agent.merged_to = window
            self.changed.add("merged_to")

    def _note_newest(self, batch: SampleBatch) -> None:
        last = batch.at + batch.period * max(0, batch.n - 1)
        if self.agent.sampled_at is not None and last < self.agent.sampled_at and last > self.agent.sampled_at - 3600:
            return  # another stream's backlog
        previous = self.agent.newest.get("gpus", {})
        gpus = {uuid: _newest_of(batch, row, previous.get(uuid, {})) for row, uuid in enumerate(batch.gpus)}
        host = {name: value for name, value in batch.host.items() if value == value}
        self.agent.sampled_at, self.agent.newest = last, {"at": last, "host": host, "gpus": gpus}
        self.agent.processes = [msgspec.to_builtins(process) for process in batch.processes or ()]
        self.changed |= {"sampled_at", "newest", "processes"}

    def _moment(self, at: float) -> datetime:
        return datetime.fromtimestamp(max(0.0, at), UTC)


def _newest_of(batch: SampleBatch, row: int, previous: dict[str, Any]) -> dict[str, Any]:
    """Return the last second's values of a GPU, and since when it has been idle."""
    if not batch.n:
        return previous
    last = batch.values[:, row, -1].tolist()
    values = {name: last[PLACE[name]] for name in NEWEST if last[PLACE[name]] != MISSING}
    busy = np.flatnonzero(batch.values[PLACE["gpu_percent"], row] >= BUSY_PERCENT)
    if "gpu_percent" in values:
        quiet_since = (
            batch.at + batch.period * (int(busy[-1]) + 1) if len(busy) else previous.get("quiet_since", batch.at)
        )
        values["quiet_since"] = quiet_since
    return values


def _not_its_token(node: str) -> Problem:
    return Problem(
        401,
        f"{node} does not report with this token. A sysadmin creates one with `vigil agent enroll {node}`.",
        kind="unauthorized",
        headers={"WWW-Authenticate": 'Bearer realm="Vigil"'},
    )

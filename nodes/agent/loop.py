"""Run the agent's main loop: sample, collect events and store them; another thread posts. The loop never blocks."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gpus.reader import GpuReader
from nodes.agent import disks, proc
from nodes.agent.facts import facts
from nodes.agent.gpus.history import GpuHistory
from nodes.agent.gpus.processes import GpuProcesses
from nodes.agent.gpus.samples import SampleWindow
from nodes.agent.gpus.watch import GpuWatch
from nodes.agent.host import PROC, SYS, HostSampler
from nodes.agent.inlet.probe import InletProbe
from nodes.agent.kernel_log.aggregation import XidAggregator
from nodes.agent.kernel_log.reader import KernelLog
from nodes.agent.kernel_log.watch import KernelWatch
from nodes.agent.lasting_conditions import LastingConditions
from nodes.agent.links import LinkWatch
from nodes.agent.log import StatusLog, log
from nodes.agent.mounts import MountProbes
from nodes.agent.planting import PlantedFaults
from nodes.agent.reporting import batches
from nodes.agent.reporting.buffer import LIMIT_BYTES, Buffer, batches_of, with_log_position
from nodes.agent.reporting.enrolment import AgentTokens
from nodes.agent.reporting.posting import ReportClient
from nodes.agent.reporting.sending import BatchSender, RetryDelays
from nodes.agent.settings import AgentSettings, warnings
from nodes.agent.software import SoftwareProbe
from nodes.agent.version import VERSION

WINDOW = 10  # periods per batch
CLOCK_STEP_SECONDS = 0.5  # a larger jump of the wall clock means that it was set
LAST_POST_SECONDS = 1.0
DEFERRABLE = frozenset({"gpu.counters"})  # kinds that are sent with the next samples
Event = dict[str, Any]


@dataclass(frozen=True)
class AgentTiming:
    """Durations in seconds; tests use shorter ones."""

    period: float = 1.0

    @property
    def settle(self) -> float:
        """Return how long to wait after the first of several events: they mostly arrive together."""
        return 0.3 * self.period

    @property
    def margin(self) -> float:
        """Return how long to wait for a window's last sample."""
        return 0.1 * self.period

    def seconds_of(self, count: float) -> float:
        return count * self.period


class AgentLoop:
    """The agent. Raises nodes.agent.reporting.buffer.StateUnusable if another agent uses the state folder."""

    def __init__(
        self,
        settings: AgentSettings,
        timing: AgentTiming,
        *,
        limit_bytes: int = LIMIT_BYTES,
        proc_root: Path = PROC,
        sys: Path = SYS,
    ) -> None:
        self._settings, self._timing, self._proc = settings, timing, proc_root
        self._status = StatusLog()
        self._boot_id = proc.boot_id(proc_root)
        self._buffer = Buffer(settings.state, limit_bytes=limit_bytes)
        self._conditions = LastingConditions(settings.state)
        self._gpus = GpuWatch(
            GpuReader(
                every=timing.period,
                detailed=True,
                silent_seconds=timing.seconds_of(15),
                retry_seconds=(timing.seconds_of(5), timing.seconds_of(600)),
            ),
            GpuHistory(settings.state),
            SampleWindow(timing.period),
            on_xid=lambda event: self._kernel.add_nvml_event(event),
            lost=set(self._conditions.since_by_subject("gpu.lost")),
            silent_since=self._conditions.since_by_subject("gpu.silent").get(""),
        )
        self._kernel = self._kernel_watch()
        self._faults = PlantedFaults(settings.takes_faults, proc_root)
        self._host, self._mounts = (
            HostSampler(proc_root, sys),
            MountProbes(self._faults.probe, self._conditions.since_by_subject("mount.slow")),
        )
        self._links = LinkWatch(sys)
        self._processes = GpuProcesses(proc_root)
        self._inlet = InletProbe.from_settings(settings, every=timing.seconds_of(60))
        self._software = SoftwareProbe(every=timing.seconds_of(3600), sys=sys)
        self._refused: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sender = self._make_sender()
        self._events: list[Event] = self._boot_event()
        self._urgent_since: float | None = None
        self._urgent_sent_at = 0.0
        self._facts: dict[str, Any] = {}
        self._facts_due = time.monotonic() + timing.seconds_of(60)
        self._first = self._slot(time.time())
        self._offset = time.time() - time.monotonic()
        self._is_ending = False

    def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        waking = self._catch_signals()
        self._kernel.open()
        self._host.sample()
        self._probe_mounts()
        self._sender.start()
        for sentence in warnings(self._settings):
            log(sentence)
        log(
            f"Agent {VERSION} of {self._settings.node} reports to {self._settings.url}, state in {self._settings.state}"
        )
        while not self._is_ending:
            self._run_once()
            self._wait(waking)
        self._end()

    def _run_once(self) -> None:
        """Read what has arrived, and store what is due."""
        self._kernel.read()
        self._note([*self._gpus.poll(), *self._mounts.poll(time.time())])
        self._events += self._faults.advance(self._kernel.log, self._gpus, self._probed)
        self._poll_inlet()
        self._software.poll()
        self._log_gpu_status()
        self._update_facts()
        self._split_rejected()
        self._note_clock()
        self._close_windows()
        self._send_urgent_events()
        self._sender.check_timeout()

    def _note(self, events: list[Event]) -> None:
        self._conditions.note(events)
        self._events += self._faults.marked(events)

    def _wait(self, waking: int) -> None:
        """Wait for a kernel record, a GPU sample or a signal, at most until something is due."""
        poll = select.poll()
        for file in (waking, self._kernel.log.fileno(), self._gpus.reader.fileno()):
            if file is not None:
                poll.register(file, select.POLLIN)
        with suppress(InterruptedError):
            poll.poll(1000 * self._seconds_until_due())
        with suppress(BlockingIOError):
            os.read(waking, 512)

    def _seconds_until_due(self) -> float:
        now = time.monotonic()
        due = [self._timing.period, self._slot_time(self._first + WINDOW) + self._timing.margin - time.time()]
        if self._urgent_since is not None:
            due.append(max(self._urgent_since + self._timing.settle, self._urgent_sent_at + self._timing.period) - now)
        if self._kernel.is_read and self._kernel.log.fileno() is None:
            due.append(self._timing.seconds_of(0.2))  # a plain file does not wake us
        return max(0.001, min(due))

    # Windows of samples.

    def _slot(self, wall: float) -> int:
        return int(wall // self._timing.period)

    def _slot_time(self, slot: int) -> float:
        return slot * self._timing.period

    def _note_clock(self) -> None:
        """If the wall clock was set, end the window by the old clock and begin a new one."""
        wall, now = time.time(), time.monotonic()
        expected = now + self._offset
        self._offset = wall - now
        if abs(wall - expected) > CLOCK_STEP_SECONDS:
            log(f"The clock was set by {wall - expected:+.1f} s.")
            if (n := min(self._slot(expected) - self._first, WINDOW)) > 0:
                self._append_window(n)
            self._first = self._slot(wall)

    def _close_windows(self) -> None:
        """Store windows that are over: several if this process was suspended, without those that have no samples."""
        wall = time.time()
        while wall >= self._slot_time(self._first + WINDOW) + self._timing.margin:
            now = self._slot(wall)
            self._append_window(WINDOW, is_last=now - self._first < 2 * WINDOW)
            self._first += WINDOW
            if now - self._first >= WINDOW:
                sampled = self._gpus.samples.first_from(self._first)
                self._first = now if sampled is None else min(sampled, now)

    def _append_window(self, n: int, *, is_last: bool = True) -> None:
        """Store a window. `is_last`: it gets the host's current values."""
        self._note(self._links.read(time.time()))
        events, *more = [*batches.in_chunks(self._take_events())] or [[]]
        batch = batches.with_samples(
            at=self._slot_time(self._first),
            period=self._timing.period,
            n=n,
            samples=self._gpus.samples.take(self._first, n),
            host=self._host_values() if is_last else {},
            processes=self._processes.payloads(self._gpus.newest_counters, self._gpus.gpus),
            events=events,
        )
        self._kernel.xids.begin_window()
        self._append(batch)
        for part in more:  # the portal accepts no more events per batch
            self._append_events(part)
        self._kernel.open()
        self._probe_mounts()
        self._make_room()

    def _host_values(self) -> dict[str, float | None]:
        inlet = self._inlet.values() if self._inlet else {}
        return {**self._host.sample(), **self._mounts.values(), **inlet}

    def _poll_inlet(self) -> None:
        if self._inlet is not None:
            self._inlet.poll()
            problem = self._inlet.problem
            self._status.update("inlet", f"The inlet temperature cannot be read: {problem}" if problem else "")

    # Events.

    def _send_urgent_events(self) -> None:
        """Store new events without waiting for the window, but for a moment in case more follow."""
        now = time.monotonic()
        if not (self._kernel.has_urgent() or any(event["kind"] not in DEFERRABLE for event in self._events)):
            self._urgent_since = None
            return
        if self._urgent_since is None:
            self._urgent_since = now
        if now - self._urgent_since >= self._timing.settle and now - self._urgent_sent_at >= self._timing.period:
            self._urgent_sent_at, self._urgent_since = now, None
            self._append_events(self._take_events(), is_urgent=True)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return [*events, *self._faults.marked(self._kernel.take())]

    def _append_events(self, events: list[Event], *, is_urgent: bool = False) -> None:
        for part in batches.in_chunks(events):
            self._append(batches.events_only(part, at=time.time(), period=self._timing.period), is_urgent=is_urgent)

    def _append(self, batch: bytes, *, is_urgent: bool = False) -> None:
        """Store a batch together with the kernel log position, before it is sent."""
        line = with_log_position(batch, self._boot_id, self._kernel.seq)
        self._buffer.append(line, is_sync=is_urgent or b'"kind":"xid"' in batch or b'"kind":"sxid"' in batch)
        problem = self._buffer.problem
        consequence = "Reports wait in memory; if this lasts, the oldest samples are discarded."
        self._status.update(
            "disk", f"{self._settings.state} cannot be written ({problem}). {consequence}" if problem else ""
        )
        self._sender.notify(is_urgent=is_urgent)

    def _make_room(self) -> None:
        """Discard the oldest samples, once their events are stored again."""
        discarded = self._buffer.surplus()
        if discarded is None:
            return
        found = batches_of(discarded.lines)
        events = [event for batch in found for event in batch.get("events", ())]
        gap = batches.gap_in(found, now=time.time())
        if self._buffer.is_over_hard_limit:
            gap = [{**gap_event, "events": len(events)} for gap_event in gap]
            events = []
        self._status.update("room", f"{self._settings.state} is full: the oldest samples are discarded.")
        self._append_events([*batches.events_to_resend(events), *gap])
        self._buffer.drop(discarded)

    def _split_rejected(self) -> None:
        """Store a batch that the portal rejected again in parts, down to the event at fault."""
        with suppress(queue.Empty):
            while True:
                batch = json.loads(self._refused.get_nowait())
                events = batch.get("events", [])
                gap = batches.gap_in([batch], now=time.time(), problem="the portal refused them")
                if not gap and len(events) <= 1:
                    log(f"The portal rejects an event, which is lost: {events[0].get('kind') if events else 'none'}.")
                    continue
                self._append_events(gap)
                for part in [events] if gap else [[event] for event in events]:
                    self._append_events(part)

    def _boot_event(self) -> list[Event]:
        if self._buffer.boot_id == self._boot_id:
            return []
        booted_at = round(time.time() - proc.uptime(self._proc), 3)
        return [{"kind": "boot", "at": booted_at, "booted_at": booted_at, "boot_id": self._boot_id}]

    def _update_facts(self) -> None:
        """Report facts once NVML has listed the GPUs, or is silent for too long; then when they change."""
        is_due = time.monotonic() >= self._facts_due
        if not is_due and not (self._gpus.is_initialised and (self._gpus.has_changed or not self._facts)):
            return
        self._gpus.has_changed = False
        self._facts_due = time.monotonic() + self._timing.seconds_of(60)
        absent = self._gpus.absent
        found = facts(
            node=self._settings.node,
            machine=self._gpus.reader.inventory,
            gpus=self._gpus.described_gpus(),
            problems={"kernel_log": self._kernel.log.problem, "gpus": absent.why if absent else ""},
            probed=self._probed(),
            software=self._software.facts(),
            takes_faults=self._settings.takes_faults,
            proc_root=self._proc,
        )
        if found != self._facts:
            self._facts = found
            self._events.append({"kind": "facts", "at": round(time.time(), 3), **found})

    def _log_gpu_status(self) -> None:
        watch = self._gpus
        if watch.is_silent:
            self._status.update("gpus", "NVML does not respond. Another process tries again.")
        elif watch.absent:
            self._status.update("gpus", f"GPUs are not monitored: {watch.absent.why}")
        elif watch.reader.inventory:
            self._status.update("gpus", f"GPUs: {len(watch.gpus)}, driver {watch.reader.inventory.driver}.")

    def _probe_mounts(self) -> None:
        self._note(self._mounts.start_probes(self._probed()))

    def _probed(self) -> tuple[str, ...]:
        return disks.probed(self._settings.mounts, self._proc)

    # Start and end.

    def _kernel_watch(self) -> KernelWatch:
        reported_seq = self._buffer.kernel_seq if self._buffer.boot_id == self._boot_id else -1
        xids = XidAggregator(self._boot_id, self._gpus.uuid_at, self._timing.seconds_of(5))
        return KernelWatch(KernelLog(self._settings.kmsg, reported_seq), xids, self._status, self._proc)

    def _make_sender(self) -> BatchSender:
        node, pace = self._settings.node, self._timing
        return BatchSender(
            ReportClient(self._settings.url, node),
            AgentTokens(self._settings.token_file, self._settings.state, node),
            self._buffer,
            node=node,
            boot_id=self._boot_id,
            on_rejected=self._refused.put,
            on_plant=self._faults.requests.put,
            waits=RetryDelays(pace.period, pace.seconds_of(60)),
        )

    def _catch_signals(self) -> int:
        """Return a descriptor that becomes readable with a signal."""
        reading, writing = os.pipe()
        for file in (reading, writing):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return reading

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _end(self) -> None:
        """Store what is left and stop the children; processes that cannot be killed are left alone."""
        self._kernel.read()
        n = min(self._slot(time.time()) - self._first, WINDOW)
        if n > 0:
            self._append_window(n)
        else:
            self._append_events(self._take_events())
        self._gpus.reader.close()
        self._mounts.close()
        if self._inlet is not None:
            self._inlet.close()
        self._software.close()
        self._sender.finish(LAST_POST_SECONDS)
        self._buffer.close()
        log("Stopped.")

"""The agent's one loop: it samples, hears and writes; another thread posts. Nothing in it waits for anybody."""

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
from nodes.agent import batches, disks, proc
from nodes.agent.buffer import LIMIT_BYTES, Buffer, batches_of, marked
from nodes.agent.enrolment import Tokens
from nodes.agent.facts import facts
from nodes.agent.folding import Xids
from nodes.agent.gpu_watch import GpuWatch
from nodes.agent.host import PROC, SYS, Host
from nodes.agent.kernel_log import KernelLog
from nodes.agent.kernel_watch import KernelWatch
from nodes.agent.lasting import Lasting
from nodes.agent.mounts import Mounts
from nodes.agent.posting import Portal
from nodes.agent.processes import Processes
from nodes.agent.remembered import Remembered
from nodes.agent.samples import Samples
from nodes.agent.sending import Sender, Waits
from nodes.agent.settings import Settings, warnings
from nodes.agent.speaking import Told, say
from nodes.agent.version import VERSION

WINDOW = 10  # periods of a batch
CLOCK_STEP_SECONDS = 0.5  # a wall clock that moved by more was set
LAST_POST_SECONDS = 1.0
PATIENT = frozenset({"gpu.counters"})  # kinds that go with the next samples
Event = dict[str, Any]


@dataclass(frozen=True)
class Pace:
    """Seconds; tests are quicker."""

    period: float = 1.0

    @property
    def settle(self) -> float:
        """After the first of several events: they mostly come together."""
        return 0.3 * self.period

    @property
    def margin(self) -> float:
        """For a window's last look to come."""
        return 0.1 * self.period

    def of_periods(self, count: float) -> float:
        return count * self.period


class Agent:
    """Raises nodes.agent.buffer.Refused where another agent has the folder."""

    def __init__(
        self, settings: Settings, pace: Pace, *, limit_bytes: int = LIMIT_BYTES, proc_root: Path = PROC, sys: Path = SYS
    ) -> None:
        self._settings, self._pace, self._proc = settings, pace, proc_root
        self._told = Told()
        self._boot_id = proc.boot_id(proc_root)
        self._buffer = Buffer(settings.state, limit_bytes=limit_bytes)
        self._lasting = Lasting(settings.state)
        self._gpus = GpuWatch(
            GpuReader(
                every=pace.period,
                everything=True,
                silent_seconds=pace.of_periods(15),
                retry_seconds=(pace.of_periods(5), pace.of_periods(600)),
            ),
            Remembered(settings.state),
            Samples(pace.period),
            hear_xid=lambda event: self._kernel.hear_nvml(event),
            lost=set(self._lasting.of("gpu.lost")),
            silent_since=self._lasting.of("gpu.silent").get(""),
        )
        self._kernel = self._kernel_watch()
        self._host, self._mounts = Host(proc_root, sys), Mounts(slow=self._lasting.of("mount.slow"))
        self._processes = Processes(proc_root)
        self._refused: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sender = self._make_sender()
        self._events: list[Event] = self._boot_event()
        self._urgent_since: float | None = None
        self._told_at = 0.0
        self._facts: dict[str, Any] = {}
        self._facts_due = time.monotonic() + pace.of_periods(60)
        self._first = self._slot(time.time())
        self._offset = time.time() - time.monotonic()
        self._is_ending = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        waking = self._catch_signals()
        self._kernel.open()
        self._host.look()
        self._ask_mounts()
        self._sender.start()
        for sentence in warnings(self._settings):
            say(sentence)
        say(f"Agent {VERSION} of {self._settings.node}: tells {self._settings.url}, keeps {self._settings.state}.")
        while not self._is_ending:
            self._turn()
            self._wait(waking)
        self._end()

    def _turn(self) -> None:
        """Take in what has come, and write what is due."""
        self._kernel.look()
        self._note([*self._gpus.tend(), *self._mounts.look(time.time())])
        self._say_gpus()
        self._tell_facts()
        self._split_refused()
        self._note_clock()
        self._close_windows()
        self._tell_at_once()
        self._sender.tend()

    def _note(self, events: list[Event]) -> None:
        self._lasting.note(events)
        self._events += events

    def _wait(self, waking: int) -> None:
        """For a record, a look or a signal; else until something is due."""
        poll = select.poll()
        for file in (waking, self._kernel.log.fileno(), self._gpus.reader.fileno()):
            if file is not None:
                poll.register(file, select.POLLIN)
        with suppress(InterruptedError):
            poll.poll(1000 * self._left())
        with suppress(BlockingIOError):
            os.read(waking, 512)

    def _left(self) -> float:
        now = time.monotonic()
        due = [self._pace.period, self._slot_time(self._first + WINDOW) + self._pace.margin - time.time()]
        if self._urgent_since is not None:
            due.append(max(self._urgent_since + self._pace.settle, self._told_at + self._pace.period) - now)
        if self._kernel.is_read and self._kernel.log.fileno() is None:
            due.append(self._pace.of_periods(0.2))  # a plain file wakes nobody
        return max(0.001, min(due))

    # Windows of samples.

    def _slot(self, wall: float) -> int:
        return int(wall // self._pace.period)

    def _slot_time(self, slot: int) -> float:
        return slot * self._pace.period

    def _note_clock(self) -> None:
        """A wall clock that was set ends the window by the clock before, and begins another."""
        wall, now = time.time(), time.monotonic()
        before = now + self._offset
        self._offset = wall - now
        if abs(wall - before) > CLOCK_STEP_SECONDS:
            say(f"The clock was set by {wall - before:+.1f} s.")
            if (n := min(self._slot(before) - self._first, WINDOW)) > 0:
                self._append_window(n)
            self._first = self._slot(wall)

    def _close_windows(self) -> None:
        """Those that are over: several where this process was held; then those without samples are left out."""
        wall = time.time()
        while wall >= self._slot_time(self._first + WINDOW) + self._pace.margin:
            now = self._slot(wall)
            self._append_window(WINDOW, is_last=now - self._first < 2 * WINDOW)
            self._first += WINDOW
            if now - self._first >= WINDOW:
                sampled = self._gpus.samples.first_from(self._first)
                self._first = now if sampled is None else min(sampled, now)

    def _append_window(self, n: int, *, is_last: bool = True) -> None:
        """`is_last`: what the host does now belongs to it."""
        events, *more = [*batches.in_parts(self._take_events())] or [[]]
        batch = batches.with_samples(
            at=self._slot_time(self._first),
            period=self._pace.period,
            n=n,
            samples=self._gpus.samples.take(self._first, n),
            host={**self._host.look(), **self._mounts.values()} if is_last else {},
            processes=self._processes.tell(self._gpus.newest_counters, self._gpus.gpus),
            events=events,
        )
        self._kernel.xids.begin_window()
        self._append(batch)
        for part in more:  # the portal takes no more of them in a batch
            self._append_events(part)
        self._kernel.open()
        self._ask_mounts()
        self._make_room()

    # Events.

    def _tell_at_once(self) -> None:
        """What is no repetition waits for no window, but a moment for what comes with it."""
        now = time.monotonic()
        if not (self._kernel.has_news() or any(event["kind"] not in PATIENT for event in self._events)):
            self._urgent_since = None
            return
        if self._urgent_since is None:
            self._urgent_since = now
        if now - self._urgent_since >= self._pace.settle and now - self._told_at >= self._pace.period:
            self._told_at, self._urgent_since = now, None
            self._append_events(self._take_events(), is_urgent=True)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return [*events, *self._kernel.take()]

    def _append_events(self, events: list[Event], *, is_urgent: bool = False) -> None:
        for part in batches.in_parts(events):
            self._append(batches.of_events(part, at=time.time(), period=self._pace.period), is_urgent=is_urgent)

    def _append(self, batch: bytes, *, is_urgent: bool = False) -> None:
        """Written before it is sent: with it goes how far the kernel log is read."""
        line = marked(batch, self._boot_id, self._kernel.seq)
        self._buffer.append(line, is_sync=is_urgent or b'"kind":"xid"' in batch or b'"kind":"sxid"' in batch)
        trouble = self._buffer.problem
        kept = "What there is to tell waits in memory; the oldest samples go if that lasts."
        self._told.say("disk", f"{self._settings.state} can't be written ({trouble}). {kept}" if trouble else "")
        self._sender.hurry(is_urgent=is_urgent)

    def _make_room(self) -> None:
        """Give the oldest samples up, once their events are told again."""
        given = self._buffer.surplus()
        if given is None:
            return
        told = batches_of(given.lines)
        events = [event for batch in told for event in batch.get("events", ())]
        gap = batches.gap_in(told, now=time.time())
        if self._buffer.is_far_beyond:
            gap = [{**one, "events": len(events)} for one in gap]
            events = []
        self._told.say("room", f"{self._settings.state} is full: the oldest samples are given up.")
        self._append_events([*batches.worth_telling_again(events), *gap])
        self._buffer.drop(given)

    def _split_refused(self) -> None:
        """What the portal would not have is told by parts, down to the event that is to blame."""
        with suppress(queue.Empty):
            while True:
                told = json.loads(self._refused.get_nowait())
                events = told.get("events", [])
                gap = batches.gap_in([told], now=time.time(), problem="the portal refused them")
                if not gap and len(events) <= 1:
                    say(f"An event is lost, as the portal refuses it: {events[0].get('kind') if events else 'none'}.")
                    continue
                self._append_events(gap)
                for part in [events] if gap else [[event] for event in events]:
                    self._append_events(part)

    def _boot_event(self) -> list[Event]:
        if self._buffer.boot_id == self._boot_id:
            return []
        booted_at = round(time.time() - proc.uptime(self._proc), 3)
        return [{"kind": "boot", "at": booted_at, "booted_at": booted_at, "boot_id": self._boot_id}]

    def _tell_facts(self) -> None:
        """Once NVML has said what there is, or says nothing for too long; then when something is otherwise."""
        is_due = time.monotonic() >= self._facts_due
        if not is_due and not (self._gpus.is_known and (self._gpus.has_changed or not self._facts)):
            return
        self._gpus.has_changed = False
        self._facts_due = time.monotonic() + self._pace.of_periods(60)
        absent = self._gpus.absent
        found = facts(
            node=self._settings.node,
            machine=self._gpus.reader.machine,
            gpus=self._gpus.known(),
            problems={"kernel_log": self._kernel.log.problem, "gpus": absent.why if absent else ""},
            probed=self._probed(),
            proc_root=self._proc,
        )
        if found != self._facts:
            self._facts = found
            self._events.append({"kind": "facts", "at": round(time.time(), 3), **found})

    def _say_gpus(self) -> None:
        watch = self._gpus
        if watch.is_silent:
            self._told.say("gpus", "NVML does not answer. It is asked again, by another process.")
        elif watch.absent:
            self._told.say("gpus", f"No GPU is read here: {watch.absent.why}")
        elif watch.reader.machine:
            self._told.say("gpus", f"GPUs: {len(watch.gpus)}, driver {watch.reader.machine.driver}.")

    def _ask_mounts(self) -> None:
        self._note(self._mounts.ask(self._probed()))

    def _probed(self) -> tuple[str, ...]:
        return disks.probed(self._settings.mounts, self._proc)

    # Beginning and end.

    def _kernel_watch(self) -> KernelWatch:
        told_seq = self._buffer.kernel_seq if self._buffer.boot_id == self._boot_id else -1
        xids = Xids(self._boot_id, self._gpus.uuid_at, self._pace.of_periods(5))
        return KernelWatch(KernelLog(self._settings.kmsg, told_seq), xids, self._told, self._proc)

    def _make_sender(self) -> Sender:
        node, pace = self._settings.node, self._pace
        return Sender(
            Portal(self._settings.url, node),
            Tokens(self._settings.token_file, self._settings.state, node),
            self._buffer,
            node=node,
            boot_id=self._boot_id,
            refused=self._refused.put,
            waits=Waits(pace.period, pace.of_periods(60)),
        )

    def _catch_signals(self) -> int:
        """A file that becomes readable with a signal."""
        reading, writing = os.pipe()
        for file in (reading, writing):
            os.set_blocking(file, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._be_ended)
        return reading

    def _be_ended(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True

    def _end(self) -> None:
        """Write what there is, and leave nobody behind; what can't be killed is left to itself."""
        self._kernel.look()
        n = min(self._slot(time.time()) - self._first, WINDOW)
        if n > 0:
            self._append_window(n)
        else:
            self._append_events(self._take_events())
        self._gpus.reader.close()
        self._mounts.close()
        self._sender.finish(LAST_POST_SECONDS)
        self._buffer.close()
        say("Ended.")

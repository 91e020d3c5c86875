"""The kernel log's Xids, each told once: what was read before a restart is read again, and not told again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpus.reports import DriverEvent
from nodes.agent import proc
from nodes.agent.folding import Xids
from nodes.agent.kernel_log import KernelLog, Record
from nodes.agent.speaking import Told
from nodes.agent.xids import Driver, may_say

REMEDY = "Xids are told by NVML alone. Run the agent as root or with CAP_SYSLOG, and let it see /dev/kmsg."
Event = dict[str, Any]


@dataclass
class KernelWatch:
    log: KernelLog
    xids: Xids
    told: Told
    proc: Path
    _driver: Driver = field(default_factory=Driver)
    _overruns: list[Event] = field(default_factory=list)

    @property
    def seq(self) -> int:
        """The last record that is told, or has nothing to tell."""
        return max(self.log.last_seq, self.log.told_seq)

    @property
    def is_read(self) -> bool:
        return not self.log.problem

    def open(self) -> None:
        """Again and again where it could not be."""
        if not self.is_read:
            self.log.open()
            self.told.say("kernel log", f"{self.log.problem}. {REMEDY}" if self.log.problem else "")

    def look(self) -> None:
        """Read what has come."""
        records = self.log.read()
        if not records and not self.log.overruns:
            return
        now, wall, uptime = time.monotonic(), time.time(), proc.uptime(self.proc)
        for record in records:
            if may_say(record.raw):
                self._hear(record, now, wall, uptime)
        for first, last in self.log.overruns:
            self._overruns.append({"kind": "kmsg.overrun", "at": round(wall, 3), "from_seq": first, "to_seq": last})
        self.log.overruns.clear()

    def hear_nvml(self, event: DriverEvent) -> None:
        self.xids.hear_nvml(event.gpu.bus, event.value, at=event.time, now=time.monotonic())

    def has_news(self) -> bool:
        return bool(self._overruns) or self.xids.has_news(time.monotonic(), is_kernel_log_read=self.is_read)

    def take(self) -> list[Event]:
        """Events, up to `seq`."""
        overruns, self._overruns = self._overruns, []
        return [*overruns, *self.xids.take(time.monotonic(), is_kernel_log_read=self.is_read)]

    def _hear(self, record: Record, now: float, wall: float, uptime: float) -> None:
        """Placed by how long ago it was: the log's clock drifts, and the wall clock may have been set since."""
        xid = self._driver.read(record.text, record.at)
        if xid is not None and record.seq > self.log.told_seq:
            self.xids.hear(xid, seq=record.seq, at=min(wall, wall - (uptime - record.at)), now=now)
